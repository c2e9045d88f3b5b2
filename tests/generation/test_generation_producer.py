"""The producer and the rounds made of it, with an engine whose policy is known: exact advantages,
lag and drops, nothing trained twice, nothing lost."""

import threading
import time

import numpy as np
import pytest
from known_policy import GROUP, Judge, KnownPolicy, OneToken, draw, make, make_rounds, wait_until

from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.methods.rl.batch_builder import EPISODE
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round_metrics import describe_episodes


def drawn(slots):
    return [slot.group.draw for slot in slots]


def take(producer, count):
    """Slots that were handed to the trainer."""
    slots = producer.next_slots(count)
    producer.mark_done(slots)
    return slots


@pytest.fixture
def closing():
    created = []
    yield created.append
    for producer in created:
        producer.close()


def test_rounds_come_in_the_order_of_the_prompts(closing):
    producer = make(KnownPolicy(delay=lambda index: 0.001 * (50 - index % 50)))
    closing(producer)
    assert drawn(producer.next_slots(3)) == [0, 1, 2]
    assert drawn(producer.next_slots(2)) == [3, 4]
    assert [e.tokens[1] for e in producer.next_slots(1)[0].group.episodes] == [10, 11, 12, 13]


def test_sync_draws_nothing_ahead(closing):
    engine = KnownPolicy()
    producer = make(engine)
    closing(producer)
    producer.next_slots(2)
    assert len(engine.calls) == len(set(engine.calls)) == 2 * GROUP


def test_ahead_is_the_bound_of_what_is_drawn_before_it_is_asked_for(closing):
    engine = KnownPolicy()
    producer = make(engine, ahead=3)
    closing(producer)
    producer.next_slots(2)
    wait_until(lambda: len(engine.calls) >= 5 * GROUP)
    time.sleep(0.05)
    assert len(engine.calls) == 5 * GROUP
    assert engine.threads == {"rollouts"}


def test_asynchronous_slots_come_as_they_finish(closing):
    engine = KnownPolicy(held={0, *range(3, 100)})
    producer = make(engine, ahead=2, ordered=False)
    closing(producer)
    assert sorted(drawn(producer.next_slots(2))) == [1, 2]
    engine.held.discard(3)
    assert drawn(producer.next_slots(1)) == [3]
    engine.held.discard(0)
    assert drawn(producer.next_slots(1)) == [0]


def test_failed_episodes_are_played_again_then_their_group_is_dropped(closing):
    first = {0: 2, 4 * GROUP + 1: 3}  # the first episode of prompt 0; the second of prompt 1
    producer = make(env=OneToken(first), rules={"retries": 2})
    closing(producer)
    retained, lost = producer.next_slots(2)
    assert retained.redone == 2 and retained.group is not None
    assert lost.group is None and lost.dropped == {"failed: server gone": 1}


def test_groups_of_equal_rewards_are_dropped_or_replaced(closing):
    equal = Judge(lambda row, position: 1.0 if row["id"] % 2 == 0 else float(position))
    producer = make(judge=equal)
    closing(producer)
    slots = producer.next_slots(4)
    assert [slot.group is None for slot in slots] == [True, False, True, False]
    assert slots[0].dropped == {"zero_advantage": 1}
    first = Judge(lambda row, position: 1.0 if row["id"] < 3 else float(position))
    refilling = make(judge=first, rules={"max_prompts": 3})
    closing(refilling)
    assert all(slot.group is not None for slot in refilling.next_slots(4))
    keeping = make(judge=equal, rules={"drop_flat": False})
    closing(keeping)
    assert all(slot.group is not None for slot in keeping.next_slots(4))


def test_a_resumed_run_asks_what_was_not_trained_and_nothing_twice(closing):
    producer = make(rows=12, ahead=2)
    closing(producer)
    before = drawn(take(producer, 3))
    state = producer.state()
    resumed = make(rows=12)
    closing(resumed)
    resumed.restore(state)
    after = drawn(resumed.next_slots(9))
    assert sorted(before + after) == list(range(12))


def test_prompts_taken_out_of_order_leave_no_hole_in_the_cursor(closing):
    producer = make(KnownPolicy(held={1}), rows=8, ahead=2, ordered=False)
    closing(producer)
    before = drawn(take(producer, 3))
    assert 1 not in before
    resumed = make(rows=8)
    closing(resumed)
    resumed.restore(producer.state())
    assert sorted(before + drawn(resumed.next_slots(5))) == list(range(8))


def test_a_cursor_of_other_data_is_refused(closing):
    producer, second = make(rows=8), make(rows=9)
    closing(producer), closing(second)
    with pytest.raises(UserError, match="the prompts differ"):
        second.restore(producer.state())


def test_prompts_nobody_earned_on_are_asked_again_with_new_draws(closing):
    engine = KnownPolicy()
    judge = Judge(lambda row, position: 0.0 if row["id"] == 0 else float(position))
    again = iter([False, False, True, True])
    producer = make(engine, judge=judge, take_retry=lambda: next(again))
    closing(producer)
    take(producer, 2)
    assert producer.prompts.waiting == 1
    calls = len(engine.calls)
    slots = producer.next_slots(2)
    assert slots[0].flat[0].row == {"id": 0} and slots[1].group.draw == 2
    assert not set(engine.calls[calls:]) & set(engine.calls[:calls])


def test_what_ends_a_run_reaches_the_loop(closing):
    class Broken(KnownPolicy):
        async def generate(self, *args, **kwargs):
            raise RunStopped("no server left")

    producer = make(Broken())
    closing(producer)
    with pytest.raises(RunStopped, match="no server left"):
        producer.next_slots(1)


def test_waiting_can_be_interrupted_and_closing_leaves_nothing_behind():
    engine = KnownPolicy(delay=lambda index: 60.0)
    stop = threading.Event()
    producer = make(engine)
    producer.stop_when(stop.is_set)
    threading.Timer(0.1, stop.set).start()
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        producer.next_slots(1)
    producer.close()
    assert time.monotonic() - begin < 30
    assert engine.running == 0 and engine.closed
    assert "rollouts" not in {thread.name for thread in threading.enumerate()}
    producer.close()


def test_a_round_has_exact_advantages_and_metrics(closing):
    producer = make()
    closing(producer)
    source = make_rounds(producer)
    (batch,) = draw(source)
    mask = batch.weights["pg"] != 0
    assert mask.sum() == 2 * GROUP
    places = batch.streams[EPISODE][mask]
    rewards = np.arange(GROUP) - 1.5
    want = np.tile(rewards / (np.std(rewards, ddof=1) + 1e-4), 2)
    np.testing.assert_allclose(batch.streams["advantage"][mask], want[places], rtol=1e-6)
    np.testing.assert_allclose(batch.streams["sampler_logp"][mask], -0.5)
    actual = source.metrics
    assert actual["reward"] == 1.5 and actual["frac_reward_zero_std"] == 0
    assert actual["reward_std"] == pytest.approx(np.std(rewards, ddof=1))
    assert actual["completions/mean_length"] == 1 and actual["completions/clipped_ratio"] == 0
    assert actual["lag/max"] == 0
    assert actual["prompt_tokens_saved"] == (2 * (GROUP - 1)) / (2 * GROUP * 2)
    assert [sample["reward"] for sample in source.samples] == [3.0, 0.0]


def test_lengths_of_answers_that_ended_are_told_from_those_cut_off():
    def episode(length, reason):
        return Episode([1] * (length + 1), [False] + [True] * length, [], [], reason)

    actual = describe_episodes([episode(2, "stop"), episode(9, "length"), episode(5, "stop")])
    names = ("mean_length", "max_length", "clipped_ratio", "mean_terminated_length")
    names += ("min_terminated_length", "max_terminated_length")
    values = [actual[f"completions/{name}"] for name in names]
    assert values == pytest.approx([16 / 3, 9, 1 / 3, 3.5, 2, 5])


def test_dropped_groups_still_count_in_the_mean_reward(closing):
    equal = Judge(lambda row, position: 9.0 if row["id"] == 0 else float(position))
    producer = make(judge=equal)
    closing(producer)
    source = make_rounds(producer)
    draw(source)
    assert source.metrics["reward"] == (9.0 + 1.5) / 2
    assert source.metrics["frac_reward_zero_std"] == 0.5
    assert source.metrics["dropped/zero_advantage"] == 1
    assert source.counters()["dropped"] == {"zero_advantage": 1}


def test_stale_groups_are_dropped_and_replaced(closing):
    engine = KnownPolicy()
    producer = make(engine, ahead=4, ordered=False)
    closing(producer)
    source = make_rounds(producer, max_lag=1)
    draw(source)
    wait_until(lambda: len(engine.answered) == 6 * GROUP)  # four groups of version 0 wait
    source.version = engine.version = 1
    draw(source)
    assert source.metrics["lag/max"] == 1
    source.version = engine.version = 3
    draw(source)
    assert source.metrics["dropped/stale"] >= 2
    assert source.metrics["lag/max"] <= 1


def test_prefetch_lags_one_round(closing):
    engine = KnownPolicy()
    producer = make(engine, ahead=2)
    closing(producer)
    source = make_rounds(producer)
    lags = []
    for version in range(4):
        source.version = engine.version = version
        draw(source)
        lags.append(source.metrics["lag/max"])
        # What is drawn ahead is of this version, all of it.
        wait_until(lambda count=2 * version + 4: len(engine.answered) == count * GROUP)
    assert lags == [0, 1, 1, 1]


def test_a_run_without_anything_to_learn_from_stops_with_the_reason(closing):
    """The rounds come out with their numbers and samples, and are not asked again meanwhile; the
    end says what was sampled."""
    producer = make(judge=Judge(lambda row, position: 0.0))
    closing(producer)
    source = make_rounds(producer, max_idle=3)
    for count in (1, 2, 3):
        assert draw(source) == [] and source.last_part
        assert source.metrics["idle_rounds"] == count and source.metrics["reward"] == 0
        assert {sample["prompt_number"] for sample in source.samples} <= {
            2 * count - 2,
            2 * count - 1,
        }
        assert len(source.samples) == 2
    with pytest.raises(RunStopped) as stopped:
        draw(source)
    for words in ("3 rounds", "max_idle_rounds", "6 zero_advantage", "answer '10'", "{'r': 0.0}"):
        assert words in str(stopped.value)


def test_no_reward_at_all_is_an_error(closing):
    class Nobody:
        async def score(self, episodes, row):
            return [{} for _ in episodes]

    producer = make(judge=Nobody())
    closing(producer)
    with pytest.raises(UserError, match="no reward judges"):
        producer.next_slots(1)


def test_replayed_groups_stand_in_for_flat_ones_and_are_marked(closing):
    judge = Judge(lambda row, position: float(position) if row["id"] < 2 else 1.0)
    producer = make(judge=judge)
    closing(producer)
    source = make_rounds(producer, replay=ReplayBuffer(4, max_lag=2))
    draw(source)
    source.version = 1
    (batch,) = draw(source)
    assert source.metrics["groups/replayed"] == 2
    assert source.metrics["reward"] == 1.0  # that of the fresh groups alone
    advantages = batch.streams["advantage"][batch.weights["pg"] != 0]
    assert sorted(np.round(advantages, 2)) == sorted(2 * [-1.16, -0.39, 0.39, 1.16])
    source.version = 4  # too old by now
    assert draw(source) == [] and source.metrics["groups/replayed"] == 0


def test_the_replay_buffer_keeps_the_most_informative():
    def group(draw, scale):
        actual = Group(draw, {}, [], [], advantages=scale * np.array([-1.0, 1.0]))
        actual.totals = np.array([0.0, scale])
        return actual

    buffer = ReplayBuffer(2, max_lag=10)
    buffer.store([group(0, 1.0), group(1, 3.0), group(2, 2.0), group(3, 0.0)], version=0)
    assert sorted(g.draw for g in buffer.draw(5, version=1)) == [1, 2]
    assert all(g.replayed for g in buffer.draw(2, version=1))


def test_state_travels_through_json(closing):
    import json

    producer = make()
    closing(producer)
    source = make_rounds(producer)
    draw(source)
    source.version = 1
    state = json.loads(json.dumps(source.state()))
    second = make()
    closing(second)
    resumed = make_rounds(second)
    resumed.restore(state)
    assert resumed.version == 1
    assert resumed.counters()["rounds"] == 1
    draw(resumed)
    assert [s["prompt_number"] for s in resumed.samples] == [2, 2] or resumed.samples
