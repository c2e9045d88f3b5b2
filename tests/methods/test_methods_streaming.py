"""Rounds that come out in parts while the rest of them is still played: the same groups, each once,
in minibatches that are those of an unstreamed round; numbers, drops and the cursor stay whole."""

import collections
import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_policy import (
    GROUP,
    SAMPLING,
    Judge,
    KnownPolicy,
    OneToken,
    draw,
    make_rounds,
    wait_until,
)

from jaxtrain.data.packing.steps import StepShape
from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.group_player import GroupPlayer, GroupRules
from jaxtrain.generation.producer import Producer, ProducerOptions
from jaxtrain.generation.prompts import PromptOrder
from jaxtrain.methods.rl.batch_builder import EPISODE, BatchBuilder
from jaxtrain.methods.rl.loss import PolicyObjective, policy_terms
from jaxtrain.methods.rl.replay import ReplayBuffer

MODES = {
    "sync": {"ahead": 0, "ordered": True},
    "prefetch": {"ahead": 4, "ordered": True},
    "async": {"ahead": 8, "ordered": False},
}


@pytest.fixture
def open_source():
    """A maker of streamed sources of rounds of 4 groups in 2 parts, all closed at the end."""
    created = []

    def make(engine=None, *, judge=None, rules=None, parts=2, producer=None, rows=100, **options):
        prompts = PromptOrder([[{"id": i} for i in range(rows)]], seed=0, shuffle=False)
        player = GroupPlayer(
            DatasetEnvs(OneToken(), judge or Judge()),
            engine or KnownPolicy(),
            SAMPLING,
            GroupRules(GROUP, {"r": 1.0}, **(rules or {})),
        )
        streamed = ProducerOptions(streaming=True, **(producer or {}))
        options = {"per_round": 4, "row_tokens": 64, **options}
        source = make_rounds(Producer(prompts, player, streamed), parts=parts, **options)
        created.append(source)
        return source

    yield make
    for source in created:
        source.close()


def draws_of(source):
    return [group.draw for group in source._tally.groups]


@pytest.mark.parametrize("mode", MODES)
def test_a_part_is_handed_out_while_the_rest_is_played(open_source, mode):
    engine = KnownPolicy(held={1, 2})
    source = open_source(engine, producer=MODES[mode])
    if mode == "async":
        engine.held |= set(range(4, 12))
    (batch,) = draw(source)
    assert (source.part, source.last_part) == (0, False)
    assert draws_of(source) == [0, 3]
    assert not {1, 2} & set(engine.answered), "the others have not ended yet"
    assert (batch.weights["pg"] != 0).sum() == 2 * GROUP
    engine.held.clear()
    assert len(draw(source)) == 1
    assert (source.part, source.last_part) == (1, True)
    assert len(set(draws_of(source))) == 4
    if mode != "async":
        assert sorted(draws_of(source)) == [0, 1, 2, 3]


def test_what_is_drawn_ahead_stays_in_its_own_round(open_source):
    """In mode prefetch a late group never takes the place of one of the next round."""
    engine = KnownPolicy(held={0})
    source = open_source(engine, producer=MODES["prefetch"])
    draw(source)
    wait_until(lambda: len(engine.answered) == 7 * GROUP)
    threading.Timer(0.1, engine.held.clear).start()
    draw(source)
    assert source.last_part and sorted(draws_of(source)) == [0, 1, 2, 3]
    lags = []
    for version in (1, 2):
        source.version = engine.version = version
        draw(source), draw(source)
        lags.append(source.metrics["lag/max"])
        assert sorted(draws_of(source)) == list(range(4 * version, 4 * version + 4))
    assert max(lags) <= 1


def test_parts_are_the_minibatches_of_an_unstreamed_round(open_source):
    """Equal groups give equal rows, advantages, loss and gradient."""
    rewards = np.random.default_rng(0).normal(size=(4, GROUP))
    judge = Judge(lambda row, position: float(rewards[row["id"], position]))
    parts = open_source(judge=judge)
    streamed = draw(parts) + draw(parts)
    source = open_source(judge=judge, parts=1)
    builder = BatchBuilder(StepShape(1, None, 64), "token", num_minibatches=2)
    source.stages = dataclasses.replace(source.stages, builder=builder)
    for actual_values, reference in zip(streamed, draw(source), strict=True):
        for name in ("tokens", "positions", "until", "targets", "owner"):
            if getattr(actual_values, name, None) is not None:
                np.testing.assert_array_equal(
                    getattr(actual_values, name), getattr(reference, name)
                )
        np.testing.assert_array_equal(actual_values.weights["pg"], reference.weights["pg"])
        for name in set(actual_values.streams) - {EPISODE}:
            np.testing.assert_array_equal(actual_values.streams[name], reference.streams[name])
        assert measure(actual_values) == measure(reference)


def measure(batch):
    """Loss and norm of its gradient for log-probs that depend on the place alone."""
    micro = jax.tree.map(lambda leaf: leaf[0], batch)
    logp = jnp.asarray(np.random.default_rng(1).normal(-1.5, 0.3, micro.tokens.shape), jnp.float32)

    def loss(logp):
        sums, _ = policy_terms(logp, jnp.ones_like(logp), micro, PolicyObjective(own_old=True))
        return sums["pg"] / micro.weights["pg"].sum()

    value, gradient = jax.value_and_grad(loss)(logp)
    assert float(jnp.abs(gradient).max()) > 0
    return float(value), float(jnp.linalg.norm(gradient))


def test_numbers_of_the_round_are_whole_at_its_end(open_source):
    judge = Judge(lambda row, position: float(position + row["id"]))
    source, full = open_source(judge=judge), open_source(judge=judge, parts=1)
    draw(source)
    first = source.metrics
    assert (first["part"], first["part/groups"], first["groups"]) == (0, 2, 2)
    assert source.samples == []
    draw(source), draw(full)
    actual = dict(source.metrics)
    assert (actual.pop("part"), actual.pop("part/groups")) == (1, 2)
    assert actual == full.metrics
    assert source.samples == full.samples and len(source.samples) == 2
    assert {
        k: source.counters()[k] for k in ("rounds", "groups", "episodes", "trained_tokens")
    } == {k: full.counters()[k] for k in ("rounds", "groups", "episodes", "trained_tokens")}


def test_dropped_places_are_counted_once_and_the_last_part_may_be_empty(open_source):
    judge = Judge(lambda row, position: 1.0 if row["id"] in (1, 2) else float(position))
    engine = KnownPolicy(held={1, 2})
    source = open_source(engine, judge=judge)
    assert len(draw(source)) == 1 and not source.last_part
    assert "dropped/zero_advantage" not in source.metrics
    engine.held.clear()
    assert draw(source) == [] and source.last_part
    assert source.metrics["dropped/zero_advantage"] == 2
    assert source.metrics["frac_reward_zero_std"] == 0.5
    assert source.metrics["reward"] == (2 * 1.5 + 2 * 1.0) / 4
    assert source.counters()["dropped"] == {"zero_advantage": 2}
    assert source.producer.state()["low"] == 4
    source.version = 1
    assert len(draw(source)) == 1 and source.part == 0
    assert "dropped/zero_advantage" not in source.metrics


def test_parts_wait_for_enough_groups_when_some_are_dropped(open_source):
    judge = Judge(lambda row, position: 1.0 if row["id"] in (0, 1) else float(position))
    source = open_source(judge=judge)
    draw(source)
    assert source.last_part, "two of four are left: one full minibatch"
    assert draws_of(source) == [2, 3]
    refilled = open_source(judge=judge, rules={"max_prompts": 4})
    sizes = []
    for _ in range(2):
        draw(refilled)
        sizes.append(refilled.metrics["part/groups"])
    assert sizes == [2, 2] and refilled.last_part
    assert refilled.metrics["dropped/zero_advantage"] == 2


def test_replayed_groups_fill_parts_and_none_is_trained_twice_in_a_round(open_source):
    judge = Judge(lambda row, position: float(position) if row["id"] < 6 else 1.0)
    source = open_source(judge=judge, replay=ReplayBuffer(8, max_lag=9))
    trained = collections.Counter()
    for version in range(3):
        source.version = version
        draw(source)
        while not source.last_part:
            draw(source)
        draws = draws_of(source)
        assert len(draws) == len(set(draws)) == 4
        trained.update(draws)
        assert source.metrics["groups/replayed"] == [0, 2, 4][version]
    assert set(trained) == set(range(6))


def test_stale_groups_are_replaced_within_the_round(open_source):
    engine = KnownPolicy()
    source = open_source(engine, producer=MODES["async"], max_lag=1)
    draw(source), draw(source)
    wait_until(lambda: len(engine.answered) == 12 * GROUP)
    source.version = engine.version = 2  # the eight that wait are of version 0
    draw(source), draw(source)
    assert source.last_part and source.metrics["lag/max"] <= 1
    assert source.metrics["dropped/stale"] == 8
    assert source.counters()["dropped"] == {"stale": 8}
    assert min(draws_of(source)) >= 12


def test_a_round_cut_short_asks_again_what_was_not_trained(open_source):
    """Even what had ended, but waited for others to fill its part."""
    engine = KnownPolicy(held={2})
    stop = threading.Event()
    source = open_source(engine, rows=8)
    source.producer.stop_when(stop.is_set)
    draw(source)
    trained = draws_of(source)
    wait_until(lambda: len(engine.answered) == 3 * GROUP)
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Interrupted):
        draw(source)
    assert 3 in engine.answered and 3 not in trained
    source.version += 1  # what the loop does with what was trained
    state = json.loads(json.dumps(source.state()))
    assert state["totals"]["groups"] == 2 and state["totals"]["rounds"] == 1

    resumed = open_source(rows=8)
    resumed.restore(state)
    assert resumed.version == 1
    for _ in range(2):  # the six that are left, and two of the next epoch
        draw(resumed), draw(resumed)
        trained += draws_of(resumed)
    assert sorted(trained) == list(range(10))


def test_a_round_that_waits_for_a_fresh_group_loses_nothing_when_it_is_interrupted(open_source):
    """Unstreamed, too: groups in hand while a stale one is replaced are not done."""
    engine = KnownPolicy()
    source = open_source(engine, parts=1, producer=MODES["async"], max_lag=0, rows=100)
    draw(source)
    wait_until(lambda: len(engine.answered) == 12 * GROUP)
    source.version = engine.version = 1
    engine.held = set(range(12, 100))
    stop = threading.Event()
    source.producer.stop_when(stop.is_set)
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(Interrupted):
        draw(source)
    assert source.state()["prompts"]["low"] == 4 and source.counters()["dropped"] == {}


def test_rounds_without_anything_to_learn_from_stop_the_run(open_source):
    source = open_source(judge=Judge(lambda row, position: 1.0))
    assert [draw(source) for _ in range(8)] == 8 * [[]]
    with pytest.raises(RunStopped, match="32 zero_advantage"):
        draw(source)
