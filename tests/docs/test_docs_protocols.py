"""docs/wire_protocols.md names every route, message and call that there is, and no other."""

import inspect
import re
from pathlib import Path

from jaxtrain.environments import endpoint_app, policy_server
from jaxtrain.generation.ray.hosts import ServerHost
from jaxtrain.generation.ray.service import RolloutService
from jaxtrain.generation.ray.worker import EpisodeWorker
from jaxtrain.generation.vllm import control
from jaxtrain.generation.weight_sync import weight_links
from jaxtrain.methods.drafts import state_server
from jaxtrain_vllm import adapter_store, guard, handshake, listener, payloads, wire

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "wire_protocols.md").read_text()
SECTIONS = {text.splitlines()[0]: text for text in PAGE.split("\n## ")}
METHOD = "GET|POST|PUT|DELETE"
ASKS = [
    *(ROOT / "jaxtrain" / "generation" / "vllm").glob("*.py"),
    *(ROOT / "jaxtrain" / "generation" / "weight_sync").glob("*.py"),
    *(ROOT / "jaxtrain" / "generation" / "sglang").glob("*.py"),
    ROOT / "jaxtrain" / "generation" / "frozen_policy.py",
    ROOT / "jaxtrain" / "environments" / "rewards" / "vllm_reward.py",
]
NO_ROUTES = {"/dev", "/v1"}


def routes_of(section: str) -> set[tuple[str, str]]:
    actual = re.findall(rf"^\| `({METHOD}) (\S+)`", SECTIONS[section], re.MULTILINE)
    assert len(actual) == len(set(actual)), "a route stands there twice"
    return set(actual)


def test_routes_of_a_vllm_server():
    text = "\n".join(path.read_text() for path in ASKS)
    paths = set(re.findall(r'"(/[a-z][a-z0-9_/]*)"', text)) - NO_ROUTES
    local_value = {(method, adapter_store.ROUTE + "NAME") for method in ("PUT", "DELETE")}
    messages = routes_of("A vLLM server")
    assert {path for _, path in messages - local_value} == paths | set(guard.OPEN)
    requests = set(re.findall(rf'"({METHOD})",\s*"(/[^"]+)"', text))
    assert len(requests) > 15 and not requests - messages, "another method"
    assert local_value <= messages
    assert f"more than {guard.MAX_BODY_BYTES >> 20} MiB is 413" in PAGE
    assert f"an answer of at most {control.MAX_ANSWER_BYTES >> 20} MiB" in PAGE
    assert f"above {adapter_store.MAX_BYTES >> 30} GiB; 507" in PAGE
    assert f"newest {adapter_store.MOST} stay" in PAGE


def test_messages_about_weights():
    files = [*Path(weight_links.__file__).parent.glob("*.py"), Path(payloads.__file__)]
    text = "\n".join(path.read_text() for path in files)
    commands = set(re.findall(r'"command": "(\w+)"', text)) - {"stage"}
    kinds = {f"stage {kind}" for kind in re.findall(r'"kind": "(\w+)"', text)}
    messages = set(re.findall(r"^\| `([a-z ]+)`", SECTIONS["Weights"], re.MULTILINE))
    assert messages == commands | kinds | {"hello", "fetch"}
    keys = set(re.findall(r'fetch = \{"(\w+)": size, "(\w+)": .*, "(\w+)": seconds\}', text)[0])
    for key in keys | {"from", "place", "pass_on"}:
        assert f"`{key}`" in SECTIONS["Weights"], key
    sizes = (handshake.GREETING_BYTES, handshake.REPLY_BYTES, handshake.PROOF_BYTES)
    assert "{} bytes, {} back, {} more, within {:g} s".format(*sizes, handshake.SECONDS) in PAGE
    assert f"at most {listener.MAX_WAITING} such connections" in PAGE
    assert f"little-endian; {wire.MAX_HEADER_BYTES >> 20} MiB at most" in PAGE
    assert f"{payloads.MESSAGE_BYTES >> 10} KiB at most" in PAGE
    assert f"connections ({payloads.MAX_STREAMS} at most)" in PAGE
    assert f"hung up on. {weight_links.HELLO_SECONDS:g} s" in PAGE


def test_routes_of_the_policy_endpoint():
    text = Path(policy_server.__file__).read_text()
    routes = re.findall(r'Route\("(\w+)", f"\{prefix\}(/[^"]+)"', text)
    assert len(routes) == text.count("Route(")
    messages = routes_of("The policy endpoint")
    assert messages == set(routes)
    assert f"is at most {endpoint_app.MAX_BYTES >> 20} MiB (413)" in PAGE


def test_routes_of_a_drafts_target():
    routes = set(re.findall(r'Route\("(\w+)", (\w+)', Path(state_server.__file__).read_text()))
    paths = {(method, getattr(state_server, name)) for method, name in routes}
    assert routes_of("The target of a draft") == paths
    section = SECTIONS["The target of a draft"]
    assert f"an answer {state_server.MAX_STATE_BYTES >> 30} GiB" in section
    assert f"at most {state_server.MAX_WAITING} requests wait" in section
    assert f"request is at most {endpoint_app.MAX_BYTES >> 20} MiB" in section


def test_calls_of_the_rollout_service():
    actual = {}
    for row in re.findall(r"^\| `(\w+\.\w+)` \|([^|]*)\|", PAGE, re.MULTILINE):
        actual[row[0]] = re.findall(r"`(\w+)`", row[1])
    remote_result = {
        f"{kind.__name__}.{name}": [*inspect.signature(method).parameters][1:]
        for kind in (RolloutService, EpisodeWorker, ServerHost)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    assert actual == remote_result
