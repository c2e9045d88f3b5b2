"""Rollouts on a real Ray cluster of two nodes on this machine: the same groups as in one process,
and what happens when a worker, a service, a server, a node or the whole cluster goes."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from jaxtrain.config.ray import RayConfig
from jaxtrain.errors import UserError
from jaxtrain.generation.episode_codec import pack
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.ray.actors import start_service
from jaxtrain.generation.ray.hosts import HOST, PORT, RaySource, find_hosts, start_hosts
from jaxtrain.generation.ray.ray_cluster import join
from jaxtrain.generation.ray.remote_producer import RemoteProducer, ServiceRequest
from tests.generation.far_toy import (
    OPENER,
    Table,
    make_player,
    make_prompts,
    rules,
    settings,
)

pytest.importorskip("ray", reason="rollouts on several machines need ray: extra cluster")
pytestmark = pytest.mark.slow

CHILD = [sys.executable, str(Path(__file__).with_name("child_server.py")), HOST, PORT]


class Nodes:
    """A cluster of a head and one more node, and this process as its driver."""

    def __init__(self, peers=1):
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "include_dashboard": False},
        )
        self.more = [self.add() for _ in range(peers)]
        self.config = RayConfig(
            address=self.cluster.address,
            episode_workers=2,
            worker_cpus=2,
            episode_seconds=4.0,
            wait_seconds=120,
        )

    def add(self):
        return self.cluster.add_node(num_cpus=4)

    def join(self):
        return join(self.config)

    def end(self):
        for node in list(self.cluster.list_all_nodes()):  # shutdown() refuses without a head
            node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes():
    created = Nodes()
    yield created
    created.join().close()
    created.end()


@pytest.fixture
def attach(nodes):
    created = []

    def attach(service=None, output=None, **requests):
        cluster = nodes.join()
        service = service or start_service(cluster)
        options = {key: requests.pop(key) for key in ("rows", "worker", "ahead") if key in requests}
        log = ([] if output is None else output).append
        producer = RemoteProducer(
            service,
            ServiceRequest(requests.pop("who", "test"), OPENER, settings(**options)),
            rules(),
            log=log,
        )
        created.append(producer)
        return producer

    yield attach
    for producer in created:
        producer.close()
        if producer.service.error is None:
            producer.service.kill()


def take(producer, count):
    slots = producer.next_slots(count)
    producer.mark_done(slots)
    return slots


def drawn(slots):
    return sorted(slot.group.draw for slot in slots)


def wait_until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def test_groups_are_those_of_one_process_and_losses_cost_nothing(attach, tmp_path):
    alone = Producer(make_prompts(30), make_player(Table()))
    output = []
    # The first worker that plays an episode dies of it; the service is killed later.
    remote_result = attach(output=output, worker={"dies": str(tmp_path / "died")}, ahead=2)
    try:
        for lose in (False, True):
            ours_here, far = take(alone, 4), take(remote_result, 4)
            assert [pack(slot.group, ()) for slot in ours_here] == [pack(s.group, ()) for s in far]
            if not lose:
                remote_result.service.end()
        assert alone.state() == remote_result.state()
    finally:
        alone.close()
    assert (tmp_path / "died").exists() and any("was lost" in line for line in output)
    assert remote_result.restarts == 1 and remote_result.counters()["ray/service_restarts"] == 1


def test_a_worker_whose_episode_blocks_it_is_started_again(attach, tmp_path):
    producer = attach(worker={"blocks": str(tmp_path / "blocked")})
    assert drawn(take(producer, 4)) == list(range(4))
    assert producer.counters()["ray/workers_hung"] == 1


def test_a_second_run_is_refused_and_a_named_service_outlives_its_runs(nodes, attach):
    service = start_service(nodes.join(), "kept")
    first = attach(service, who="the first")
    assert drawn(take(first, 2)) == [0, 1]
    actual = nodes.join().find("kept")
    with pytest.raises(UserError, match="held by the first"):
        attach(actual, who="the second")
    state = first.state()
    first.close()
    second = attach(actual, who="the second")
    second.restore(state)
    assert drawn(take(second, 2)) == [2, 3]
    with pytest.raises(UserError, match="no such service"):
        nodes.join().find("another")


def listed(source):
    return {actual.url for actual in source.poll() or []}


def answers(url):
    try:
        return urllib.request.urlopen(f"{url}/", timeout=5).status == 200
    except OSError:
        return False


def test_servers_are_started_again_where_there_is_room(nodes, attach, tmp_path):
    cluster, output = nodes.join(), []
    created = start_hosts(cluster, CHILD, str(tmp_path), 2, 0, "fleet")
    source = RaySource(cluster, lambda: find_hosts(cluster, "fleet"), "fleet", output.append)
    wait_until(lambda: len(listed(source)) == 2)
    before = listed(source)
    wait_until(lambda: all(map(answers, before)))
    # A server that is killed: its actor ends, and comes back with another.
    created[0].end()
    wait_until(lambda: len(listed(source)) == 2 and listed(source) != before)
    current_time = listed(source)
    assert len(current_time & before) == 1
    # Its process ended with it: nobody listens there any more.
    wait_until(lambda: not answers((before - current_time).pop()), 20)
    # A node that goes takes a server and a worker along; both come back on the other.
    producer = attach()
    assert take(producer, 2)
    nodes.cluster.remove_node(nodes.more.pop(), allow_graceful=False)
    assert drawn(take(producer, 4)) == [2, 3, 4, 5]
    nodes.more.append(nodes.add())
    wait_until(lambda: len(listed(source)) == 2)
    for host in created:
        host.call("stop").result(30)
        host.kill()
    wait_until(lambda: not listed(source))


def test_the_end_of_the_cluster_ends_the_run():
    """In a process of its own, which Ray ends once it has lost its head."""
    script = Path(__file__).with_name("ray_head_lost.py")
    completed = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    lines = [
        line for line in completed.stdout.splitlines() if line.startswith(("stopped", "ended"))
    ]
    assert len(lines) == 2 and "Ray cluster lost" in lines[0], completed.stdout + completed.stderr
