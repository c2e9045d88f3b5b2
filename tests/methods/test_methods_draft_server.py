"""A draft learns the same from a target in another process, over HTTP."""

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from draft_toy import compare, run, write_config

from jaxtrain.batch import Batch
from jaxtrain.config import load_config
from jaxtrain.distributed.serialization import pack
from jaxtrain.environments.endpoint_app import EndpointApp
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.vllm.control import ServerGone
from jaxtrain.main import main
from jaxtrain.methods.drafts import remote_states
from jaxtrain.methods.drafts.capture import FrozenTarget
from jaxtrain.methods.drafts.draft_model import assemble_target
from jaxtrain.methods.drafts.remote_states import TRIES, RemoteStates
from jaxtrain.methods.drafts.state_server import StateServer
from jaxtrain.methods.drafts.target_states import LAST, STATES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    write_config(folder)
    return folder


def load(folder, *overrides):
    server = ('task.target.source="server"', 'task.target.servers=["http://127.0.0.1:1"]')
    return load_config(str(folder / "draft.toml"), [*server, *overrides])


def open_target(config, layers=(0, 1), last=False):
    return FrozenTarget(assemble_target(config), layers, last=last, seed=config.run.seed)


@pytest.fixture(scope="module")
def target(folder):
    opened = open_target(load(folder))
    with jax.set_mesh(opened.bundle.mesh):
        opened.open()
    return opened


@contextmanager
def serving(target, key=None):
    """URL of a server in a thread of this process, and the server."""
    loop, server = asyncio.new_event_loop(), StateServer(target)
    app = EndpointApp(server.routes(), key)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = asyncio.run_coroutine_threadsafe(app.listen("127.0.0.1", 0), loop).result()
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        asyncio.run_coroutine_threadsafe(app.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def client(config, *urls, key=None, sleep=None, layers=(0, 1), last=False):
    section = config.task.target.model_copy(update={"servers": list(urls), "api_key": key})
    pauses = [] if sleep is None else sleep
    return RemoteStates(section, open_target(config, layers, last), pauses.append)


def random_batch(microsteps=2, rows=4, length=16, vocab=512):
    """Rows of two documents, the second of which forks."""
    rng = np.random.default_rng(0)
    shape = (microsteps, rows, length)
    index = np.arange(length, dtype=np.int32)
    prev = np.where(np.isin(index, (0, 6)), -1, index - 1).astype(np.int32)
    prev[12] = 8  # a second branch behind token 8
    until = np.where(index < 6, 6, length).astype(np.int32)
    until[9:12] = 12
    positions = np.zeros(length, np.int32)
    for token in range(length):
        positions[token] = positions[prev[token]] + 1 if prev[token] >= 0 else 0

    def tile(values):
        return np.broadcast_to(values, shape).copy()

    tokens = rng.integers(0, vocab, shape).astype(np.int32)
    weights = {"nll": np.ones(shape, np.float32)}
    return Batch(tokens, tile(positions), tile(prev), tile(until), weights)


def test_states_over_http_are_those_of_the_target(folder, target):
    """To the bit in float32 from one server; two share the rows, whose program is another."""
    config, batch = load(folder), random_batch()
    with serving(target, "secret") as (url, _):
        remote = client(config, url, key="secret", layers=(2, 0), last=True)
        assert "this run's target" in remote.check(None)
        streams = remote.fill(batch).streams
        expected = target.capture(batch, (2, 0), last=True)
        for name in (STATES, LAST):
            assert streams[name].sharding.mesh == remote.mesh
            np.testing.assert_array_equal(streams[name], expected[name])
        halves = client(config, url, url, key="secret", layers=(2, 0), last=True)
        several = halves.fill(batch._replace(weights={})).streams
        for name in (STATES, LAST):
            np.testing.assert_allclose(several[name], expected[name], rtol=1e-5, atol=1e-6)


def test_large_states_come_in_several_requests(folder, target, monkeypatch):
    config, batch = load(folder), random_batch(rows=4)
    monkeypatch.setattr(remote_states, "CHUNK_BYTES", 2 * 16 * 2 * 32 * 4)  # of a row
    with serving(target) as (url, server):
        asked, capture = [], server.capture
        monkeypatch.setattr(server, "capture", lambda body: asked.append(1) or capture(body))
        streams = client(config, url).fill(batch).streams
    assert len(asked) == 4
    expected = target.capture(batch, (0, 1), last=False)[STATES]
    np.testing.assert_allclose(streams[STATES], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["run.seed=1"], "other weights"),
        (['model.compute_dtype="bfloat16"'], "dtype float32 there, bfloat16 here"),
        (['task.target.quantize="int8"'], "quantize none there, int8 here"),
        (["model.architecture.hidden_size=64"], "other architecture"),
    ],
)
def test_another_target_is_refused_at_the_start_and_later(folder, target, overrides, message):
    config = load(folder, *overrides)
    with serving(target) as (url, _):
        remote = client(config, url)
        with pytest.raises(UserError, match=rf"runs another target: .*{message}"):
            remote.check(None)
        with pytest.raises(UserError, match="HTTP 409.*another target"):
            remote.fill(random_batch())


def test_servers_that_are_away_or_busy_or_locked(folder, target, monkeypatch):
    config, batch, pauses = load(folder), random_batch(), []
    away = client(config, "http://127.0.0.1:1", sleep=pauses)
    with pytest.raises(RunStopped, match=rf"did not answer {TRIES} times.*127.0.0.1:1: "):
        away.fill(batch)
    assert pauses[:4] == [1, 2, 4, 5] and len(pauses) == TRIES - 1 and 100 < sum(pauses) < 130
    with serving(target, "secret") as (url, server):
        with pytest.raises(UserError, match="HTTP 401.*the same key"):
            client(config, url, key="other").check(None)
        # One server is away: the other answers in its place, without a pause.
        pauses.clear()
        streams = client(config, "http://127.0.0.1:1", url, key="secret", sleep=pauses).fill(batch)
        assert not pauses and np.isfinite(streams.streams[STATES]).all()
        server._waiting = 64
        with pytest.raises(RunStopped, match="HTTP 503: 64 requests wait already"):
            client(config, url, key="secret", sleep=pauses).fill(batch)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers": []}, "layers are to be named"),
        ({"layers": [0, 0]}, "each once"),
        ({"layers": [3]}, "from 0 to 2"),
        ({"layers": [True]}, "from 0 to 2"),
        ({"layers": None}, "no request for states"),
        ({"layers": [[0]]}, "from 0 to 2"),
        ({"last": np.zeros(2)}, "no request for states"),
        ({"target": np.zeros(2)}, "another target"),
        ({"batch": 1}, "no packed batch"),
        ({"batch": random_batch()._replace(weights={}, denoms=np.zeros(2))}, "and no more"),
        ({"batch": random_batch()._replace(weights={}, owner=np.zeros(2))}, "and no more"),
        ({"batch": random_batch()}, "and no more"),
        ({"batch": random_batch(vocab=900)._replace(weights={})}, "from 0 to 511"),
    ],
)
def test_requests_that_make_no_sense(target, change, message):
    server = StateServer(target)
    batch = random_batch()._replace(weights={})
    request = {"target": server.about["target"], "layers": [0], "last": False, "batch": batch}
    with pytest.raises(RequestRefused, match=message):
        server.read(b"".join(pack("states", {**request, **change})))
    with pytest.raises(RequestRefused, match="inconsistent"):
        broken = batch._replace(until=batch.until * 0)
        server.read(b"".join(pack("states", {**request, "batch": broken})))
    with pytest.raises(RequestRefused, match="no request for states"):
        server.read(b"".join(pack("states", np.zeros(2))))
    with pytest.raises(RequestRefused, match="too short"):
        server.read(b"".join(pack("states", request))[:-1])
    assert server.read(b"".join(pack("states", request)))[1:] == ((0,), False)


def test_a_server_that_is_away_is_asked_last_for_a_while(folder, monkeypatch):
    remote, asked, away = client(load(folder), "http://a", "http://b"), [], {"http://a"}

    def ask(url):
        asked.append(url[-1])
        if url in away:
            raise ServerGone("off")
        return url

    remote._data = SimpleNamespace(log=(lines := []).append)
    assert [remote._try(ask, remote.urls) for _ in range(3)] == ["http://b"] * 3
    assert "".join(asked) == "abbb"
    monkeypatch.setattr(remote_states, "LOST_SECONDS", 0.0)
    away.clear()
    assert [remote._try(ask, remote.urls) for _ in range(2)] == ["http://a"] * 2
    away = "task.target.servers: http://a: off; asked again, or another in its place"
    assert lines == [away, "task.target.servers: http://a answers again"]
    monkeypatch.setattr(remote_states, "GIVE_UP_SECONDS", 0.1)
    silent = client(load(folder), "http://a", sleep=[])
    with pytest.raises(RunStopped, match="did not answer 1 times.*silent"):
        silent._try(lambda url: time.sleep(0.2) or stop(ServerGone("silent")), ["http://a"])


def stop(error):
    raise error


def test_a_run_that_stops_does_not_wait_for_a_silent_server(folder):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        remote = client(load(folder), f"http://127.0.0.1:{silent.getsockname()[1]}")
        threading.Timer(0.5, remote.close).start()
        began = time.monotonic()
        with pytest.raises(Interrupted):
            remote.fill(random_batch())
        assert time.monotonic() - began < 10
        # The process may end, although the request is still open.
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "call")


def test_answers_that_are_no_states_and_keys_that_are_none(folder, target, monkeypatch):
    config, batch = load(folder), random_batch()
    with serving(target) as (url, server):
        for answer in ([1], {STATES: 1}, {STATES: np.zeros(3, np.float32)}):
            monkeypatch.setattr(server, "capture", lambda body, it=answer: pack("states", it))
            with pytest.raises(RunStopped, match="other states than it was asked for"):
                client(config, url, sleep=[]).fill(batch)
        with pytest.raises(UserError, match="characters that no header may have") as caught:
            client(config, url, key="secret\n").check(None)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "command, overrides, message",
    [
        ("train", ['task.target.source="server"'], r"needs task.target.servers: start"),
        ("train", ['task.target.servers=["http://a"]'], 'servers has no effect with .* "step"'),
        ("train", ['task.target.source="server"', 'task.target.servers=["a:1"]'], "is no URL"),
        ("capture", ["--port", "1", 'task.target.source="disk"', "task.target.path=x"], "--port"),
        ("capture", ["--host", "0.0.0.0", 'task.target.source="server"'], "need a key"),
        ("capture", ["--port", "70000", 'task.target.source="server"'], "must be 0 to 65535"),
    ],
)
def test_impossible_settings_are_refused(folder, command, overrides, message, capsys, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_API_KEY", raising=False)
    verb = [] if command == "train" else [command]
    assert main([*verb, "--config", str(folder / "draft.toml"), *overrides]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_tokens_that_do_not_divide_among_a_servers_devices_are_refused(folder, target, monkeypatch):
    def capture(*_, **__):
        raise UserError("rows of 16 tokens on 3 devices")

    with serving(target) as (url, _):
        monkeypatch.setattr(target, "capture", capture)
        with pytest.raises(UserError, match="HTTP 400: rows of 16 tokens on 3 devices"):
            client(load(folder), url, sleep=[]).fill(random_batch())


@contextmanager
def subprocess_server(folder, *overrides):
    """URL of `jaxtrain capture` in a process with one device."""
    command = [sys.executable, "-m", "jaxtrain.main", "capture", "--port", "0", "--config"]
    command += [str(folder / "draft.toml"), 'task.target.source="server"', *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving states" in line)
        yield line.split()[-1]
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_runs_from_another_process_train_the_same(folder, tmp_path, capsys):
    """Training and held-out losses of DFlash from a server, and of Eagle3 from two, one of which
    answers for both drafts."""
    write_config(tmp_path)
    text = (tmp_path / "draft.toml").read_text().replace('"dflash"', '"eagle3"')
    text = text.replace("block_size = 4\nnum_anchors = 8", "length = 3")
    (tmp_path / "draft.toml").write_text(text.replace("[0, 1]", "[0, 2]"))
    with subprocess_server(folder) as first, subprocess_server(folder) as second:
        for place, servers in ((folder, [first]), (tmp_path, [second, first])):
            expected = run(place, "step")
            names = ", ".join(f'"{url}"' for url in servers)
            source = ('task.target.source="server"', f"task.target.servers=[{names}]")
            completed = run(place, "server", *source)
            compare(completed, expected)
            assert completed[4]["target/busy"] > 0
            assert f"target states from {servers[0]}" in capsys.readouterr().out
