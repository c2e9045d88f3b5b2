"""The real vllm-router before two scripted servers."""

import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_vllm import STOP, FakeVllm

from jaxtrain.config import SamplingConfig
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import UserError
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.vllm.sources import list_workers, open_sources

ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent)) or shutil.which(
    "vllm-router"
)
DRAW = SamplingConfig(temperature=1.0, max_new_tokens=8)
pytestmark = pytest.mark.skipif(ROUTER is None, reason="needs pip install vllm-router")


@contextlib.contextmanager
def routed():
    """(fakes, engine, servers, process of the router, its URL, what was said)"""
    fakes, output = [FakeVllm(), FakeVllm()], []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        metrics = free.getsockname()[1]
    command = [ROUTER, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash"]
    command += ["--prometheus-port", str(metrics), "--log-level", "warning"]
    command += ["--worker-urls", *(fake.url for fake in fakes)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    config = VllmConfig(discover=f"router+{url}", health_seconds=0.2, wait_seconds=60)
    servers = None
    try:
        end = time.monotonic() + 60
        while len(list_workers(url) or ()) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        servers = Servers(config, DRAW, output.append, sources=open_sources(config))
        servers.open()
        for fake, server in zip(fakes, sorted(servers.all, key=lambda s: s.url), strict=True):
            servers.mark_up(server, 0)
            fake.label = servers.label(0)
        engine = VllmEngine(servers, adapters=False, first_pause=0.01, group_size=4)
        yield fakes, engine, servers, process, url, output
    finally:
        if servers is not None:
            servers.close()
        process.kill()
        process.wait()
        for fake in fakes:
            if fake.thread.is_alive():
                fake.kill()


def ask(engine, count):
    async def run():
        try:
            calls = [engine.generate([1, i + 2], DRAW, (STOP,), i) for i in range(count)]
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_a_router_carries_requests_and_its_end_ends_nothing():
    with routed() as (fakes, engine, servers, process, url, output):
        with pytest.raises(UserError, match="is a router.*rollout.vllm.discover"):
            servers.inspector.refuse_router(url)
        answers = ask(engine, 80)
        assert {answer.versions[0] for answer in answers} == {0}
        assert sum(fake.answered for fake in fakes) == 80 and all(f.answered for f in fakes)
        # Four of a group, each to one server: the seed says which request was whose.
        assert all(fake.answered % 4 == 0 for fake in fakes)
        # A server that holds weights of nobody is found behind the router.
        fakes[0].label = "default"
        assert {answer.versions[0] for answer in ask(engine, 24)} == {0}
        assert servers.counters["unknown_version"] > 0
        fakes[0].label = servers.label(0)
        process.kill()
        assert len(ask(engine, 24)) == 24
        assert servers.counters["router_lost"] == 1
        assert sum("requests go to its servers directly" in line for line in output) == 1
