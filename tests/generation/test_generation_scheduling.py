"""Scheduling: which rows leave first, which are given up, which prompts are drawn, how much is
replayed; an engine whose answers wait until they are let go."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from known_policy import GROUP, Judge, KnownPolicy, OneToken, draw, make, make_rounds, wait_until

from jaxtrain.config.load import validate_config
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import Greso, SkipSolved, open_curator
from jaxtrain.generation.engine import Completion, EpisodeFailed, PromptRequest
from jaxtrain.generation.prompts import MAX_ATTEMPTS
from jaxtrain.generation.version_tracker import VersionTracker, note_version
from jaxtrain.methods.rl.replay import ReplayBuffer


class Telling(KnownPolicy):
    """Says which version begins an answer, as real engines do; the answer is that version's."""

    def __init__(self, held=()):
        super().__init__(held=held)
        self.begun: list[tuple[int, int]] = []
        """(draw, version) of each answer that was begun."""

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        note_version(started := self.version)
        self.begun.append((draw_of(index), started))
        actual = await super().generate(prompt, sampling, stop_ids, index)
        return Completion(*actual[:3], [started])


def draw_of(index):
    return index // (MAX_ATTEMPTS * GROUP)


@pytest.fixture
def closing():
    created = []
    yield lambda producer: created.append(producer) or producer
    for producer in created:
        producer.close()


def trained(source):
    """Draws of the groups that the next round trains."""
    draw(source)
    return [group.draw for group in source._tally.groups]


def begin(source, engine, version):
    """The loop has trained a round: it publishes that version."""

    def publish(number, params, rebuild):
        source.producer.wait(asyncio.sleep(0.005))  # the episodes go on meanwhile
        engine.version = number
        return {}

    roles = SimpleNamespace(rebuild=lambda role: None, trained="policy")
    held = SimpleNamespace(roles=roles, params=dict)
    live = SimpleNamespace(snapshot=lambda: held, phase=lambda *words: nullcontext(), auxiliary={})
    source.access = SimpleNamespace(publisher=SimpleNamespace(publish=publish), policies=())
    source.version, source._trained = version - 1, True
    source.finish(live, interrupted=False)


def test_the_oldest_tokens_leave_first(closing):
    """Draw 0 began first and is over last, by newer weights: those before it are older."""
    engine = KnownPolicy(held={0, 3, 4})
    producer = closing(make(engine, ahead=3, ordered=False))
    source = make_rounds(producer, max_lag=2)
    assert sorted(trained(source)) == [1, 2]
    begin(source, engine, 1)
    engine.held.discard(0)  # drawn by version 1
    wait_until(lambda: engine.answered.count(0) == GROUP)
    engine.version = 0
    engine.held.discard(3)  # by version 0, though it was started later
    wait_until(lambda: engine.answered.count(3) == GROUP)
    engine.version = 1
    assert [slot.group.draw for slot in producer.next_slots(1)] == [3]
    assert [slot.group.draw for slot in producer.next_slots(1)] == [0]


@pytest.mark.parametrize("ordered", [True, False])
def test_groups_of_a_round_have_one_order_whichever_ends_first(closing, ordered):
    """So `async` with max_lag 0 packs, and sums, what `sync` does."""
    engine = KnownPolicy(delay=lambda index: 0.02 * (3 - draw_of(index) % 4))
    source = make_rounds(closing(make(engine, ordered=ordered)), per_round=4, max_lag=0)
    assert [trained(source) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert engine.answered[:GROUP] == [3] * GROUP, "the last prompt ends first"


def test_what_no_round_can_take_is_given_up_and_asked_anew(closing):
    engine = Telling(held={0})
    producer = closing(make(engine, ahead=2, ordered=False))
    source = make_rounds(producer, max_lag=1)
    assert 0 not in trained(source)
    begin(source, engine, 1)
    assert 0 not in trained(source)
    assert producer.cancelled["stale"] == 0  # version 0 may still be trained by version 1
    before = engine.calls.count(0)
    begin(source, engine, 2)
    wait_until(lambda: producer.cancelled["stale"] >= 1 and engine.calls.count(0) > before)
    engine.held.clear()
    wait_until(lambda: engine.answered.count(0) == GROUP)
    draws = [draw for _ in range(3) for draw in trained(source)]
    assert 0 in draws  # the new answers, of version 2, in the place of the old ones
    assert {started for draw, started in engine.begun if draw == 0} == {0, 2}
    assert sum(engine.answered.count(draw) for draw in set(draws)) == len(set(draws)) * GROUP
    assert source.counters()["dropped"].get("stale", 0) == 0


def test_cancelled_groups_are_counted_once_in_the_rounds_numbers(closing):
    engine = Telling(held={0})
    producer = closing(make(engine, ahead=2, ordered=False))
    source = make_rounds(producer, max_lag=0)
    draw(source)
    begin(source, engine, 1)
    wait_until(lambda: producer.cancelled["stale"] == 1)
    draw(source)
    assert source.metrics["cancelled/stale"] == 1
    draw(source)
    assert "cancelled/stale" not in source.metrics


def test_a_prompt_that_is_always_too_slow_is_dropped_in_the_end(closing):
    engine = Telling(held={0})
    producer = closing(make(engine, ahead=1, ordered=False))
    source = make_rounds(producer, per_round=1, max_lag=0)
    draw(source)
    for version in (1, 2, 3):
        wait_until(
            lambda: any(slot.tracker.oldest == engine.version for slot in running(producer, 0))
        )
        begin(source, engine, version)
        wait_until(lambda count=version: producer.cancelled["stale"] >= count)
    actual = []
    for _ in range(3):
        draw(source)
        actual.append(source.metrics.get("dropped/stale", 0))
    assert sum(actual) == 1 and source.counters()["dropped"] == {"stale": 1}
    assert 0 not in engine.answered


def running(producer, draw):
    return [slot for slot in list(producer._playing.values()) if slot.requests[-1].draw == draw]


def test_what_turns_out_to_be_old_later_is_given_up_then(closing):
    """An engine that draws in chunks tells the version of the first one when it is over."""

    class Late(Telling):
        async def generate(self, prompt, sampling, stop_ids=(), index=0):
            started = self.version
            while draw_of(index) == 0 and self.version == 0:
                await asyncio.sleep(0.002)
            note_version(started)
            self.begun.append((draw_of(index), started))
            return Completion([10 + index % GROUP], [-0.5], "stop", [started])

    engine = Late()
    producer = closing(make(engine, ahead=2, ordered=False))
    source = make_rounds(producer, max_lag=0)
    draw(source)
    begin(source, engine, 1)
    wait_until(lambda: engine.begun.count((0, 1)) == GROUP)
    assert 0 in trained(source) + trained(source) and producer.cancelled["stale"] == 1


def test_what_failed_for_good_counts_though_its_group_is_given_up(closing):
    class Env(OneToken):
        async def run(self, row, engine, sampling, index):
            if draw_of(index) == 0 and index % GROUP == 1:
                raise EpisodeFailed("no such world", again=False)
            return await super().run(row, engine, sampling, index)

    engine = Telling(held={0})
    producer = closing(make(engine, Env(), ahead=2, ordered=False))
    source = make_rounds(producer, max_lag=0)
    draw(source)
    failures = producer.player.failures
    before = failures._failed
    begin(source, engine, 1)
    wait_until(lambda: producer.cancelled["stale"] == 1 and failures._failed == before + 1)


def test_an_engine_that_tells_nothing_loses_nothing(closing):
    """Only turns that are over say how old a group is; one that waits is not given up."""
    engine = KnownPolicy(held={0})
    producer = closing(make(engine, ahead=2, ordered=False))
    source = make_rounds(producer, max_lag=0)
    draw(source)
    begin(source, engine, 5)
    draw(source)
    assert producer.cancelled["stale"] == 0


def test_closing_ends_what_was_given_up_too():
    engine = Telling(held={0, 1})
    producer = make(engine, ahead=2, ordered=False)
    source = make_rounds(producer, per_round=1, max_lag=0)
    draw(source)
    engine.version = 1
    producer.drop_older(1)
    producer.close()
    assert engine.closed and engine.running == 0 and not producer._running


def test_ages_are_those_of_what_is_still_played():
    ages = VersionTracker()
    ages.add(0)(3), ages.add(1)(2)
    again = ages.add(1)
    again(1), again(4)  # drawn anew elsewhere
    assert ages.oldest == 2
    ages.forget(1)
    assert ages.oldest == 3
    ages.add(2)(-1)
    assert ages.oldest == 3 and VersionTracker().oldest is None


def test_a_share_of_the_round_is_replayed_and_so_many_prompts_fewer_are_asked(closing):
    engine = KnownPolicy()
    producer = closing(make(engine))
    source = make_rounds(producer, per_round=4, replay=ReplayBuffer(8, 4), num_replayed=1)
    for version, (fresh, replayed) in enumerate([(4, 0), (3, 1), (3, 1)]):
        requests = len(engine.calls)
        begin(source, engine, version)
        draw(source)
        assert source.metrics["groups"] == 4 and source.metrics["groups/replayed"] == replayed
        assert len(engine.calls) - requests == fresh * GROUP
    resumed = closing(make(KnownPolicy()))
    rounds = make_rounds(resumed, per_round=4, replay=ReplayBuffer(8, 4), num_replayed=1)
    rounds.restore(json.loads(json.dumps(source.state())))
    source.version = rounds.version = 3
    assert trained(source) == trained(rounds)


def test_replayed_groups_come_in_the_parts_of_a_streamed_round(closing):
    producer = closing(make(streaming=True))
    options = {"per_round": 4, "parts": 2, "replay": ReplayBuffer(8, 4), "num_replayed": 3}
    source = make_rounds(producer, **options)
    for version in range(2):
        source.version = version
        parts = [len(draw(source))]
        while not source.last_part:
            parts.append(len(draw(source)))
        assert len(parts) == 2 and source.metrics["groups"] == 4
        assert source.metrics["groups/replayed"] == 3 * version


def curated(curator, judge, rounds, per_round=4, rows=4):
    """Rows asked in each round."""
    producer = make(judge=judge, rows=rows, curator=curator)
    source = make_rounds(producer, per_round=per_round, max_idle=99)
    try:
        actual = []
        for _ in range(rounds):
            draw(source)
            actual.append(
                sorted(ask.row["id"] for slot in source._tally.slots for ask in slot.requests)
            )
        return actual, source.state(), source.metrics
    finally:
        producer.close()


def test_solved_prompts_are_asked_every_fourth_time():
    judge = Judge(lambda row, position: 1.0 if row["id"] == 0 else position % 2)
    actual, state, metrics = curated(SkipSolved(0), judge, 6, per_round=3)
    requests = [row for rows in actual for row in rows]
    assert requests.count(0) == 2 and len(requests) == 18
    # The order is 0 1 2 3 0 1 2 3 ...: what was left out counts as done.
    assert state["prompts"]["low"] == 18 + 4
    json.dumps(state)


def test_greso_asks_flat_prompts_less_and_less_but_never_never():
    curator = Greso(1, explore=0.5, floor=0.1)
    ask = lambda draw: PromptRequest(draw, 0, {}, 0, 7)  # noqa: E731
    shares = []
    for flat in range(6):
        shares.append(np.mean([curator.choose(ask(draw)) for draw in range(4000)]))
        curator.learn(ask(flat), [1.0, 1.0])
    want = np.maximum(0.1, 0.5 ** np.arange(6))
    np.testing.assert_allclose(shares, want, atol=0.03)  # four standard deviations of 4000 draws
    curator.learn(ask(9), [0.0, 1.0])
    assert all(curator.choose(ask(draw)) for draw in range(50))


def test_a_resumed_curator_chooses_as_one_that_went_on():
    judge = Judge(lambda row, position: 1.0 if row["id"] % 3 else position % 2)
    full, _, _ = curated(Greso(5), judge, 8, rows=9)
    first, state, _ = curated(Greso(5), judge, 5, rows=9)
    producer = make(judge=judge, rows=9, curator=Greso(5))
    source = make_rounds(producer, per_round=4, max_idle=99)
    source.restore(json.loads(json.dumps(state)))
    for rows in full[5:]:
        draw(source)
        requests = [ask.row["id"] for slot in source._tally.slots for ask in slot.requests]
        assert sorted(requests) == rows
    producer.close()
    assert full[:5] == first and len({*sum(full, [])}) == 9


def test_where_all_is_solved_one_is_asked_nonetheless(closing):
    class Nothing:
        def choose(self, ask):
            return False

        def learn(self, ask, rewards):
            raise ValueError("nothing was asked")

        state = restore = None

    prompts = make(rows=5, curator=Nothing())
    closing(prompts)
    assert prompts.prompts.next().draw == 5 and prompts.prompts.skipped == 5


def test_an_own_curator_is_found_and_what_it_raises_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "class Odd:\n"
        "    def __init__(self, seed, column='id'): self.column = column\n"
        "    def choose(self, ask): return ask.row[self.column] % 2\n"
        "    def learn(self, ask, rewards): pass\n"
        "    def state(self): return {1}\n"
        "    def restore(self, state): pass\n"
    )
    curator = open_curator("mine.py:Odd", {}, 0)
    actual, *_ = curated_without_state(curator)
    assert actual == [1, 3]
    with pytest.raises(UserError, match=r"'mine.py:Odd'.*no JSON"):
        curator.state()
    broken = open_curator("mine.py:Odd", {"column": "none"}, 0)
    with pytest.raises(UserError, match=r"mine.py:Odd', choose\(\): KeyError"):
        curated_without_state(broken)
    with pytest.raises(UserError, match="options are column"):
        open_curator("mine.py:Odd", {"colum": "id"}, 0)
    with pytest.raises(UserError, match="did you mean 'greso'"):
        open_curator("gresso", {}, 0)
    with pytest.raises(UserError, match=r"curator_options.floor is 3"):
        open_curator("greso", {"floor": 3}, 0)


def curated_without_state(curator):
    producer = make(curator=curator)
    try:
        return [slot.group.draw for slot in producer.next_slots(2)], producer
    finally:
        producer.close()


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"replay_share": 0.5}, "replay_share 0.5 is 4 groups of a round, but"),
        ({"replay_share": 0.95, "replay_size": 9}, "leaves no place of"),
    ],
)
def test_impossible_shares_are_refused(rollout, words):
    table = {
        "model": {"path": "x"},
        "task": {"kind": "rl"},
        "data": {"datasets": [{"path": "x.jsonl"}]},
        "run": {"max_steps": 1},
        "rollout": rollout,
    }
    with pytest.raises(UserError, match=words):
        validate_config(table, "test")
