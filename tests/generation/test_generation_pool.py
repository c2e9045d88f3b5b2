"""Servers that come and go: a thousand episodes in virtual time, who is chosen, and where servers
are listed."""

import asyncio
import json
import random
import socket
from collections import Counter, defaultdict

import pytest

from jaxtrain.config import SamplingConfig
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.vllm import sources
from jaxtrain.generation.vllm.control import ServerGone
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.routing import (
    FRESH_SECONDS,
    CandidateServer,
    choose,
    limit_load,
    weigh,
)
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.vllm.sources import (
    DiscoveredServer,
    DnsServers,
    DynamoServers,
    FileServers,
    RouterServers,
    open_sources,
)
from jaxtrain.generation.vllm.telemetry import Telemetry, parse_telemetry

DRAW = SamplingConfig(temperature=1.0, max_new_tokens=8)
GROUP, TURNS = 8, 3
URLS = [f"http://server-{i}:8000" for i in range(20)]


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next thing that is due."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        select = self._selector.select

        def jump(timeout=None):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


class Listed:
    """A source that the test writes."""

    name, fixed = "test://", False

    def __init__(self, urls):
        self.urls = list(urls)

    def poll(self):
        return None if self.urls is None else [DiscoveredServer(url) for url in self.urls]


class Simulated(VllmEngine):
    """Servers answer after some virtual seconds, unless they die meanwhile."""

    def __init__(self, servers, dice, **settings):
        super().__init__(servers, adapters=False, first_pause=0.1, **settings)
        self.dice, self.dead, self.asked_at = dice, set(), []

    async def _exchange(self, connections, server, body, session, limit):
        # What may be asked: up, of the newest version, by the pool's own word.
        assert server.state == "up" and server.version == self.servers.version
        assert server.url not in self.dead or self.servers.clock() < server.doomed
        self.asked_at.append((session, server.url))
        label = self.servers.label(server.version)
        await asyncio.sleep(self.dice.uniform(0.5, 4.0))
        if server.url in self.dead:
            raise ConnectionResetError("died")
        spans = [{"version": label, "start": 0, "end": 2}]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": [100, 3]}
        choice |= {"logprobs": {"content": [{"logprob": -0.5}] * 2}, "weight_versions": spans}
        return 200, json.dumps({"choices": [choice]}).encode()


def simulate(episodes, churn, **settings):
    """(engine, servers, {episode: answers of its turns}) of a run in virtual time."""
    loop, dice, output = VirtualLoop(), random.Random(7), []
    config = VllmConfig(discover="file:///x", drain_seconds=3.0, **settings)
    source = Listed(URLS)
    servers = Servers(config, DRAW, output.append, sources=[source])
    servers.clock = loop.time
    engine = Simulated(servers, dice, group_size=GROUP)
    actual = defaultdict(list)

    def push_weights(server):
        server.model = "base"
        servers.mark_up(server, servers.version)

    async def play(index):
        for turn in range(TURNS):
            answer = await engine.generate([1] * (turn + 2), DRAW, (3,), index)
            actual[index].append((turn, answer.tokens, answer.versions))

    async def change():
        while True:
            await asyncio.sleep(0.25)
            servers.poll()
            for server in servers.all:
                servers.end_drain(server)
                if server.state in ("new", "down") and server.url not in engine.dead:
                    push_weights(server)
            if not churn:
                continue
            match dice.randrange(8):
                case 0 if len(source.urls) > 4:
                    source.urls.remove(dice.choice(source.urls))
                case 1 if missing := sorted(set(URLS) - set(source.urls)):
                    source.urls.append(dice.choice(missing))
                case 2 if len(engine.dead) < 8:
                    url = dice.choice(URLS)
                    engine.dead.add(url)
                    for server in servers.all:
                        if server.url == url:
                            server.doomed = loop.time()
                            servers.drop(server, "/health: refused")
                case 3 if engine.dead:
                    engine.dead.discard(dice.choice(sorted(engine.dead)))
                case 4:
                    servers.begin_publish(servers.version + 1)
                    for server in servers.up():
                        await asyncio.sleep(0.01)
                        if server.state == "up":
                            push_weights(server)
                    servers.publishing = False

    async def run():
        servers.version = 0
        for server in servers.all:
            push_weights(server)
        changing = asyncio.ensure_future(change())
        try:
            await asyncio.gather(*(play(index) for index in range(episodes)))
        finally:
            changing.cancel()
            await engine.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return engine, servers, actual


def share_at_one_server(engine):
    """Return the share of all requests that went where most of their session went."""
    places = defaultdict(Counter)
    for session, url in engine.asked_at:
        places[session][url] += 1
    return sum(max(c.values()) for c in places.values()) / len(engine.asked_at)


@pytest.mark.slow
def test_nothing_is_lost_or_twice_while_servers_come_and_go():
    # 128 at a time: with more, the run ends before enough servers have come and gone.
    engine, servers, actual = simulate(1000, churn=True, concurrency=128)
    assert sorted(actual) == list(range(1000))
    assert all([turn for turn, *_ in turns] == [*range(TURNS)] for turns in actual.values())
    for turns in actual.values():
        dates = [version for *_, drawn in turns for version in drawn]
        assert dates == sorted(dates)
    counted = servers.measure()
    for name in ("servers_joined", "servers_drained", "servers_left", "servers_lost"):
        assert counted[name] > 3, name
    assert counted["requests"] == len(engine.asked_at) == 1000 * TURNS + counted["retries"]
    assert all(server.in_flight == 0 for server in servers.all)


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [128, pytest.param(512, marks=pytest.mark.thorough)])
def test_a_group_stays_at_one_server_and_work_is_fair(concurrency):
    engine, servers, _ = simulate(1000, churn=False, concurrency=concurrency)
    assert share_at_one_server(engine) >= 0.9
    counter = Counter(url for _, url in engine.asked_at)
    mean = 1000 * TURNS / len(URLS)
    assert len(counter) == len(URLS) and max(counter.values()) < 2 * mean


def test_what_is_full_is_passed_over_and_weights_count():
    two = [CandidateServer("a", 1.0, 0.0), CandidateServer("b", 1.0, 0.0)]
    chosen = [choose(session, two).index for session in range(1000)]
    assert 430 < sum(chosen) < 570 and chosen == [choose(s, two).index for s in range(1000)]
    heavy = [two[0], CandidateServer("b", 3.0, 0.0)]
    assert 700 < sum(choose(session, heavy).index for session in range(1000)) < 800
    # A third server takes its own share and moves nobody else.
    three = [*two, CandidateServer("c", 1.0, 0.0)]
    moved = [choose(session, three).index for session in range(1000)]
    assert all(new in (old, 2) for old, new in zip(chosen, moved, strict=True))
    busy = [CandidateServer("a", 1.0, 33.0), CandidateServer("b", 1.0, 0.0)]
    assert {choose(session, busy).index for session in range(50)} == {1}
    full = [CandidateServer("a", 1.0, 1.0, 1.0), CandidateServer("b", 1.0, 4.0, 4.0)]
    assert choose(1, full) is None
    assert weigh([None, 2.0, 6.0]) == [1.0, 0.5, 1.5] and weigh([None, None]) == [1.0, 1.0]


def test_a_servers_own_queue_bounds_what_it_gets():
    messages = {"running": 10.0, "waiting": 2.0, "ranks": 1, "age": 1.0, "in_flight": 12.0}
    assert limit_load(100, **messages) == 14
    assert limit_load(100, **messages | {"waiting": 0.0}) == 158
    assert limit_load(100, **messages | {"waiting": 5.0}) == 12
    assert (
        limit_load(100, **messages | {"waiting": 5.0, "in_flight": 0.0}) == 1
    )  # others keep it full
    assert limit_load(100, **messages | {"ranks": 8, "waiting": 30.0}) == 42
    assert (
        limit_load(100, **messages | {"age": FRESH_SECONDS + 1}) == 158
    )  # stale: it starves nobody


def test_telemetry_adds_up_over_ranks():
    text = "# HELP\n" + "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="a b"}} {rank + 1}.0\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="a b"}} 2.0\n'
        f'vllm:num_requests_waiting_by_reason{{engine="{rank}",reason="x"}} 9.0\n'
        f'vllm:generation_tokens_total{{engine="{rank}"}} 7.0\n'
        for rank in range(2)
    )
    assert parse_telemetry(text) == Telemetry((7.0, 7.0), 3.0, 4.0, 2)
    assert parse_telemetry("vllm:num_requests_running x\n") is None


def test_files_list_servers_and_a_file_being_written_lists_nothing_new(tmp_path):
    path = tmp_path / "servers.txt"
    source = FileServers(f"file://{path}")
    assert source.poll() is None
    path.write_text("http://a:1\nhttp://b:2 8  # eight GPUs\n\n")
    assert source.poll() == [DiscoveredServer("http://a:1"), DiscoveredServer("http://b:2", 8.0)]
    for damaged in ("", "a:1\n", "http://a:1 many\n", "http://\n"):
        path.write_text(damaged)
        assert source.poll() is None
    path.write_text("# none\n")
    assert source.poll() == []


def test_names_and_services_list_servers(monkeypatch):
    addresses = [("", 0, 0, "", ("10.0.0.1", 9)), ("", 0, 0, "", ("fd00::1", 9, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses * 2)
    assert [entry.url for entry in DnsServers("dns://pods:9").poll()] == [
        "http://10.0.0.1:9",
        "http://[fd00::1]:9",
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: refuse())
    assert DnsServers("dns://pods:9").poll() is None
    answers = {
        "/list_workers": {"urls": ["http://a:1@0", "http://a:1@1", "http://b:1@0"]},
        "/v1/rl/workers": {
            "workers": [{"system_url": "http://a:1/"}, {"system_url": "http://b:1"}]
        },
    }
    monkeypatch.setattr(sources, "call", lambda url, method, path, **_: answers[path])
    assert RouterServers("router+http://r:3").poll() == [
        DiscoveredServer("http://a:1", 2.0),
        DiscoveredServer("http://b:1", 1.0),
    ]
    assert [entry.url for entry in DynamoServers("dynamo+http://d:3").poll()] == [
        "http://a:1",
        "http://b:1",
    ]
    answers |= {"/list_workers": "<html>", "/v1/rl/workers": {"workers": [{}]}}
    assert RouterServers("router+http://r:3").poll() is None
    assert DynamoServers("dynamo+http://d:3").poll() is None


def refuse():
    raise socket.gaierror("no such name")


def test_a_silent_source_keeps_its_last_list_and_is_told_once():
    output = []
    source = Listed(URLS[:3])
    config = VllmConfig(discover="file:///x")
    servers = Servers(config, DRAW, output.append, sources=[source])
    source.urls = None
    for _ in range(3):
        servers.poll()
    assert len(servers.all) == 3 and not servers.waits_on()
    assert servers.measure()["sources_silent"] == 1
    assert sum("does not answer" in line for line in output) == 1
    source.urls = URLS[:2]
    servers.poll()
    assert len(servers.all) == 2 and servers.waits_on() and "answers again" in " ".join(output)


def test_a_draining_server_ends_its_requests_or_is_cut():
    servers = Servers(
        VllmConfig(drain_seconds=60.0), DRAW, lambda _: None, sources=[Listed(URLS[:2])]
    )
    current_time = 0.0
    servers.clock = lambda: current_time
    servers.version = 0
    for server in servers.all:
        servers.mark_up(server, 0)
    first = servers.acquire(1)
    epoch = first.epoch
    servers.leave(first, "listed no more")
    assert first.state == "draining" and not servers.end_drain(first)
    assert all(servers.acquire(1) is not first for _ in range(4))
    current_time = 61.0
    assert servers.end_drain(first) and first.state == "gone" and first.epoch == epoch + 1
    assert servers.counters["requests_cut"] == 1 and first not in servers.all
    with pytest.raises(ServerGone):
        servers.mark_up(first, 0)
    # One that announces it, and stays listed, is waited for; with nothing under way at once.
    for _ in range(4):
        servers.release(servers.all[0])
    servers.leave(servers.all[0], "it announced that it leaves", listed=True)
    assert servers.end_drain(servers.all[0]) and servers.all[0].state == "down"
    assert not servers.counters["servers_lost"]


@pytest.mark.parametrize(
    "address", ["ftp://x", "router+http://", "dns://name", "file://relative", "http://a:1"]
)
def test_other_sources_are_refused(address):
    from jaxtrain.config.vllm import find_vllm_conflicts

    actual = list(find_vllm_conflicts(VllmConfig(discover=address), "none", "sync"))
    assert any("is none of file:///PATH" in line for line in actual)


def test_sources_of_a_config():
    config = VllmConfig(servers=["http://a:1"], discover="router+http://r:2", via="direct")
    assert [type(source).__name__ for source in open_sources(config)] == [
        "NamedServers",
        "RouterServers",
    ]
    assert not config.routed and config.model_copy(update={"via": "router"}).routed
