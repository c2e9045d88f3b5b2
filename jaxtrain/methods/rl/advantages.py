"""Advantages: how much better an episode did than those it is compared with, in float64.

Shapes: N episodes, K reward functions. A reward that a function did not give is NaN and never
counts; an episode without any reward gets advantage 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.generation.episodes import Group
from jaxtrain.generation.reward_table import deviation, mean, reward_names, turn_tables, weigh

EPSILON = 1e-4
"""Added to standard deviations before dividing, as TRL does."""


@dataclass(frozen=True)
class AdvantageOptions:
    """Estimator of advantages from rewards.

    baseline group | leave_one_out | batch | none, scale group | batch | mean | none: section task.
    combine normalize_then_sum is GDPO (arXiv 2601.05242): every reward is normalized within its
    group, then the weighted sum within the batch; baseline and scale have no effect.
    """

    baseline: str = "group"
    scale: str = "group"
    combine: str = "sum_then_normalize"
    clip: tuple[float, float] | None = None
    """Bounds of an episode's sum of rewards."""
    whiten: bool = False
    """Bring all advantages to mean 0 and deviation 1 in the end (TRL's normalize_advantages)."""


@dataclass(frozen=True, eq=False)
class RewardTable:
    """The rewards of a part of a round, kept for whatever has to compute its advantages again."""

    rewards_TNK: list[np.ndarray]
    """Rewards-to-go at each turn: see reward_table.turn_tables."""
    weights: tuple[float, ...]
    sizes: tuple[int, ...]
    """Episodes of each set that is compared with itself, in order."""


def assign_advantages(
    groups: Sequence[Group], weights: dict[str, float], options: AdvantageOptions
) -> RewardTable:
    """Fill in totals and advantages of the groups, and return their rewards."""
    names = reward_names(groups)
    weights_K = tuple(weights.get(name, 1.0) for name in names)
    sizes = tuple(size for group in groups for size in group.sizes)
    table = RewardTable(turn_tables(groups, names), weights_K, sizes)
    advantages_NT = turn_advantages(table, options)
    totals_N = weigh(table.rewards_TNK[0], weights_K, options.clip)
    bounds = np.cumsum([len(group.episodes) for group in groups])[:-1]
    for group, advantages, totals in zip(
        groups, np.split(advantages_NT, bounds), np.split(totals_N, bounds), strict=True
    ):
        group.advantages, group.totals = advantages, totals
    return table


def turn_advantages(
    table: RewardTable, options: AdvantageOptions, penalty_N: np.ndarray | None = None
) -> np.ndarray:
    """Return the advantages [N, turns] of a table of rewards, less a penalty of each episode; one
    turn where no single turns are rewarded."""
    advantages_TN = [
        compute_advantages(rewards_NK, table.sizes, table.weights, options, penalty_N)
        for rewards_NK in table.rewards_TNK
    ]
    return np.stack(advantages_TN, axis=1)


def compute_advantages(
    rewards_NK: np.ndarray,
    sizes: Sequence[int],
    weights_K: Sequence[float],
    options: AdvantageOptions,
    penalty_N: np.ndarray | None = None,
) -> np.ndarray:
    """Return the advantages [N] of consecutive groups of `sizes` episodes.

    The penalty is subtracted from an episode's sum of rewards after that was clipped. Standard
    deviations are unbiased (n - 1).
    """
    bounds = np.cumsum([0, *sizes])
    groups = [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert bounds[-1] == len(rewards_NK), (sizes, rewards_NK.shape)
    if options.combine == "normalize_then_sum":
        normal_NK = rewards_NK.copy()
        for group in groups:
            part = rewards_NK[group]
            normal_NK[group] = (part - mean(part)) / (deviation(part) + EPSILON)
        totals_N = weigh(normal_NK, weights_K)
        if penalty_N is not None:
            totals_N = totals_N - penalty_N
        return np.nan_to_num(normalize(totals_N), nan=0.0)
    assert options.combine == "sum_then_normalize", options.combine
    totals_N = weigh(rewards_NK, weights_K, options.clip)
    if penalty_N is not None:
        totals_N = totals_N - penalty_N
    advantages_N = totals_N.copy()
    for group in groups:
        part = totals_N[group]
        match options.baseline:
            case "group":
                advantages_N[group] = part - mean(part)
            case "leave_one_out":
                advantages_N[group] = leave_one_out(part)
            case "batch":
                advantages_N[group] = part - mean(totals_N)
            case "none":
                pass
            case _:
                raise AssertionError(options.baseline)
        if options.scale == "group":
            advantages_N[group] /= deviation(part) + EPSILON
        elif options.scale == "mean":  # MaxRL (arXiv 2602.02710)
            average = mean(part)
            advantages_N[group] *= 1 / average if average > 0 else 0.0
    if options.scale == "batch":
        # Of the totals, not of the advantages: whatever the baseline, it is the rewards' spread.
        advantages_N /= deviation(totals_N) + EPSILON
    return np.nan_to_num(normalize(advantages_N) if options.whiten else advantages_N, nan=0.0)


def normalize(values_N: np.ndarray) -> np.ndarray:
    """Shift and scale values to mean 0 and deviation 1."""
    return (values_N - mean(values_N)) / (deviation(values_N) + EPSILON)


def leave_one_out(totals_G: np.ndarray) -> np.ndarray:
    """Return each reward minus the mean of the others in its group (RLOO, arXiv 2402.14740); 0 for
    a group of one."""
    count = np.count_nonzero(~np.isnan(totals_G))
    if count < 2:
        return np.where(np.isnan(totals_G), np.nan, 0.0)
    # x - (sum - x) / (n - 1) = (x - mean) n / (n - 1)
    return (totals_G - mean(totals_G)) * count / (count - 1)
