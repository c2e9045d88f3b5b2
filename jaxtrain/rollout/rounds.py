"""The data source of reinforcement learning: rounds of batches, labelled from finished groups.

    Producer.take ─> stale groups out ─> replayed ones in ─> advantages ─> label ─> list of Batch

A round is what is trained under one policy version: one Batch a minibatch. Every group that the
producer made is trained here exactly once, or counted under the reason why it was not.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.errors import RunStopped
from jaxtrain.rollout.advantage import compute_advantages, deviation, reward_table, weigh
from jaxtrain.rollout.labels import Labelled, Labels, label
from jaxtrain.rollout.producer import Producer, Slot, reward_names
from jaxtrain.rollout.replay import ReplayBuffer
from jaxtrain.rollout.types import Episode, Group

MAX_EMPTY = 8
"""Rounds in a row without anything to learn from after which the run stops."""


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages; see advantage.compute_advantages."""

    baseline: str = "group"
    scale: str = "group"
    combine: str = "sum_then_normalise"


@dataclass(frozen=True, eq=False)
class Table:
    """The rewards of a round, for whoever must compute its advantages anew."""

    rewards_NK: np.ndarray
    weights: tuple[float, ...]
    sizes: tuple[int, ...]


class RoundSource:
    """Iterator of rounds with a JSON-able cursor; `version` is that of the policy that trains next.

    `metrics` and `samples` are those of the last round that came out, `table` its rewards.
    """

    def __init__(
        self,
        producer: Producer,
        labels: Labels,
        estimator: Estimator,
        *,
        prompts_per_round: int,
        max_lag: int | None = None,
        replay: ReplayBuffer | None = None,
        num_samples: int = 2,
        counters: Callable[[], dict[str, float]] = dict,
    ):
        """max_lag: groups with older tokens are dropped; None: none is. counters: cumulative
        numbers of rewards and engines that go into the metrics."""
        self.producer, self.labels, self.estimator = producer, labels, estimator
        self.prompts_per_round, self.max_lag = prompts_per_round, max_lag
        self.replay = ReplayBuffer(0, 1) if replay is None else replay
        self.num_samples, self.more_counters = num_samples, counters
        self.lengths = labels.shape.lengths
        self.version = 0
        self.metrics: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []
        self.table: Table | None = None
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._efficiency = 0.0

    def __iter__(self) -> "RoundSource":
        return self

    def __next__(self) -> list[Batch]:
        drops: Counter[str] = Counter()
        slots: list[Slot] = []
        for _ in range(MAX_EMPTY):
            taken, fresh = self._collect(drops)
            slots += taken
            flat = sum(slot.group is None and bool(slot.flat) for slot in taken)
            groups = fresh + self.replay.draw(flat, self.version)
            if groups:
                self._judge(groups)
                found = label(groups, self.labels)
                if found.batches:
                    return self._hand_out(found, groups, slots, drops)
        reasons = ", ".join(f"{n} {reason}" for reason, n in drops.most_common())
        raise RunStopped(
            f"{MAX_EMPTY} rounds of {self.prompts_per_round} prompts in a row gave nothing to learn"
            f" from (dropped: {reasons or 'nothing'}). Where all answers of a group earn the same"
            " there is no better one: choose easier or harder prompts, raise rollout.group_size or"
            " sampling.temperature, or look at the rewards in samples.jsonl"
        )

    def _collect(self, drops: Counter[str]) -> tuple[list[Slot], list[Group]]:
        """Slots of a round and the groups of them that are fresh enough."""
        slots: list[Slot] = []
        groups: list[Group] = []
        missing = self.prompts_per_round
        while missing:
            taken = self.producer.take(missing)
            slots += taken
            missing = 0
            for slot in taken:
                drops.update(slot.dropped)
                if slot.group is None:
                    continue
                if self.lag(slot.group) > (self.max_lag if self.max_lag is not None else np.inf):
                    drops["stale"] += 1
                    missing += 1
                else:
                    groups.append(slot.group)
        return slots, groups

    def lag(self, group: Group) -> int:
        """Versions between the oldest token of a group and the policy that trains next."""
        return self.version - group.min_version if group.min_version >= 0 else 0

    def _judge(self, groups: Sequence[Group]) -> None:
        """Fill in totals and advantages of the round's groups."""
        names = reward_names(groups)
        weights = tuple(self.producer.rules.weights.get(name, 1.0) for name in names)
        rewards_NK = reward_table(groups, names)
        sizes = tuple(len(group.episodes) for group in groups)
        self.table = Table(rewards_NK, weights, sizes)
        advantages_N = self.advantages(self.table)
        totals_N = weigh(rewards_NK, weights)
        bounds = np.cumsum(sizes)[:-1]
        for group, own, totals in zip(
            groups, np.split(advantages_N, bounds), np.split(totals_N, bounds), strict=True
        ):
            group.advantages, group.totals = own, totals

    def advantages(self, table: Table) -> np.ndarray:
        """Advantages [N] of a table of rewards."""
        estimator = self.estimator
        return compute_advantages(
            table.rewards_NK,
            table.sizes,
            table.weights,
            baseline=estimator.baseline,
            scale=estimator.scale,
            combine=estimator.combine,
        )

    def _hand_out(
        self, found: Labelled, groups: list[Group], slots: list[Slot], drops: Counter[str]
    ) -> list[Batch]:
        """Metrics, samples, replay; the batches."""
        self.replay.store([group for group in groups if not group.replayed], self.version)
        if found.too_long:
            drops["too_long_episodes"] += found.too_long
        self._dropped.update(drops)
        self._totals.update(
            rounds=1,
            groups=len(groups),
            episodes=sum(len(group.episodes) for group in groups),
            trained_tokens=found.trained_tokens,
            tokens=found.saving.packed_tokens,
        )
        self._efficiency = found.packing_efficiency
        fresh = [group for group in groups if not group.replayed]
        judged = fresh + [group for slot in slots for group in slot.flat if group not in fresh]
        weights = self.producer.rules.weights
        self.metrics = {
            **describe_rewards(judged, weights),
            **describe_episodes([e for group in judged for e in group.episodes]),
            **{f"dropped/{reason}": float(n) for reason, n in drops.items()},
            "groups": float(len(groups)),
            "groups/replayed": float(len(groups) - len(fresh)),
            "groups/waiting_for_second_try": float(self.producer.prompts.waiting),
            "episodes/redone": float(sum(slot.redone for slot in slots)),
            "lag/mean": float(np.mean([self.lag(group) for group in groups])),
            "lag/max": float(max(self.lag(group) for group in groups)),
            "policy_version": float(self.version),
            "num_sampled_tokens": float(sum(e.num_sampled for g in judged for e in g.episodes)),
            "prompt_tokens_saved": found.saving.saved_tokens / max(found.saving.flat_tokens, 1),
            **self.more_counters(),
        }
        self.samples = choose_samples(judged, weights, self.num_samples)
        return found.batches

    def state(self) -> dict[str, Any]:
        """Cursor: prompts that were trained or dropped are done, all others will be asked again."""
        return {
            "prompts": self.producer.state(),
            "version": self.version,
            "totals": dict(self._totals),
            "dropped": dict(self._dropped),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the round that would have followed."""
        self.producer.restore(state["prompts"])
        self.version = state["version"]
        self._totals, self._dropped = Counter(state["totals"]), Counter(state["dropped"])

    def counters(self) -> dict[str, Any]:
        """Totals of the run so far, dropped groups by reason, and the last packing efficiency."""
        return {
            **self._totals,
            "dropped": dict(self._dropped),
            "packing_efficiency": self._efficiency,
        }

    def close(self) -> None:
        """Stop what is being played."""
        self.producer.close()


def describe_rewards(groups: Sequence[Group], weights: dict[str, float]) -> dict[str, float]:
    """Mean rewards and how they spread, under TRL's names. Groups dropped as zero_advantage count,
    so that the mean is that of all prompts."""
    names = reward_names(groups)
    if not names:
        return {}
    rewards_NK = reward_table(groups, names)
    totals_N = weigh(rewards_NK, [weights.get(name, 1.0) for name in names])
    spreads = [
        float(deviation(part))
        for part in np.split(totals_N, np.cumsum([len(g.episodes) for g in groups])[:-1])
    ]
    found = {
        "reward": nan_mean(totals_N),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": float(np.mean(np.isclose(spreads, 0.0))),
    }
    for k, name in enumerate(names):
        found[f"rewards/{name}/mean"] = nan_mean(rewards_NK[:, k])
        found[f"rewards/{name}/std"] = float(deviation(rewards_NK[:, k]))
    return {name: value for name, value in found.items() if not np.isnan(value)}


def describe_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Lengths in drawn tokens, the share that was cut off, and what the environment measured."""
    lengths = np.array([episode.num_sampled for episode in episodes])
    ended = np.array([episode.finish_reason != "length" for episode in episodes])
    found = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1.0 - ended.mean()),
        "num_tokens": float(sum(len(episode.tokens) for episode in episodes)),
    }
    if ended.any():
        found["completions/mean_terminated_length"] = float(lengths[ended].mean())
    for name in dict.fromkeys(name for episode in episodes for name in episode.metrics):
        values = [episode.metrics[name] for episode in episodes if name in episode.metrics]
        found[f"env/{name}"] = float(np.mean(values))
    return found


def choose_samples(
    groups: Sequence[Group], weights: dict[str, float], count: int
) -> list[dict[str, Any]]:
    """Up to `count` lines for samples.jsonl: the best and the worst answers in turn."""
    scored = []
    for group in groups:
        for episode, rewards in zip(group.episodes, group.rewards, strict=True):
            there = {name: value for name, value in rewards.items() if value is not None}
            total = sum(weights.get(name, 1.0) * value for name, value in there.items())
            scored.append((total, group.draw, episode, rewards))
    order = sorted(range(len(scored)), key=lambda i: -scored[i][0])
    best, worst = order[: (count + 1) // 2], order[len(order) - count // 2 :]
    lines = []
    for i in dict.fromkeys([*best, *reversed(worst)]):
        total, draw, episode, rewards = scored[i]
        lines.append(
            {
                "prompt_number": draw,
                "reward": total,
                "rewards": rewards,
                "prompt": episode.prompt,
                "completion": episode.completion,
                "finish_reason": episode.finish_reason,
                "tokens": episode.num_sampled,
                "policy_version": episode.min_version,
            }
        )
    return lines


def nan_mean(values: np.ndarray) -> float:
    """Mean of what is not NaN; NaN of nothing."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if len(there) else float("nan")
