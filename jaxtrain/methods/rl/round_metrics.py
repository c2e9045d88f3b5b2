"""Metrics and examples of a round, under TRL's metric names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episode_metrics import describe_episodes, describe_sample, excerpt
from jaxtrain.generation.episodes import Group, RoundSlot
from jaxtrain.generation.group_player import GroupRules
from jaxtrain.generation.reward_table import deviation, reward_names, reward_table, weigh
from jaxtrain.methods.rl.batch_builder import RoundBatches


@dataclass(eq=False)
class RoundTally:
    """Slots taken from the producer and their outcome, for a part or for a round so far."""

    slots: list[RoundSlot] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """Groups that are trained; with several policies, those of each."""
    drops: Counter[str] = field(default_factory=Counter)
    """Groups, and too long episodes, left out, by reason."""
    saved_tokens: int = 0
    """Tokens that were not computed again, since groups share their prompt."""
    flat_tokens: int = 0
    """Tokens of all sequences, each by itself."""

    def add(self, part: "RoundTally") -> None:
        """Add what another part took."""
        self.slots += part.slots
        self.groups += part.groups
        self.drops.update(part.drops)
        self.saved_tokens += part.saved_tokens
        self.flat_tokens += part.flat_tokens

    def list_judged(self, policies: Sequence[str]) -> list[Group]:
        """Return all groups that were played and judged, the flat ones too, but no replayed ones;
        with several policies, those of each."""
        fresh = [group for group in self.groups if not group.replayed]
        flat = [group for slot in self.slots for group in slot.flat if group not in fresh]
        if not policies:
            return fresh + flat
        # `groups` has parts of games there, and only those that are trained.
        games = [slot.group for slot in self.slots if slot.group is not None]
        games += [group for group in flat if group not in games]
        parts = [group.of(policy) for policy in policies for group in games]
        return [part for part in parts if part is not None]


class RunTotals:
    """Totals of a run's rounds since its start, on process 0."""

    def __init__(self) -> None:
        self.counts, self.dropped = Counter[str](), Counter[str]()
        self.efficiency = 0.0
        """Packing efficiency of the last batches."""

    def add(self, tally: RoundTally, built: RoundBatches | None, *, begins: bool) -> None:
        """Add a part; begins: it is the first of its round."""
        self.dropped.update(tally.drops)
        self.counts.update(
            rounds=int(begins),
            groups=len(tally.groups),
            episodes=sum(len(group.episodes) for group in tally.groups),
        )
        if built is not None:
            self.counts.update(
                trained_tokens=built.trained_tokens, tokens=built.saving.packed_tokens
            )
            self.efficiency = built.packing_efficiency

    def state(self) -> dict[str, Any]:
        """Return the part of the cursor."""
        return {"totals": dict(self.counts), "dropped": dict(self.dropped)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a cursor."""
        self.counts, self.dropped = Counter(state["totals"]), Counter(state["dropped"])

    def counters(self) -> dict[str, Any]:
        """Return the totals, dropped groups by reason, and the last packing efficiency."""
        return {**self.counts, "dropped": dict(self.dropped), "packing_efficiency": self.efficiency}


def describe_groups(
    tally: RoundTally, judged: Sequence[Group], rules: GroupRules, version: int
) -> dict[str, float]:
    """Return the metrics of a round's groups, of each policy and agent by itself, too."""
    episodes = [e for group in judged for e in group.episodes if not e.given]
    return {
        **describe_policies(tally, judged, rules, version),
        **describe_agents(judged, rules),
        **describe_rewards(judged, rules.weights, rules.datasets),
        **describe_episodes(episodes),
        **{f"dropped/{reason}": float(n) for reason, n in tally.drops.items()},
        "groups": float(len(tally.groups)),
        "groups/replayed": float(sum(group.replayed for group in tally.groups)),
        "num_sampled_tokens": float(sum(episode.num_sampled for episode in episodes)),
        "prompt_tokens_saved": tally.saved_tokens / max(tally.flat_tokens, 1),
        "episodes/redone": float(sum(slot.redone for slot in tally.slots)),
        **describe_lag(tally.groups, version),
    }


def describe_policies(
    tally: RoundTally, judged: Sequence[Group], rules: GroupRules, version: int
) -> dict[str, float]:
    """Return the metrics of each policy behind its name: {"solver/reward": 0.4}."""
    metrics: dict[str, float] = {}
    for policy in rules.policies:
        played = [group for group in judged if group.episodes[0].policy == policy]
        trained = [group for group in tally.groups if group.episodes[0].policy == policy]
        numbers = {
            **describe_rewards(played, rules.weights),
            **describe_episodes([episode for group in played for episode in group.episodes]),
            **describe_lag(trained, version),
            "groups": float(len(trained)),
        }
        metrics |= {f"{policy}/{name}": value for name, value in numbers.items()}
    return metrics


def describe_agents(judged: Sequence[Group], rules: GroupRules) -> dict[str, float]:
    """Return the metrics of each agent behind its name, where one policy plays several."""
    metrics: dict[str, float] = {}
    named = [episode.agent for group in judged for episode in group.episodes if episode.agent]
    for agent in dict.fromkeys(named):
        if agent in rules.policies:
            continue
        played = [part for group in judged if (part := group.of_agent(agent)) is not None]
        numbers = {
            **describe_rewards(played, rules.weights),
            **describe_episodes([episode for group in played for episode in group.episodes]),
        }
        metrics |= {f"{agent}/{name}": value for name, value in numbers.items()}
    return metrics


def describe_lag(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return how many versions the groups' oldest tokens are behind the policy that trains."""
    lags = [group_lag(group, version) for group in groups]
    return {"lag/mean": float(np.mean(lags)), "lag/max": float(max(lags))} if lags else {}


def group_lag(group: Group, version: int) -> int:
    """Return the versions between the oldest token of a group and the policy that trains next."""
    return version - group.min_version if group.min_version >= 0 else 0


def describe_rewards(
    groups: Sequence[Group], weights: dict[str, float], datasets: Sequence[str] = ()
) -> dict[str, float]:
    """Return mean rewards and their spread under TRL's names, and by dataset if there are several.
    Groups dropped as zero_advantage count, so that the mean is that of all prompts."""
    names = reward_names(groups)
    if not names:
        return {}
    rewards_NK = reward_table(groups, names)
    totals_N = weigh(rewards_NK, [weights.get(name, 1.0) for name in names])
    datasets_P = [group.dataset for group in groups for _ in group.sizes]
    parts = np.split(totals_N, np.cumsum([size for group in groups for size in group.sizes])[:-1])
    spreads = [float(deviation(part)) for part in parts]
    metrics = {
        "reward": nan_mean(totals_N),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": float(np.mean(np.isclose(spreads, 0.0))),
    }
    for k, name in enumerate(names):
        metrics[f"rewards/{name}/mean"] = nan_mean(rewards_NK[:, k])
        metrics[f"rewards/{name}/std"] = float(deviation(rewards_NK[:, k]))
    for index, name in enumerate(datasets):
        members = [k for k, dataset in enumerate(datasets_P) if dataset == index]
        if members:
            metrics[f"reward/{name}"] = nan_mean(np.concatenate([parts[k] for k in members]))
            flat = np.isclose([spreads[k] for k in members], 0.0)
            metrics[f"frac_reward_zero_std/{name}"] = float(np.mean(flat))
    return {name: value for name, value in metrics.items() if not np.isnan(value)}


def choose_samples(
    groups: Sequence[Group],
    weights: dict[str, float],
    count: int | None,
    datasets: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return up to `count` lines for samples.jsonl, the best and the worst answers in turn; None:
    all, in the order of their prompts."""
    scored = []
    for group in groups:
        for episode, rewards in zip(group.episodes, group.rewards, strict=True):
            numbers = {name: value for name, value in rewards.items() if value is not None}
            total = sum(weights.get(name, 1.0) * value for name, value in numbers.items())
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


class SilentRewardWarning:
    """Says once of every reward that it has given 0 to all answers of many rounds."""

    ROUNDS = 10
    """Rounds in a row."""

    def __init__(self) -> None:
        self.silent: Counter[str] = Counter()
        """Rounds in a row in which a reward gave nothing but 0."""

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Return warnings; metrics: of a whole round, as describe_rewards names them."""
        warnings = []
        for key, value in metrics.items():
            name = key.removeprefix("rewards/").removesuffix("/mean")
            if key != f"rewards/{name}/mean":
                continue
            fired = value != 0 or metrics.get(f"rewards/{name}/std", 0.0) > 0
            self.silent[name] = 0 if fired else self.silent[name] + 1
            if self.silent[name] == self.ROUNDS:
                warnings.append(
                    f"warning: reward {name!r} has given 0 to every answer of the last"
                    f" {self.ROUNDS} rounds; look at answers in samples.jsonl: is it what the"
                    " reward looks for, and does the prompt ask for it?"
                )
        return warnings


def explain_idle_rounds(
    idle_rounds: int,
    prompts_per_round: int,
    drops: Counter[str],
    failure: EpisodeFailed | Any | None,
    samples: Sequence[Mapping[str, Any]],
) -> str:
    """Return why several rounds in a row gave nothing to learn from, and what to change.

    failure: the newest one. samples: of the last round.
    """
    reasons = ", ".join(f"{n} {reason}" for reason, n in drops.most_common(4))
    advice = (
        "Where all answers of a group earn the same there is no better one: choose easier or"
        " harder prompts, raise rollout.group_size or sampling.temperature, or mend the rewards"
    )
    if any(reason.startswith("failed") for reason in drops) and failure is not None:
        advice = f"The newest failure: {(failure.cause or str(failure))[:500]}"
    example = ""
    if samples:
        sample = samples[0]
        example = (
            f". One of the last answers (more are in samples.jsonl): prompt"
            f" {excerpt(sample['prompt'])}, answer {excerpt(sample['completion'])}, reward"
            f" {sample['reward']:g} {str(sample['rewards'])[:200]}"
        )
    return (
        f"{idle_rounds} rounds of {prompts_per_round} prompts in a row, as many as"
        f" rollout.max_idle_rounds allows, gave nothing to learn from (dropped:"
        f" {reasons or 'nothing'}). {advice}{example}"
    )


def nan_mean(values: np.ndarray) -> float:
    """Return the mean of what is not NaN; NaN if everything is."""
    numbers = values[~np.isnan(values)]
    return float(numbers.mean()) if len(numbers) else float("nan")
