"""Servers that keep a version for an evaluation while training's go on; whoever dies meanwhile."""

import asyncio
import contextlib
import threading

import pytest
from fake_vllm import STOP, FakeVllm
from known_policy import wait_until

from jaxtrain.config import SamplingConfig
from jaxtrain.config.vllm import VllmConfig, find_eval_server_conflicts
from jaxtrain.generation.engine import KeepLost, KeepsVersions
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.servers import Servers, describe
from jaxtrain.generation.weight_sync.delivery import push_to_all

DRAW = SamplingConfig(temperature=1.0, max_new_tokens=8)


class Fleet:
    """Fake servers, what trains with them, and `publish`."""

    def __init__(self, count, **settings):
        self.fakes, self.said = [FakeVllm() for _ in range(count)], []
        options = {"health_seconds": 0.05, "wait_seconds": 3, "eval_servers": 1, **settings}
        config = VllmConfig(servers=[fake.url for fake in self.fakes], **options)
        self.servers = Servers(config, DRAW, self.said.append)
        self.engine = VllmEngine(self.servers, adapters=False, first_pause=0.01)
        self.brought: list[tuple[int, int]] = []
        """(server, version)"""
        self.servers.push_weights = self.push_weights
        self.servers.open()
        self.publish(0)

    def push_weights(self, server):
        version = max(self.servers.version, 0)
        position = [fake.url for fake in self.fakes].index(server.url)
        self.brought.append((position, version))
        self.fakes[position].label = self.servers.label(version)
        self.servers.mark_up(server, version, server.epoch)

    def publish(self, version):
        self.servers.begin_publish(version)
        push_to_all(self.servers, self.push_weights, version)
        self.servers.publishing = False

    def place(self, server):
        return [fake.url for fake in self.fakes].index(server.url)

    def close(self):
        self.servers.close()
        for fake in self.fakes:
            if fake.thread.is_alive():
                fake.kill()


@pytest.fixture
def fleets():
    with contextlib.ExitStack() as stack:

        def make(*arguments, **settings):
            fleet = Fleet(*arguments, **settings)
            stack.callback(fleet.close)
            return fleet

        yield make


def ask(engine, count, first=0):
    async def run():
        calls = [engine.generate([1, i + 2], DRAW, (STOP,), first + i) for i in range(count)]
        try:
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    return asyncio.run(run())


def versions(answers):
    return {version for answer in answers for version in answer.versions}


def in_thread(work):
    """(thread, where its result or error will be)."""
    actual = []

    def run():
        try:
            actual.append(work())
        except Exception as error:
            actual.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, actual


def test_an_evaluation_is_of_one_version_and_training_of_the_newest(fleets):
    fleet = fleets(2)
    retained = fleet.engine.keep()
    (server,) = retained.kept_servers.servers
    local_copy, second = fleet.place(server), 1 - fleet.place(server)
    fleet.fakes[local_copy].token_seconds = 0.05
    thread, actual = in_thread(lambda: ask(retained, 4))
    wait_until(lambda: fleet.fakes[local_copy].drawn > 0)
    for version in (1, 2):
        fleet.publish(version)
        assert versions(ask(fleet.engine, 4)) == {version} and fleet.engine.version == version
    assert fleet.servers.measure()["servers_kept"] == 1
    thread.join()
    assert versions(actual[0]) == {0} == {retained.version}
    assert (fleet.fakes[local_copy].answered, fleet.fakes[second].answered) == (4, 8)
    assert [version for position, version in fleet.brought if position == local_copy] == [0]
    retained.release()  # given the newest, without the one between, and asked again
    wait_until(lambda: server.version == 2)
    fleet.fakes[local_copy].token_seconds = 0.0
    assert versions(ask(fleet.engine, 8)) == {2} and fleet.fakes[local_copy].answered > 4
    assert [version for position, version in fleet.brought if position == local_copy] == [0, 2]
    assert not fleet.servers.counters["servers_lost"]


def test_an_evaluation_begun_while_weights_are_on_the_way_waits_for_them(fleets):
    fleet = fleets(2)
    fleet.servers.begin_publish(1)
    retained = fleet.engine.keep()
    thread, actual = in_thread(lambda: ask(retained, 1))
    push_to_all(fleet.servers, fleet.push_weights, 1)
    fleet.servers.publishing = False
    fleet.publish(2)
    thread.join()
    assert versions(actual[0]) == {1}


def test_the_death_of_a_server_moves_an_evaluation_of_the_last_one_ends_it(fleets):
    fleet = fleets(4, eval_servers=2)
    retained = fleet.engine.keep()
    first, second = (fleet.fakes[fleet.place(server)] for server in retained.kept_servers.servers)
    assert describe(retained.kept_servers.servers[0])["why"] == "keeps version 0 for an evaluation"
    first.token_seconds = 60.0
    thread, actual = in_thread(lambda: ask(retained, 6))
    wait_until(lambda: first.drawn > 0)
    fleet.publish(1)
    first.kill()
    thread.join(60)
    assert len(actual[0]) == 6 == second.answered and versions(actual[0]) == {0}
    second.token_seconds = 60.0
    thread, actual = in_thread(lambda: ask(retained, 2))
    wait_until(lambda: fleet.servers.all[fleet.fakes.index(second)].in_flight)
    second.kill()
    thread.join(60)
    assert isinstance(actual[0], KeepLost) and second.url in str(actual[0])
    retained.release()
    again = fleet.engine.keep()
    assert len(again.kept_servers.servers) == 1, "one of the two that are left trains"
    assert versions(ask(again, 2)) == {1} == versions(ask(fleet.engine, 2))


def test_where_all_others_are_gone_training_gets_the_kept_one(fleets):
    fleet = fleets(2)
    retained = fleet.engine.keep()
    (server,) = retained.kept_servers.servers
    second = fleet.fakes[1 - fleet.place(server)]
    second.kill()
    wait_until(lambda: sum(entry.state == "up" for entry in fleet.servers.all) == 1)
    assert versions(ask(fleet.engine, 2)) == {0}
    assert any("they train now" in line for line in fleet.said)
    with pytest.raises(KeepLost):
        ask(retained, 1)
    assert fleet.engine.keep() is None, "one is left, which trains"


def test_servers_can_be_named(fleets):
    fleet = fleets(3)
    fleet.servers.config = fleet.servers.config.model_copy(
        update={"eval_servers": [fleet.fakes[2].url + "/"]}
    )
    assert isinstance(fleet.engine, KeepsVersions)
    retained = fleet.engine.keep()
    assert [server.url for server in retained.kept_servers.servers] == [fleet.fakes[2].url]
    assert fleet.engine.keep() is None, "it keeps one already"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"eval_servers": 2}, "leaves none of 2 servers to training"),
        ({"eval_servers": ["http://c"]}, "names 'http://c', which is not one of"),
        ({"eval_servers": 1, "sleep": True}, "rest while training"),
        ({"eval_servers": 1, "discover": "router+http://r:1"}, 'rollout.vllm.via to "direct"'),
    ],
)
def test_what_cannot_be_spared_is_refused(settings, words):
    config = VllmConfig(servers=["http://a", "http://b"], **settings)
    assert any(words in line for line in find_eval_server_conflicts(config))
    assert not list(find_eval_server_conflicts(VllmConfig(servers=["http://a"])))
