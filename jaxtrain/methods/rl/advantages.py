"""Advantages: how much better an answer was than the others, in numpy and float64.

Shapes: N episodes, K reward functions. A reward that had nothing to say is NaN and never counts; an
episode without any reward gets advantage 0.
"""

from collections.abc import Sequence

import numpy as np

from jaxtrain.generation.episodes import Episode, Group

EPSILON = 1e-4
"""Added to standard deviations before dividing, as TRL does."""


def reward_table(groups: Sequence[Group], names: Sequence[str]) -> np.ndarray:
    """Rewards [N, K] of the groups' episodes in order; NaN for None."""
    rows = [row for group in groups for row in group.rewards]
    return np.array(
        [[np.nan if row.get(name) is None else row[name] for name in names] for row in rows],
        np.float64,
    ).reshape(len(rows), len(names))


def turn_tables(groups: Sequence[Group], names: Sequence[str]) -> list[np.ndarray]:
    """Rewards [N, K] of the groups' episodes as seen from each turn: what is still to come, that is
    the rewards of the whole episode (`reward_table`, the first entry) less those that earlier turns
    have earned. As many tables as the longest list of rewarded turns; an episode that was over
    before has the rest of it to come: what it was given as a whole."""
    table_NK = reward_table(groups, names)
    episodes = [episode for group in groups for episode in group.episodes]
    tables = [table_NK]
    for turn in range(max((len(episode.turn_rewards) for episode in episodes), default=0) - 1):
        earned_NK = np.array(
            [[_of_turn(episode, turn).get(name, 0.0) for name in names] for episode in episodes],
            np.float64,
        ).reshape(table_NK.shape)
        tables.append(tables[-1] - earned_NK)
    return tables


def _of_turn(episode: Episode, turn: int) -> dict[str, float]:
    return episode.turn_rewards[turn] if turn < len(episode.turn_rewards) else {}


def weigh(
    rewards_NK: np.ndarray,
    weights_K: Sequence[float],
    clip: tuple[float, float] | None = None,
) -> np.ndarray:
    """Weighted sum [N] of the rewards that are there, within `clip`; NaN where none is."""
    weighted_NK = rewards_NK * np.asarray(weights_K, np.float64)
    totals_N = np.nansum(weighted_NK, axis=1)
    if clip is not None:
        totals_N = np.clip(totals_N, *clip)
    return np.where(np.isnan(rewards_NK).all(axis=1), np.nan, totals_N)


def compute_advantages(
    rewards_NK: np.ndarray,
    sizes: Sequence[int],
    weights_K: Sequence[float],
    *,
    baseline: str = "group",
    scale: str = "group",
    combine: str = "sum_then_normalize",
    clip: tuple[float, float] | None = None,
    penalty_N: np.ndarray | None = None,
    whiten: bool = False,
) -> np.ndarray:
    """Advantages [N] of consecutive groups of `sizes` episodes.

    baseline group | leave_one_out | batch | none, scale group | batch | none: see section task.
    combine normalize_then_sum is GDPO (arXiv 2601.05242): every reward is normalized within its
    group, then the weighted sum within the batch; baseline and scale do not matter.
    clip: bounds of an episode's sum of rewards; penalty: subtracted from it after that. whiten: at
    last all advantages to mean 0 and deviation 1 (TRL's normalize_advantages).
    Standard deviations are unbiased (n - 1).
    """
    bounds = np.cumsum([0, *sizes])
    groups = [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert bounds[-1] == len(rewards_NK), (sizes, rewards_NK.shape)
    if combine == "normalize_then_sum":
        normal_NK = rewards_NK.copy()
        for group in groups:
            part = rewards_NK[group]
            normal_NK[group] = (part - mean(part)) / (deviation(part) + EPSILON)
        totals_N = weigh(normal_NK, weights_K)
        if penalty_N is not None:
            totals_N = totals_N - penalty_N
        return np.nan_to_num(normalize(totals_N), nan=0.0)
    assert combine == "sum_then_normalize", combine
    totals_N = weigh(rewards_NK, weights_K, clip)
    if penalty_N is not None:
        totals_N = totals_N - penalty_N
    found = totals_N.copy()
    for group in groups:
        part = totals_N[group]
        match baseline:
            case "group":
                found[group] = part - mean(part)
            case "leave_one_out":
                found[group] = leave_one_out(part)
            case "batch":
                found[group] = part - mean(totals_N)
            case "none":
                pass
            case _:
                raise AssertionError(baseline)
        if scale == "group":
            found[group] /= deviation(part) + EPSILON
    if scale == "batch":
        found /= deviation(totals_N) + EPSILON
    return np.nan_to_num(normalize(found) if whiten else found, nan=0.0)


def normalize(values_N: np.ndarray) -> np.ndarray:
    """Mean 0, deviation 1."""
    return (values_N - mean(values_N)) / (deviation(values_N) + EPSILON)


def leave_one_out(totals_G: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the others' in its group (RLOO, arXiv 2402.14740); alone: 0."""
    count = np.count_nonzero(~np.isnan(totals_G))
    if count < 2:
        return np.where(np.isnan(totals_G), np.nan, 0.0)
    return (totals_G - mean(totals_G)) * count / (count - 1)


def is_flat(
    rewards_GK: np.ndarray,
    weights_K: Sequence[float],
    combine: str,
    clip: tuple[float, float] | None = None,
) -> bool:
    """Whether nothing can be learned from comparing a group's episodes: all rewards are equal."""
    if combine == "normalize_then_sum":
        used = [k for k, weight in enumerate(weights_K) if weight]
        return bool(np.isclose(deviation(rewards_GK[:, used]), 0.0).all())
    return bool(np.isclose(deviation(weigh(rewards_GK, weights_K, clip)), 0.0))


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is not NaN; 0 where nothing is."""
    there = ~np.isnan(values)
    return np.where(there, values, 0.0).sum(0) / np.maximum(there.sum(0), 1)


def deviation(values: np.ndarray) -> np.ndarray:
    """Unbiased standard deviation over the first axis of what is not NaN; 0 for fewer than two."""
    there = ~np.isnan(values)
    squares = np.where(there, values - mean(values), 0.0) ** 2
    return np.sqrt(squares.sum(0) / np.maximum(there.sum(0) - 1, 1))
