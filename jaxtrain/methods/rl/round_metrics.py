"""Numbers and examples that describe groups of answers, under the names that TRL's users know."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.generation.producer import reward_names
from jaxtrain.methods.rl.advantages import deviation, reward_table, weigh
from jaxtrain.text_safety import escape_control_chars


def describe_rewards(
    groups: Sequence[Group], weights: dict[str, float], datasets: Sequence[str] = ()
) -> dict[str, float]:
    """Mean rewards and how they spread, under TRL's names, and by dataset where there are several.
    Groups dropped as zero_advantage count, so that the mean is that of all prompts."""
    names = reward_names(groups)
    if not names:
        return {}
    rewards_NK = reward_table(groups, names)
    totals_N = weigh(rewards_NK, [weights.get(name, 1.0) for name in names])
    datasets_P = [group.dataset for group in groups for _ in group.sizes]
    parts = np.split(totals_N, np.cumsum([size for group in groups for size in group.sizes])[:-1])
    spreads = [float(deviation(part)) for part in parts]
    found = {
        "reward": nan_mean(totals_N),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": float(np.mean(np.isclose(spreads, 0.0))),
    }
    for k, name in enumerate(names):
        found[f"rewards/{name}/mean"] = nan_mean(rewards_NK[:, k])
        found[f"rewards/{name}/std"] = float(deviation(rewards_NK[:, k]))
    for index, name in enumerate(datasets):
        own = [k for k, dataset in enumerate(datasets_P) if dataset == index]
        if own:
            found[f"reward/{name}"] = nan_mean(np.concatenate([parts[k] for k in own]))
            flat = np.isclose([spreads[k] for k in own], 0.0)
            found[f"frac_reward_zero_std/{name}"] = float(np.mean(flat))
    return {name: value for name, value in found.items() if not np.isnan(value)}


def describe_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Lengths in drawn tokens, the share that was cut off, and what the environment measured."""
    if not episodes:
        return {}
    lengths = np.array([episode.num_sampled for episode in episodes])
    ended = np.array([episode.finish_reason != "length" for episode in episodes])
    found = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "num_tokens": float(sum(episode.num_tokens for episode in episodes)),
    }
    if ended.any():
        found["completions/mean_terminated_length"] = float(lengths[ended].mean())
        found["completions/min_terminated_length"] = float(lengths[ended].min())
        found["completions/max_terminated_length"] = float(lengths[ended].max())
    return {**found, **average_env_metrics(episodes)}


def average_env_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means of what the environment measured, as env/NAME, over the episodes that have it."""
    found = {}
    for name in dict.fromkeys(name for episode in episodes for name in episode.metrics):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        pairs = [value if isinstance(value, tuple) else (value, 1.0) for value in values]
        if weight := sum(pair[1] for pair in pairs):
            found[f"env/{name}"] = float(sum(pair[0] for pair in pairs) / weight)
    return found


def choose_samples(
    groups: Sequence[Group],
    weights: dict[str, float],
    count: int | None,
    datasets: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Up to `count` lines for samples.jsonl: the best and the worst answers in turn; None: all, in
    the order of their prompts."""
    scored = []
    for group in groups:
        for episode, rewards in zip(group.episodes, group.rewards, strict=True):
            there = {name: value for name, value in rewards.items() if value is not None}
            total = sum(weights.get(name, 1.0) * value for name, value in there.items())
            scored.append((total, group, episode, rewards))
    if count is None:
        chosen = sorted(range(len(scored)), key=lambda i: scored[i][1].draw)
    else:
        order = sorted(range(len(scored)), key=lambda i: -scored[i][0])
        best, worst = order[: (count + 1) // 2], order[len(order) - count // 2 :]
        chosen = dict.fromkeys([*best, *reversed(worst)])
    lines = []
    for i in chosen:
        total, group, episode, rewards = scored[i]
        line = {"prompt_number": group.draw, **describe_sample(episode, total, rewards)}
        if datasets:
            line["dataset"] = datasets[group.dataset]
        lines.append({**line, "policy_version": episode.min_version})
    return lines


def describe_sample(
    episode: Episode, reward: float, rewards: Mapping[str, float | None]
) -> dict[str, Any]:
    """What every line of samples.jsonl has."""
    return {
        **({"policy": episode.policy} if episode.policy else {}),
        **({"agent": episode.agent} if episode.agent else {}),
        "reward": reward,
        "rewards": rewards,
        "prompt": episode.prompt,
        "completion": episode.completion,
        "finish_reason": episode.finish_reason,
        "tokens": episode.num_sampled,
    }


def excerpt(said: Any, width: int = 160) -> str:
    """The end of a text, or of a conversation's last message, on one line, quoted."""
    if isinstance(said, list) and said and isinstance(said[-1], Mapping):
        said = said[-1].get("content")
    text = " ".join(str(said or "").split())
    return escape_control_chars(repr(text if len(text) <= width else f"...{text[-width:]}"))


def nan_mean(values: np.ndarray) -> float:
    """Mean of what is not NaN; NaN of nothing."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")
