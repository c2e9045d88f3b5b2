"""The guard of a server's routes checks the key and also accepts adapters, whole or not at all, and
lets a server leave without losing an answer."""

import asyncio
import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jaxtrain_vllm import adapter_store
from jaxtrain_vllm.adapter_store import FILES, AdapterStore
from jaxtrain_vllm.guard import RequestGuard

CONFIG, TENSORS = b'{"r": 8}', b"tensors" * 1000
SIZES = {
    file: [len(data), zlib.crc32(data)] for file, data in zip(FILES, (CONFIG, TENSORS), strict=True)
}


def send(store, name="jaxtrain-0a-3", sizes=SIZES, parts=(CONFIG + TENSORS,), method="PUT"):
    async def run():
        async def body():
            for part in parts:
                yield part

        return await store.handle(method, name, json.dumps(sizes), body())

    return asyncio.run(run())


def test_an_adapter_is_written_by_its_name_and_replaced(tmp_path):
    store = AdapterStore(tmp_path)
    full = CONFIG + TENSORS
    for parts in ((full,), (full[:3], full[3:11], full[11:])):
        assert send(store, parts=parts) == (200, {"path": str(tmp_path / "jaxtrain-0a-3")})
        actual = [(tmp_path / "jaxtrain-0a-3" / file).read_bytes() for file in FILES]
        assert actual == [CONFIG, TENSORS] and len(list(tmp_path.iterdir())) == 1
    assert send(store, method="DELETE") == (200, {}) == send(store, method="DELETE")
    assert not list(tmp_path.iterdir())


CONFIG_FILE = FILES[0]


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"name": "../evil"}, 400, "no name"),
        ({"name": ".hidden"}, 400, "no name"),
        ({"name": "a/b"}, 400, "no name"),
        ({"name": "x" * 200}, 400, "no name"),
        ({"sizes": {**SIZES, "../x.py": [1, 2]}}, 400, "an adapter is adapter_config.json and"),
        ({"sizes": {CONFIG_FILE: SIZES[CONFIG_FILE]}}, 400, "an adapter is"),
        ({"sizes": {**SIZES, CONFIG_FILE: [-1, 0]}}, 400, "whole numbers"),
        ({"sizes": {**SIZES, CONFIG_FILE: "ab"}}, 400, "whole numbers"),
        ({"sizes": [1]}, 400, "X-Files"),
        ({"sizes": None}, 400, "X-Files"),
        ({"sizes": {**SIZES, FILES[1]: [2**40, 0]}}, 413, "more than"),
        ({"sizes": {**SIZES, CONFIG_FILE: [len(CONFIG), 7]}}, 400, "another checksum"),
        ({"parts": (CONFIG, TENSORS[:-1])}, 400, "cut off after 6999 of 7000"),
        ({"parts": (CONFIG, TENSORS, b"x")}, 400, "more bytes"),
        ({"parts": (CONFIG + TENSORS + b"x",)}, 400, "more bytes"),
        ({"method": "POST"}, 405, "PUT or DELETE"),
        ({"name": "../x", "method": "DELETE"}, 400, "no name"),
    ],
)
def test_what_is_no_adapter_leaves_nothing(tmp_path, change, status, words):
    (tmp_path / "evil").mkdir()
    (tmp_path / "own").mkdir()
    store = AdapterStore(tmp_path / "own")
    send(store, "before")
    actual, output = send(store, **change)
    assert actual == status and words in output["error"]
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["before"]
    assert (tmp_path / "evil").exists()


def test_the_oldest_make_room(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_store, "MOST", 3)
    store = AdapterStore(tmp_path)
    for version in range(6):
        send(store, f"v-{version}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v-3", "v-4", "v-5"]


def ask(guard, method="PUT", **headers):
    output, remaining = [], [CONFIG, TENSORS]
    provided = {"x_files": json.dumps(SIZES), **headers}
    scope = {"type": "http", "path": "/jaxtrain/adapters/a-1", "method": method}
    scope["headers"] = [(k.replace("_", "-").encode(), v.encode()) for k, v in provided.items()]

    async def receive():
        return {"type": "http.request", "body": remaining.pop(0), "more_body": bool(remaining)}

    async def reply(message):
        output.append(message)

    asyncio.run(guard(scope, receive, reply))
    return output[0]["status"], output[-1]["body"]


def test_only_a_server_with_a_key_takes_files_of_who_knows_it(tmp_path):
    guard = RequestGuard(None, "secret", adapters=AdapterStore(tmp_path))
    assert ask(guard)[0] == ask(guard, authorization="Bearer other")[0] == 401
    assert ask(RequestGuard(None, "", adapters=AdapterStore(tmp_path)))[0] == 403
    assert not list(tmp_path.iterdir())
    status, body = ask(guard, authorization="Bearer secret")
    assert status == 200 and json.loads(body) == {"path": str(tmp_path / "a-1")}


LEAVES = """
import asyncio, os, signal, sys, time
from jaxtrain_vllm.guard import RequestGuard
from jaxtrain_vllm.shutdown import ShutdownState

async def app(scope, receive, send):
    if scope["type"] == "http":
        await asyncio.sleep(SLOW)
        await send({"type": "http.response.start", "status": 200})

async def main():
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, ended.set)  # as vLLM does
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    guard = RequestGuard(app, "", ShutdownState(SECONDS))

    async def ask(path):
        said = []
        async def send(message):
            said.append(message)
        await guard({"type": "http", "path": path, "headers": []}, None, send)
        return said[0]["status"], said[-1].get("body", b"").decode()

    await guard({"type": "lifespan"}, None, None)
    begun = asyncio.ensure_future(ask("/inference/v1/generate"))
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    for path in ("/health", "/inference/v1/generate"):
        print(*await ask(path))
    if TWICE:
        os.kill(os.getpid(), signal.SIGTERM)
    started = time.monotonic()
    await ended.wait()
    print("done" if begun.done() else "cut", round(time.monotonic() - started, 1))

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "slow, seconds, twice, end", [(0.6, 30, 0, "done"), (30, 0.4, 0, "cut"), (30, 60, 1, "cut")]
)
def test_sigterm_is_announced_and_what_was_begun_may_end(slow, seconds, twice, end):
    """In a process of its own; the third is told a second time."""
    code = LEAVES.replace("SLOW", str(slow)).replace("SECONDS", str(seconds))
    completed = subprocess.run(
        [sys.executable, "-c", code.replace("TWICE", str(twice))],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert completed.returncode == 0, completed.stderr
    first, health, refused, last = completed.stdout.splitlines()
    assert first.startswith("draining: ") and first.endswith("1 requests under way")
    for line in (health, refused):
        assert line.startswith("503 draining: this server ends within ")
    assert last.startswith(end)
