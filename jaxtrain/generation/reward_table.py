"""Rewards of groups as arrays: what the producer's filters and a method's advantages both read.

Shapes: N episodes of all groups in order, G those of one group, K reward functions. A reward that a
function did not give is NaN and never counts.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxtrain.generation.episodes import Episode, Group


def reward_names(groups: Iterable[Group]) -> list[str]:
    """Return the names of all rewards that occur, in order of appearance."""
    return list(dict.fromkeys(name for g in groups for row in g.rewards for name in row))


def reward_table(groups: Sequence[Group], names: Sequence[str]) -> np.ndarray:
    """Return the rewards [N, K] of the groups' episodes in order; NaN for None."""
    rows = [row for group in groups for row in group.rewards]
    return np.array(
        [[np.nan if row.get(name) is None else row[name] for name in names] for row in rows],
        np.float64,
    ).reshape(len(rows), len(names))


def turn_tables(groups: Sequence[Group], names: Sequence[str]) -> list[np.ndarray]:
    """Return the rewards-to-go [N, K] of the groups' episodes at each turn.

    The first table is `reward_table`, the rewards of whole episodes; each further one subtracts
    what the previous turn earned. There are as many tables as the longest list of rewarded turns.
    An episode that ended before a turn keeps what it was given as a whole.
    """
    table_NK = reward_table(groups, names)
    episodes = [episode for group in groups for episode in group.episodes]
    tables = [table_NK]
    for turn in range(max((len(episode.turn_rewards) for episode in episodes), default=0) - 1):
        earned_NK = np.array(
            [
                [_turn_reward(episode, turn).get(name, 0.0) for name in names]
                for episode in episodes
            ],
            np.float64,
        ).reshape(table_NK.shape)
        tables.append(tables[-1] - earned_NK)
    return tables


def _turn_reward(episode: Episode, turn: int) -> dict[str, float]:
    return episode.turn_rewards[turn] if turn < len(episode.turn_rewards) else {}


def weigh(
    rewards_NK: np.ndarray, weights_K: Sequence[float], clip: tuple[float, float] | None = None
) -> np.ndarray:
    """Return the weighted sum [N] of rewards that are not NaN, within `clip`; NaN if all are."""
    weighted_NK = rewards_NK * np.asarray(weights_K, np.float64)
    totals_N = np.nansum(weighted_NK, axis=1)
    if clip is not None:
        totals_N = np.clip(totals_N, *clip)
    return np.where(np.isnan(rewards_NK).all(axis=1), np.nan, totals_N)


def is_flat(
    rewards_GK: np.ndarray,
    weights_K: Sequence[float],
    combine: str,
    clip: tuple[float, float] | None = None,
) -> bool:
    """Return whether all rewards of a group are equal, so that comparing its episodes teaches
    nothing."""
    if combine == "normalize_then_sum":
        # Rewards are normalized one by one there: two that cancel in the sum still differ.
        used = [k for k, weight in enumerate(weights_K) if weight]
        return bool(np.isclose(deviation(rewards_GK[:, used]), 0.0).all())
    return bool(np.isclose(deviation(weigh(rewards_GK, weights_K, clip)), 0.0))


def is_worthless(group: Group) -> bool:
    """Return whether no episode earned anything, so a better policy may try again later."""
    values = [value for row in group.rewards for value in row.values() if value is not None]
    return bool(values) and max(abs(value) for value in values) < 1e-6


def mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over the first axis of what is not NaN; 0 if everything is."""
    valid = ~np.isnan(values)
    return np.where(valid, values, 0.0).sum(0) / np.maximum(valid.sum(0), 1)


def deviation(values: np.ndarray) -> np.ndarray:
    """Return the unbiased standard deviation over the first axis of what is not NaN; 0 for fewer
    than two values."""
    valid = ~np.isnan(values)
    squares = np.where(valid, values - mean(values), 0.0) ** 2
    return np.sqrt(squares.sum(0) / np.maximum(valid.sum(0) - 1, 1))
