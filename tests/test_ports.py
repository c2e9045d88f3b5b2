"""Ports open to other programs: each is listed here, asks for a token, and nothing that it hears is
ever unpickled or larger than told."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.distributed.relay import Sender
from jaxtrain.generation.weight_sync.weight_links import WeightLinks
from jaxtrain_vllm.guard import MAX_BODY_BYTES, MIDDLEWARE, RequestGuard
from jaxtrain_vllm.listener import LOOPBACK

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("jaxtrain/**/*.py"), *ROOT.glob("jaxtrain_vllm/**/*.py")])

UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
PICKLES_ALLOWED = {
    "jaxtrain/environments/rewards/score.py": "the name of an error alone",
    "jaxtrain/environments/rewards/pool.py": "a socket pair to a worker of this process",
    "jaxtrain/environments/rewards/worker.py": "its other end",
    "jaxtrain/generation/sglang/tensors.py": "opcodes of pickles that it writes; reads none",
    "jaxtrain/huggingface/chat_template.py": "requests to a worker of this process; no replies",
    "jaxtrain/huggingface/template_worker.py": "its other end",
    "jaxtrain/huggingface/torch_files.py": "an unpickler that builds tensors alone",
    "jaxtrain/methods/trees/selection.py": "a pool of processes that this process starts",
}
LISTENS = re.compile(
    r"create_server|\.listen\(\d*\)|\.bind\(|TCPSite|SockSite|UnixSite|start_server|serve_forever"
    r"|HTTPServer\(|uvicorn|open_listeners\("
)
LISTENS_ALLOWED = {
    "jaxtrain_vllm/listener.py": "whoever does not show the token is not heard",
    "jaxtrain/distributed/hub.py": "behind a gate; looks for a free port",
    "jaxtrain/distributed/relay.py": "behind a gate",
    "jaxtrain/generation/weight_sync/weight_links.py": "behind a gate",
    "jaxtrain/generation/vllm/launch.py": "looks for free ports",
    "jaxtrain/environments/endpoint_app.py": "a key on every route; serve without one on loopback",
    "jaxtrain/environments/gym_config.py": "looks for a free port",
    "jaxtrain/environments/chat.py": "binds the arguments of a function",
    "jaxtrain/config/construct.py": "binds the arguments of a function",
    "jaxtrain/runs/doctor/collect.py": "looks whether it can listen, and closes at once",
}


IMPORTS = re.compile(r"^\s*(?:import|from)\s+([\w.]+)", re.MULTILINE)


def test_nothing_that_comes_from_elsewhere_is_unpickled():
    actual = {}
    for path in SOURCES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        modules = IMPORTS.findall(text)
        imported = {module.split(".")[0] for module in modules} & UNPICKLES
        imported |= {module for module in modules if "multiprocessing" in module}
        actual |= {name: imported} if imported else {}
        assert "allow_pickle=True" not in text and "yaml.unsafe_load" not in text, name
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), name
        assert len(re.findall(r"np\.load\(", text)) == text.count("allow_pickle=False"), name
    assert set(actual) == set(PICKLES_ALLOWED), actual


def test_every_port_is_known():
    """A new port belongs in the list, with its protection, and below."""
    actual = {
        str(path.relative_to(ROOT)) for path in SOURCES if LISTENS.search(path.read_text())
    } - {
        "jaxtrain_vllm/weight_receiver.py",
        "jaxtrain_vllm/engine.py",
    }  # their "listen" reads a link
    assert actual == set(LISTENS_ALLOWED)


def test_ports_are_this_machines_own_unless_told():
    assert VllmConfig().listen is None and LOOPBACK[0] == "127.0.0.1"  # what stands for None
    links, sender = WeightLinks(LOOPBACK[0], 0), Sender(1, b"token", LOOPBACK)
    try:
        for gate in (links.listener, sender._listener):
            addresses = {listener.getsockname()[0] for listener in gate.listeners}
            assert addresses <= {"127.0.0.1", "::1"}
            with socket.create_connection(("127.0.0.1", gate.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".ljust(64, b"."))
                stranger.settimeout(10)
                assert stranger.recv(1) == b""  # not a byte, and the end
    finally:
        links.listener.close()
        sender._listener.close()


async def app(scope, receive, send):
    """Reads all of the body and says how long it was."""
    size, extra = 0, True
    while extra:
        message = await receive()
        size, extra = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def ask(guard, path, *parts, kind="http", **headers):
    """(status, body) of one request; of a websocket what it was closed with."""
    output, remaining = [], list(parts)
    provided = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    ]

    async def receive():
        return {"type": "http.request", "body": remaining.pop(0), "more_body": bool(remaining)}

    async def send(message):
        output.append(message)

    scope = {"type": kind, "path": path, "headers": provided}
    asyncio.run(guard(scope, receive, send))
    return output[0].get("status", output[0].get("code")), output[-1].get("body")


def test_a_server_with_a_key_asks_for_it_at_every_route(monkeypatch):
    guard, key = RequestGuard(app, "secret"), "Bearer secret"
    for path in ("/pause", "/inference/v1/generate", "/init_weight_transfer_engine", "/v1/models"):
        assert ask(guard, path, b"abc", authorization=key) == (200, b"3")
        for wrong in ("Bearer other", "secret", "", "Bearer secret2"):
            assert ask(guard, path, b"abc", authorization=wrong)[0] == 401
        assert ask(guard, path, b"abc")[0] == 401
    assert ask(guard, "/health", b"")[0] == ask(guard, "/metrics", b"")[0] == 200
    assert ask(guard, "/health/../pause", b"")[0] == 401
    assert ask(guard, "/v1/realtime", kind="websocket")[0] == 1008
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert ask(RequestGuard(app), "/pause", b"")[0] == 200
    module, _, name = MIDDLEWARE.rpartition(".")
    assert (module, name) == (RequestGuard.__module__, RequestGuard.__name__)


@pytest.mark.parametrize("messages", [True, False])
def test_bodies_are_bounded_whether_told_or_not(messages):
    part = bytes(MAX_BODY_BYTES // 2)
    length = {"content_length": str(3 * len(part))} if messages else {}
    assert ask(RequestGuard(app, ""), "/v1/models", part, part, part, **length)[0] == 413
    assert ask(RequestGuard(app, ""), "/v1/models", part, part)[0] == 200
    assert ask(RequestGuard(app, ""), "/v1/models", b"", content_length="-1")[0] == 413
