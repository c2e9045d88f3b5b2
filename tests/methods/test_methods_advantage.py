"""Advantages against the estimators' formulas, by hand and written out one by one."""

import numpy as np
import pytest

from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.generation.reward_table import is_flat, turn_tables, weigh
from jaxtrain.methods.rl.advantages import (
    EPSILON,
    AdvantageOptions,
    compute_advantages,
    leave_one_out,
)
from jaxtrain.methods.rl.config import OBJECTIVES

REWARDS = np.array([[1.0], [0.0], [0.0], [1.0], [1.0], [3.0]])
"""Two groups: 1, 0, 0, 1 and 1, 3."""
SIZES = [4, 2]


def compute(rewards=REWARDS, sizes=SIZES, weights=(1.0,), penalty_N=None, **options):
    rewards_NK, chosen = np.asarray(rewards, float), AdvantageOptions(**options)
    return compute_advantages(rewards_NK, sizes, weights, chosen, penalty_N)


def test_group_mean_and_unbiased_deviation_by_hand():
    # Deviations: sqrt(1/3) of 1, 0, 0, 1 and sqrt(2) of 1, 3.
    first, second = 0.5 / (np.sqrt(1 / 3) + EPSILON), 1.0 / (np.sqrt(2.0) + EPSILON)
    want = [first, -first, -first, first, -second, second]
    np.testing.assert_allclose(compute(), want, rtol=1e-12)


def test_no_scale_is_dr_grpo():
    np.testing.assert_allclose(compute(scale="none"), [0.5, -0.5, -0.5, 0.5, -1.0, 1.0])


def test_mean_scale_is_max_rl():
    np.testing.assert_allclose(compute(scale="mean"), [1, -1, -1, 1, -0.5, 0.5], rtol=1e-12)
    rewards = np.array([[0.0], [0.0], [-1.0], [0.5]])
    np.testing.assert_allclose(compute(rewards, [2, 2], scale="mean"), np.zeros(4))


def test_batch_scale_keeps_the_groups_means():
    want = np.array([0.5, -0.5, -0.5, 0.5, -1.0, 1.0]) / (np.std(REWARDS, ddof=1) + EPSILON)
    np.testing.assert_allclose(compute(scale="batch"), want, rtol=1e-12)


def test_leave_one_out_is_the_mean_of_the_others():
    actual = compute(baseline="leave_one_out", scale="none")
    want = [1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3, 1 - 3, 3 - 1]
    np.testing.assert_allclose(actual, want, rtol=1e-12)
    np.testing.assert_allclose(leave_one_out(np.array([5.0])), [0.0])


def test_rloo_clips_rewards_before_they_are_compared():
    """Rewards 1, 0, 0, 1 and 1, 3 within [0.25, 2] are 1, 1/4, 1/4, 1 and 1, 2."""
    actual = compute(baseline="leave_one_out", scale="none", clip=(0.25, 2.0))
    want = [1 - 0.5, 0.25 - 0.75, 0.25 - 0.75, 1 - 0.5, 1 - 2, 2 - 1]
    np.testing.assert_allclose(actual, want, rtol=1e-12)
    # Of several rewards it is the weighted sum that has bounds, not each of them.
    two = np.column_stack([REWARDS[:, 0], -REWARDS[:, 0]])
    actual = compute(two, weights=(2.0, 1.0), baseline="none", scale="none", clip=(0.25, 2.0))
    np.testing.assert_allclose(actual, [1, 0.25, 0.25, 1, 1, 2])


def test_rloos_penalty_comes_off_the_clipped_reward():
    """A penalty of 0.5 for the third answer alone: its own -0.5, the others' mean -0.5 / 3."""
    penalty = np.array([0, 0, 0.5, 0, 0, 0])
    options = {"baseline": "leave_one_out", "scale": "none", "clip": (0.25, 2.0)}
    actual = compute(penalty_N=penalty, **options)
    want = np.array([0.5 + 0.5 / 3, -0.5 + 0.5 / 3, -1.0, 0.5 + 0.5 / 3, -1, 1])
    np.testing.assert_allclose(actual, want, rtol=1e-12)
    # An answer that nobody judged has no advantage, whatever its divergence.
    rewards = np.array([[1.0], [np.nan], [3.0]])
    actual = compute(rewards, [3], penalty_N=np.array([0.0, 9.0, 0.0]), **options)
    np.testing.assert_allclose(actual, [-1.0, 0.0, 1.0])


def test_whitened_advantages_have_mean_zero_and_deviation_one():
    plain = compute(baseline="leave_one_out", scale="none")
    actual = compute(baseline="leave_one_out", scale="none", whiten=True)
    want = (plain - plain.mean()) / (plain.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(actual, want, rtol=1e-12)


def test_a_group_that_the_clip_makes_equal_is_flat():
    rewards = np.array([[2.0], [3.0], [9.0]])
    assert is_flat(rewards, (1.0,), "sum_then_normalize", (0.0, 2.0))
    assert not is_flat(rewards, (1.0,), "sum_then_normalize", (0.0, 2.5))


def test_no_baseline_is_the_reward_itself():
    np.testing.assert_allclose(compute(baseline="none", scale="none"), REWARDS[:, 0])


def test_batch_baseline():
    want = REWARDS[:, 0] - REWARDS.mean()
    np.testing.assert_allclose(compute(baseline="batch", scale="none"), want, rtol=1e-12)


def test_gdpo_normalizes_each_reward_and_then_the_batch():
    rng = np.random.default_rng(0)
    rewards = np.column_stack([rng.normal(size=6), 100 * rng.normal(size=6)])
    normal = np.empty_like(rewards)
    for group in (slice(0, 4), slice(4, 6)):
        part = rewards[group]
        normal[group] = (part - part.mean(0)) / (part.std(0, ddof=1) + EPSILON)
    totals = normal @ [1.0, 0.5]
    want = (totals - totals.mean()) / (totals.std(ddof=1) + EPSILON)
    actual = compute(rewards, weights=(1.0, 0.5), combine="normalize_then_sum")
    np.testing.assert_allclose(actual, want, rtol=1e-10)


def test_reinforce_baseline_is_swifts_and_verls():
    """REINFORCE++-baseline: numbers that compute_advantages of ms-swift 4.6.0
    (swift/rl_core/advantage.py, "reinforce_plus_plus", scaled by batch) printed for these rewards;
    those of verl 0.9.1 (core_algos, answers of one token) differ by its other epsilon alone."""
    preset = OBJECTIVES["reinforce_baseline"]
    rewards = np.array([1.0, 0, 0, 1, 1, 3, 2, 2, 0, 0, 5, 1])[:, None]
    actual = compute(
        rewards,
        [4, 4, 4],
        baseline=preset["baseline"],
        scale=preset["scale_rewards"],
        combine=preset["combine_rewards"],
        whiten=preset["normalize_advantages"],
    )
    small, half, large = 0.37078242639408654, 0.7415648527881731, 1.1123472791822595
    swift = [small, -small, -small, small, -half, half, 0, 0]
    np.testing.assert_allclose(actual, [*swift, -large, -large, 2.5954769847586054, -small], 1e-12)
    small, half, large = 0.37080992348956, 0.74161984697912, 1.11242977046868
    verl = [small, -small, -small, small, -half, half, 0, 0]
    np.testing.assert_allclose(actual, [*verl, -large, -large, 2.59566946442692, -small], 1e-4)


def test_gdpo_is_trls():
    """Numbers that TRL 1.16.0 (grpo_trainer.py, multi_objective_aggregation normalize_then_sum)
    computes in float64, with a reward that is missing and an answer that has none."""
    nan = np.nan
    rewards = [[1, 10], [0, 30], [0, 20], [1, nan], [1, 5], [3, 5], [2, 5], [nan, nan]]
    preset = OBJECTIVES["gdpo"]
    actual = compute(rewards, [4, 4], (1.0, 0.5), combine=preset["combine_rewards"])
    trl = [0.46171363975258195, -0.46171363975258195, -1.0926698007959916, 1.0926698007959916]
    trl += [-1.2617987613339066, 1.2617987613339066, 0.0, 0.0]
    np.testing.assert_allclose(actual, trl, rtol=1e-12, atol=1e-12)


def test_missing_rewards_do_not_count():
    rewards = [[1.0, np.nan], [np.nan, np.nan], [3.0, np.nan], [np.nan, 2.0]]
    totals = weigh(np.array(rewards), (1.0, 0.5))
    np.testing.assert_allclose(totals, [1.0, np.nan, 3.0, 1.0])
    actual = compute(rewards, [4], (1.0, 0.5), scale="none")
    # The mean is that of the three that were judged; who was not gets nothing.
    np.testing.assert_allclose(actual, [1 - 5 / 3, 0.0, 3 - 5 / 3, 1 - 5 / 3])


@pytest.mark.parametrize("combine", ["sum_then_normalize", "normalize_then_sum"])
def test_equal_rewards_are_flat_and_give_nothing(combine):
    rewards = np.full((4, 2), 0.1)
    assert is_flat(rewards, (1.0, 1.0), combine)
    np.testing.assert_allclose(compute(rewards, [4], (1.0, 1.0), combine=combine), 0.0, atol=1e-9)


def test_opposite_rewards_are_flat_as_a_sum_only():
    rewards = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert is_flat(rewards, (1.0, 1.0), "sum_then_normalize")
    assert not is_flat(rewards, (1.0, 1.0), "normalize_then_sum")
    # A reward that is only reported decides nothing.
    assert is_flat(np.array([[1.0, 0.0], [1.0, 1.0]]), (1.0, 0.0), "normalize_then_sum")


def test_a_turn_is_judged_by_what_was_still_to_come():
    """Three episodes of one prompt: step rewards (1, 0, 2), (0) and (1, 1), then 1, 0 and nothing
    for the whole. Still to come from turn 0, 1, 2: 4, 3, 3; 0, 0, 0; 2, 1, 0. With `goal` weighing
    2: 5, 4, 4; 0, 0, 0; 2, 1, 0. Compared as ever: less the mean of the three."""
    turns = [[{"step": 1.0}, {}, {"step": 2.0}], [{"step": 0.0}], [{"step": 1.0}, {"step": 1.0}]]
    episodes = [
        Episode(
            [1, 2], [False, True], [0, -1], [-1, 0], "stop", rewards=provided, turn_rewards=steps
        )
        for steps, provided in zip(turns, [{"goal": 1.0}, {"goal": 0.0}, {}], strict=True)
    ]
    group = Group(0, {}, episodes, [episode.all_rewards for episode in episodes])
    assert group.rewards == [{"goal": 1.0, "step": 3.0}, {"goal": 0.0, "step": 0.0}, {"step": 2.0}]
    tables = turn_tables([group], ["goal", "step"])
    actual = [compute(table, [3], (2.0, 1.0), baseline="group", scale="none") for table in tables]
    want = np.array([[5, 0, 2], [4, 0, 1], [4, 0, 0]])
    np.testing.assert_allclose(actual, want - want.mean(1, keepdims=True), rtol=1e-12)
    # What equals in sum may differ in when it was earned: such a group teaches something.
    for steps, earned in zip([(1.0, 0.0), (0.0, 1.0)], episodes[:2], strict=True):
        earned.rewards, earned.turn_rewards = {}, [{"step": value} for value in steps]
    late = Group(0, {}, episodes[:2], [episode.all_rewards for episode in episodes[:2]])
    flat = [is_flat(table, (1.0,), "sum_then_normalize") for table in turn_tables([late], ["step"])]
    assert flat == [True, False]
