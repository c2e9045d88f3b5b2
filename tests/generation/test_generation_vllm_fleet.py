"""Real vLLM servers on CPU, several at once: what affinity is worth to their prefix caches, a
router before them, an evaluation beside; adapters over HTTP, and a server that leaves.

JAXTRAIN_VLLM_PYTHON names the Python of an environment with vLLM.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from real_vllm import (
    CLOSE,
    PYTHON,
    RealServer,
    ask,
    cast,
    change,
    descendants,
    free_port,
    make_config,
    make_model,
    prompts,
    worst,
)

from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.generation.vllm.control import ServerRefused, call
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.factory import open_vllm
from jaxtrain.generation.vllm.sources import list_workers
from jaxtrain.generation.vllm.telemetry import read_telemetry
from jaxtrain.generation.weight_sync import staging, weight_links

ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]
GROUP, TURNS = 8, 4
NAMES = ("127.0.0.1", "localhost")
"""One machine's, as if there were two."""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    model = make_model(folder / "model", seed=0, tied=True)
    blocks = ("--block-size", "32")
    actual = [RealServer(model, "full", folder / f"{i}.log", *blocks) for i in range(2)]
    yield actual
    for server in actual:
        server.kill(signal.SIGTERM)


@contextlib.contextmanager
def published(config):
    """(engine, publisher, parts, parameters) with version 0 on all servers."""
    parts = build_model_bundle(config)
    params = open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        publisher.publish(0, params, None)
        yield engine, publisher, parts, params
    finally:
        publisher.close()


def urls(servers):
    return [f"http://127.0.0.1:{server.port}" for server in servers]


def open_all(replicas, folder, **vllm):
    """The config of a run with both."""
    options = {"weight_dtype": "float32", "servers": urls(replicas)} | vllm
    return make_config(replicas[0], folder, "full", **options)


def play(engine, sampling, groups, seed, shared, output):
    """Groups of episodes of some turns: a prompt of `shared` tokens is a group's, what follows,
    with `output` tokens of the world a turn, an episode's own."""
    dice = np.random.default_rng(seed)
    prompt = dice.integers(0, 256, (groups, shared)).tolist()
    messages = dice.integers(0, 256, (groups * GROUP, TURNS, output)).tolist()

    async def episode(index):
        tokens = list(prompt[index // GROUP])
        for turn in range(TURNS):
            answer = await engine.generate(tokens, sampling, (), index)
            tokens += [*answer.tokens, *messages[index][turn]]

    async def run():
        try:
            await asyncio.gather(*(episode(i) for i in range(groups * GROUP)))
        finally:
            await engine.close()

    asyncio.run(run())


def test_affinity_fills_prefix_caches(replicas, tmp_path):
    """Tokens of prompts found in the cache: a group's requests at one server, or at the least
    loaded one. No prompt comes twice; nothing is evicted."""
    config = open_all(replicas, tmp_path, concurrency=48)
    sampling = config.sampling.model_copy(update={"max_new_tokens": 16})
    cases = [(192, 8, GROUP), (192, 8, None), (64, 80, GROUP), (64, 80, None)]
    shares = []
    with published(config) as (engine, *_):
        for seed, (shared, output, group_size) in enumerate(cases):
            asking = VllmEngine(engine.servers, adapters=False, group_size=group_size)
            before = [read_telemetry(url) for url in urls(replicas)]
            began = time.monotonic()
            play(asking, sampling, 16, seed, shared, output)
            seconds = time.monotonic() - began
            pairs = list(zip([read_telemetry(url) for url in urls(replicas)], before, strict=True))
            hits = sum(current_time.prefix_hits - then.prefix_hits for current_time, then in pairs)
            queries = sum(
                current_time.prefix_queries - then.prefix_queries for current_time, then in pairs
            )
            shares.append(hits / queries)
            affinity = engine.servers.measure()["affinity"]
            print(
                f"prompt {shared}, {output} said a turn, group_size {group_size}: {hits:.0f} of"
                f" {queries:.0f} tokens ({shares[-1]:.3f}), {seconds:.1f} s, affinity"
                f" {affinity:.2f}"
            )
    assert shares[2] > shares[3] + 0.03


def test_an_evaluation_keeps_its_version_while_training_goes_on(replicas, tmp_path):
    config = open_all(replicas, tmp_path)
    with published(config) as (engine, publisher, parts, params):
        servers = engine.servers
        servers.config = servers.config.model_copy(update={"eval_servers": 1})
        rebuild = abstract_params(parts)[1]
        retained = engine.keep()
        for version in (1, 2):
            params = change(params, 0.02, version)
            publisher.publish(version, params, None)
            assert worst(engine, rebuild, params, config, version) < CLOSE
        assert worst(retained, rebuild, open_params(parts, 0), config, 0) < CLOSE
        retained.release()
        (server,) = retained.kept_servers.servers
        end = time.monotonic() + 60
        while server.version < 2 and time.monotonic() < end:
            time.sleep(0.1)
        (second,) = [entry for entry in servers.all if entry is not server]
        servers.drop(second, "for this test: the one that was kept answers alone")
        assert worst(engine, rebuild, params, config, 2) < CLOSE


def test_one_server_passes_weights_on_to_the_other(replicas, tmp_path, monkeypatch):
    """With each server on its own host: one is sent them over streams, the other fetches them
    there; whole, then as what has changed."""

    class Far(weight_links.WorkerLink):
        def __init__(self, connection, hello):
            super().__init__(connection, hello)
            self.host, self.local_host = hello["server"], "elsewhere"

    monkeypatch.setattr(weight_links, "WorkerLink", Far)
    monkeypatch.setattr(staging, "STREAM_BYTES", 1)
    names = [f"http://{name}:{replica.port}" for name, replica in zip(NAMES, replicas, strict=True)]
    extra = {"servers": names, "fan_out": 1, "weight_dtype": "bfloat16"}
    config = make_config(replicas[0], tmp_path, "delta", **extra)
    parts = build_model_bundle(config)
    params, rebuild = open_params(parts, 0), abstract_params(parts)[1]
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(3):
            actual = publisher.publish(version, params, None)
            assert actual["sync/relay_failures"] == 0, actual
            assert actual["sync/tcp_bytes"] == actual["sync/relayed_bytes"] > 0
            assert actual["sync/delta"] == (version > 0)
            assert worst(engine, rebuild, cast(params, "bfloat16"), config, version) < CLOSE
            for server in engine.servers.all:
                assert server.version == version
            params = change(params, 0.02, version)
    finally:
        publisher.close()


@pytest.mark.skipif(ROUTER is None, reason="needs pip install vllm-router")
def test_a_router_before_real_servers(replicas, tmp_path):
    """Weights go to both behind it; every token says its version; it dies and nothing is lost."""
    port, metrics = free_port(), free_port()
    command = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash"]
    command += ["--prometheus-port", str(metrics), "--log-level", "warning"]
    command += ["--worker-urls", *urls(replicas)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while len(list_workers(url) or ()) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        config = open_all(replicas, tmp_path, servers=[], discover=f"router+{url}")
        with published(config) as (engine, publisher, parts, params):
            rebuild = abstract_params(parts)[1]
            for version in range(2):
                assert worst(engine, rebuild, params, config, version) < CLOSE
                if version == 0:
                    params = change(params, 0.02, version)
                    publisher.publish(1, params, None)
            before = [read_telemetry(entry).tokens for entry in urls(replicas)]
            answers = ask(engine, prompts(32), config.sampling)
            assert {v for answer in answers for v in answer.versions} == {1}
            after = [read_telemetry(entry).tokens for entry in urls(replicas)]
            assert all(a != b for a, b in zip(before, after, strict=True)), "both were asked"
            assert engine.servers.front.state == "up"
            process.kill()
            assert len(ask(engine, prompts(8), config.sampling)) == 8
            assert engine.servers.counters["router_lost"] == 1
    finally:
        process.kill()
        process.wait()


def test_adapters_over_http_and_a_server_that_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    model = make_model(tmp_path / "model", seed=0, tied=False)
    server = RealServer(model, "lora", tmp_path / "server.log")
    try:
        config = make_config(server, tmp_path, "lora", adapter_transport="http", keep_adapters=2)
        parts = build_model_bundle(config)
        rebuild, params = abstract_params(parts)[1], open_params(parts, 0)
        engine, publisher = open_vllm(config, parts)
        url = urls([server])[0]
        try:
            for version in range(3):
                metrics = publisher.publish(version, params, None)
                actual = worst(engine, rebuild, params, config, version)
                print(f"adapter {version} over HTTP: {actual:.1e}, {metrics}")
                assert actual < CLOSE
                params = change(params, 0.5, version) | {
                    name: array for name, array in params.items() if ".adapter." not in name
                }
            listed = call(url, "GET", "/v1/models", timeout=30)["data"]
            roots = [Path(entry["root"]) for entry in listed if entry.get("parent")]
            assert len(roots) == 2 and not any(root.is_relative_to(tmp_path) for root in roots)
            assert sorted(root.name for root in roots[0].parent.iterdir()) == sorted(
                root.name for root in roots
            )
            leave(server, url, engine, config)
        finally:
            with contextlib.suppress(Exception):
                publisher.close()
    finally:
        server.kill()


def leave(server, url, engine, config):
    """SIGTERM while answers are under way: they end, others are refused, then the process does."""
    sampling = config.sampling.model_copy(update={"max_new_tokens": 400})
    actual: list = []
    asking = threading.Thread(target=lambda: actual.extend(ask(engine, prompts(4), sampling)))
    asking.start()
    while not engine.servers.all[0].in_flight:
        time.sleep(0.05)
    time.sleep(0.5)
    below = descendants(server.process.pid)
    os.kill(server.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(ServerRefused, match="503: draining: this server ends within") as refused:
        call(url, "GET", "/health", timeout=10)
    print(refused.value)
    began = time.monotonic()
    asking.join(120)
    print(f"answers after {time.monotonic() - began:.1f} s: {[len(a.tokens) for a in actual]}")
    assert len(actual) == 4 and max(len(answer.tokens) for answer in actual) > 100
    assert not engine.servers.counters["retries"]
    assert server.process.wait(60) == 0
    end = time.monotonic() + 20
    while remaining := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, f"they live on: {remaining}"
        time.sleep(0.2)
