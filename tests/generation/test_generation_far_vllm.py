"""Servers as processes other than the trainer's ask them: one table, many who choose by it."""

import asyncio
import json
import time

from fake_vllm import STOP, FakeVllm
from test_generation_vllm import ANSWER, DRAW, opened

from jaxtrain.generation.vllm.remote import RemoteVllm, TableSender, share


def make_worker(engine, name="w0", workers=1):
    """(what a worker opens, the trainer's end), its settings as they arrive."""
    shared = share(engine, workers)
    far = RemoteVllm(json.loads(json.dumps(shared.settings)), name)
    far.engine.first_pause = 0.01
    return far, shared.sender


def ask(far, sender, count=1, between=None):
    """Answers to `count` questions, while the worker and the trainer go on telling each other."""

    async def talk():
        while True:
            far.update(json.loads(json.dumps(sender.table()[1])))
            sender.apply_reports(far.reports())
            if between is not None:
                between()
            await asyncio.sleep(0.01)

    async def run():
        far.update(json.loads(json.dumps(sender.table()[1])))
        talking = asyncio.ensure_future(talk())
        calls = [far.engine.generate([1, i + 2], DRAW, (STOP,), i) for i in range(count)]
        try:
            return await asyncio.gather(*calls)
        finally:
            talking.cancel()
            await far.engine.close()

    return asyncio.run(run())


def test_a_worker_asks_the_servers_of_the_table():
    fakes = [FakeVllm(), FakeVllm()]
    with opened(fakes, concurrency=8) as (engine, servers, _):
        far, sender = make_worker(engine, workers=2)
        assert far.pool.config.concurrency == 4
        epoch, _ = sender.table()
        assert sender.table()[0] == epoch  # nothing has changed
        answers = ask(far, sender, 12)
        assert [answer.tokens for answer in answers] == [ANSWER] * 12
        assert {version for answer in answers for version in answer.versions} == {0}
        assert min(fake.answered for fake in fakes) > 2
        # The next version reaches one server: the worker asks the other no more.
        servers.begin_publish(1)
        servers.push_weights(servers.all[0])
        assert sender.table()[0] > epoch
        before = [fake.answered for fake in fakes]
        assert {v for answer in ask(far, sender, 6) for v in answer.versions} == {1}
        chosen = [f.url == servers.all[0].url for f in fakes].index(True)
        assert [f.answered - b for f, b in zip(fakes, before, strict=True)][1 - chosen] == 0
        assert far.engine.counters()["vllm/requests"] == 18


def test_a_server_that_dies_under_a_worker_is_found_by_the_trainer():
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].token_seconds = fakes[1].token_seconds = 0.02
    with opened(fakes, health_seconds=1000) as (engine, servers, output):
        far, sender = make_worker(engine)
        fakes[0].after(4, fakes[0].kill)
        answers = ask(far, sender, 10)
        assert [answer.tokens for answer in answers] == [ANSWER] * 10
        # Nobody would have looked for 1,000 s: the worker's report made the trainer look.
        assert [server.state for server in servers.all].count("down") == 1
        assert any("dropped (/health" in line for line in output)


def test_weights_of_another_run_are_dropped_everywhere():
    fake = FakeVllm()
    with opened([fake]) as (engine, servers, output):
        far, sender = make_worker(engine)
        fake.label = "somebody-elses-3"
        [answer] = ask(far, sender)  # the trainer brings the weights again
        assert answer.versions == [0] * 4
        assert any("this run never sent" in line for line in output)


def test_requests_of_workers_count_where_servers_are_watched():
    fake = FakeVllm()
    fake.token_seconds = 0.05
    seen = set()
    with opened([fake]) as (engine, servers, _):
        server = servers.all[0]
        far, sender = make_worker(engine)
        ask(far, sender, 3, between=lambda: seen.add(server.in_flight))
        sender.apply_reports(far.reports())
        assert max(seen) == 3 and server.in_flight == 0
        # Draining, it is let go of once no worker waits for it any more.
        far.pool.all[0].in_flight = 1
        sender.apply_reports(far.reports())
        servers.leave(server, "listed no more")
        assert not servers.end_drain(server)
        far.pool.all[0].in_flight = 0
        sender.apply_reports(far.reports())
        end = time.monotonic() + 10
        while server.state != "gone" and time.monotonic() < end:
            time.sleep(0.01)
        assert server.state == "gone"
        far.update(sender.table()[1])
        assert not far.pool.all


def test_versions_that_the_table_does_not_know_yet_are_the_runs_own():
    with opened([FakeVllm()]) as (engine, servers, _):
        far, sender = make_worker(engine)
        far.update(sender.table()[1])
        label = servers.label(7)
        assert far.pool.read_label(label) == 7 and far.pool.read_label("default") is None
        assert TableSender(servers).table()[1] == sender.table()[1]
