"""The rollout service, its workers and the trainer's end of it, without Ray: the same groups as in
one process, and every row of what may fail."""

import threading
import time
from concurrent.futures import Future

import pytest

from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.episode_codec import pack
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.ray import remote_producer
from jaxtrain.generation.ray import worker_pool as crews
from jaxtrain.generation.ray.hosts import describe_hosts
from jaxtrain.generation.ray.remote_producer import RemoteProducer, ServiceRequest
from jaxtrain.generation.ray.service import RolloutService
from jaxtrain.generation.ray.worker import EpisodeWorker
from tests.generation.far_toy import (
    GROUP,
    OPENER,
    Table,
    make_player,
    make_prompts,
    rules,
    settings,
)
from tests.generation.inline import Inline


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


class Pool:
    """The trainer's engine: a table that changes, and what it hears."""

    def __init__(self):
        self.epoch, self.version, self.heard = 1, 0, []

    def table(self):
        return self.epoch, {"version": self.version}

    def apply_reports(self, reports):
        self.heard += reports

    def publish(self, version):
        self.epoch, self.version = self.epoch + 1, version


class Cluster:
    def __init__(self, workers=2, episode_seconds=60.0):
        self.clock, self.workers = Clock(), [Inline(EpisodeWorker) for _ in range(workers)]
        self.service = Inline(
            lambda: RolloutService(
                lambda: self.workers, episode_seconds=episode_seconds, clock=self.clock
            )
        )
        self.producers = []

    def join(self, speaker="host 1, process 7", **options):
        requests = {key: options.pop(key) for key in ("rows", "worker", "ahead") if key in options}
        output = options.pop("said", [])
        created = RemoteProducer(
            self.service,
            ServiceRequest(speaker, OPENER, settings(**requests)),
            rules(),
            log=output.append,
            **options,
        )
        self.producers.append(created)
        return created


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(remote_producer, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(remote_producer, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(crews, "BEAT", 0.02)
    created = Cluster()
    yield created
    for producer in created.producers:
        producer.close()
    for process in (created.service, *created.workers):
        process.stop()


def take(producer, count):
    slots = producer.next_slots(count)
    producer.mark_done(slots)
    return slots


def drawn(slots):
    return [slot.group.draw for slot in slots]


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_the_groups_are_those_of_one_process(cluster):
    player = make_player(Table())
    alone = Producer(make_prompts(30), player)
    remote_result = cluster.join(engine=Pool())
    try:
        for _ in range(2):
            ours_here, far = take(alone, 4), take(remote_result, 4)
            assert [pack(slot.group, ()) for slot in ours_here] == [pack(s.group, ()) for s in far]
            assert far[0].group.episodes[0].metrics == {"accuracy": (1, 3)}
        assert alone.state() == remote_result.state()
        assert (remote_result.prompts.done, remote_result.prompts.waiting) == (8, 0)
    finally:
        alone.close()
    assert all("draw" in worker.calls for worker in cluster.workers)


def test_tokens_carry_the_version_of_the_newest_table(cluster):
    pool = Pool()
    producer = cluster.join(engine=pool)
    assert {slot.group.min_version for slot in take(producer, 4)} == {0}
    pool.publish(5)
    assert {slot.group.min_version for slot in take(producer, 4)} == {5}


def test_the_trainer_hears_of_servers_and_counts(cluster):
    pool = Pool()
    producer = cluster.join(engine=pool, worker={"reports": [{"url": "http://a", "what": "lost"}]})
    take(producer, 4)
    wait_until(lambda: len(pool.heard) == 2)  # each worker said so once
    assert producer.counters()["vllm/requests"] == 4 * GROUP  # said with the answers themselves


def test_an_answer_that_is_read_late_does_not_undo_newer_numbers(cluster):
    producer = cluster.join()
    take(producer, 4)
    late = cluster.service.call("tick", producer.token, None).result()
    take(producer, 4)
    producer._take_in(late)
    assert late["done"] == 4 and producer.prompts.done == 8
    cluster.service.end()  # its successor counts its answers anew
    take(producer, 2)
    assert producer.prompts.done == 10


def test_what_overtakes_each_other_counts_once():
    """A beat's answer, made before that of a draw, may be heard behind it."""
    crew = crews.RolloutWorkers([], "key", OPENER, {}, episode_seconds=1.0, log=print)
    member = crews.WorkerHandle(None, "worker 0")
    for count in (3.0, 9.0, 6.0, 12.0):
        crew._take_report(member, {"counters": {"vllm/requests": count}})
    assert crew.counters["vllm/requests"] == 12.0


def test_failures_are_counted_where_the_slots_are(cluster):
    output = []
    producer = cluster.join(worker={"fails": 4}, rows=6, said=output)
    slots = take(producer, 6)
    lost = [slot for slot in slots if slot.group is None]
    assert [dict(slot.dropped) for slot in lost] == [{"failed: no such world": 1}]
    assert producer.player.failures.newest.cause == "env.kind 'toy': no such world"
    assert sum("no such world" in line for line in output) == 1


def test_a_lost_worker_costs_another_try(cluster):
    output = []
    producer = cluster.join(worker={"holds": range(30)}, said=output)
    threading.Thread(target=lambda: end_soon(cluster), daemon=True).start()
    slot = producer.next_slots(1)[0]
    # Both its tries went to workers that were lost: the prompt is given up, the run goes on.
    assert slot.group is None and dict(slot.dropped) == {"failed: worker lost": 1}
    assert slot.redone == GROUP and any("was lost" in line for line in output)
    assert producer.counters()["ray/workers_lost"] >= 1


def end_soon(cluster):
    for _ in range(2):
        wait_until(lambda: any("draw" in worker.calls for worker in cluster.workers))
        busy = next(worker for worker in cluster.workers if "draw" in worker.calls)
        busy.calls.clear()
        busy.end()


def test_a_worker_that_hangs_is_ended_and_its_prompts_are_asked_again(cluster):
    cluster.service.made.episode_seconds = 0.1
    producer = cluster.join()
    take(producer, 2)
    cluster.workers[0].silent.set()
    slots = take(producer, 6)
    assert all(slot.group is not None for slot in slots)
    assert cluster.workers[0].ends == 1 and producer.counters()["ray/workers_hung"] == 1


def test_a_lost_service_asks_nothing_twice_and_loses_nothing(cluster):
    output = []
    producer = cluster.join(rows=12, ahead=2, said=output)
    first = take(producer, 3)
    held = producer.next_slots(2)  # handed out, not done: in the trainer's hands
    cluster.service.end()
    then = producer.next_slots(3)
    producer.mark_done(held)
    state = producer.state()
    producer.mark_done(then)
    rest = take(producer, 4)
    assert sorted(drawn(first + held + then + rest)) == list(range(12))
    assert producer.restarts == 1 and "was lost" in output[-1]
    assert producer.state()["low"] == 12
    assert state["low"] + len(state["beyond"]) == 5  # `then` would be asked again, `held` not


def test_a_service_lost_while_slots_are_marked_done(cluster):
    producer = cluster.join(rows=6)
    slots = producer.next_slots(3)
    cluster.service.end()
    producer.mark_done(slots)
    assert sorted(drawn(slots + take(producer, 3))) == list(range(6))


def test_a_resumed_trainer_gets_what_was_not_done(cluster):
    producer = cluster.join(rows=10, ahead=3)
    before, state = drawn(take(producer, 4)), producer.state()
    producer.next_slots(2)
    producer.close()  # frees the lease at once
    resumed = cluster.join(rows=10)
    resumed.restore(state)
    assert sorted(before + drawn(take(resumed, 6))) == list(range(10))


def test_a_second_trainer_is_refused_until_the_lease_is_over(cluster):
    first = cluster.join(speaker="host 1, process 7")
    take(first, 1)
    with pytest.raises(UserError, match="held by host 1, process 7"):
        cluster.join(speaker="host 2, process 9")
    cluster.clock.now += 61.0
    second = cluster.join(speaker="host 2, process 9")
    assert take(second, 1)
    with pytest.raises(RunStopped, match="serves another run now: host 2, process 9"):
        first.next_slots(1)


def test_a_trainer_that_trains_for_long_keeps_its_lease(cluster):
    first = cluster.join()
    for _ in range(3):
        cluster.clock.now += 40.0
        calls = len(cluster.service.calls)
        wait_until(lambda calls=calls: cluster.service.calls[calls + 1 :].count("tick") > 1)
    with pytest.raises(UserError, match="held by"):
        cluster.join(speaker="another")
    assert take(first, 1)


def test_a_signal_ends_the_waiting(cluster):
    producer = cluster.join(worker={"holds": range(30)})
    stop = threading.Event()
    producer.stop_when(stop.is_set)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Interrupted):
        producer.next_slots(1)
    assert producer.state()["low"] == 0


def test_what_cannot_be_opened_ends_the_start(cluster):
    with pytest.raises(RuntimeError, match="no_such_function"):
        opener = "tests.generation.far_toy:no_such_function"
        RemoteProducer(cluster.service, ServiceRequest("me", opener, settings()), rules())


def test_a_lost_cluster_ends_the_run(cluster):
    producer = cluster.join(worker={"holds": range(30)})

    def report_ended():
        cluster.service.error = RunStopped("Ray cluster lost")

    threading.Timer(0.05, report_ended).start()
    with pytest.raises(RunStopped, match="Ray cluster lost"):
        producer.next_slots(1)


def test_what_became_too_old_is_given_up_where_it_is_played(cluster):
    """Episodes wait forever behind tokens of version 0, except one per group that fails."""
    pool = Pool()
    producer = cluster.join(engine=pool, rows=8, ahead=4, worker={"lingers": range(8)})
    taken = threading.Thread(target=lambda: slots.extend(producer.next_slots(4)))
    slots: list = []
    taken.start()
    wait_until(lambda: cluster.service.made._attached is not None)
    remote_result = cluster.service.made._attached.producer
    worlds = lambda: [worker.made._opened.player.envs.env for worker in cluster.workers]  # noqa: E731
    wait_until(
        lambda: len(remote_result._playing) == 8 and sum(entry.failed for entry in worlds()) == 8
    )
    wait_until(
        lambda: all(slot.tracker.oldest == 0 for slot in list(remote_result._playing.values()))
    )
    pool.publish(2)
    producer.drop_older(2)
    taken.join(30)
    assert remote_result.cancelled["stale"] == 8 and [slot.group for slot in slots] == [None] * 4
    # Those of the groups that were given up, and of the same prompts asked anew.
    wait_until(lambda: all(task.done() for task in remote_result._running))
    assert producer.cancelled["stale"] == 8
    wait_until(
        lambda: remote_result.player.failures._failed + len(remote_result.player.workers.late) == 16
    )


def test_hosts_say_where_their_logs_are():
    class Host:
        def __init__(self, **messages):
            self.told = messages

        def call(self, name):
            answer = Future()
            if self.told:
                answer.set_result(self.told)
            return answer

    host = Host(url="http://a:1", key="secret", log="servers/0.log", node="node-7")
    lines = list(describe_hosts([host, Host(), Host(failed="status 1, log X on Y")], 0.01))
    assert lines == [
        "server 0: log servers/0.log on node-7",
        "server 1 is not there yet: it waits for room; see ray status",
        "server 2: status 1, log X on Y",
    ]
