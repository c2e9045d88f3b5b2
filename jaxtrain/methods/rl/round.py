"""The data source of reinforcement learning: rounds of batches, labeled from finished groups.

    Producer.take ─> stale groups out ─> replayed ones in ─> advantages ─> label ─> list of Batch

A round is what is trained under one policy version: one Batch a minibatch. Of its places a share
may be the replay buffer's; the producer is asked for the others. Every group that the
producer made is trained here exactly once, or counted under the reason why it was not. A round with
nothing to learn from comes out without a batch, with its numbers and samples; after too many of
them in a row the run ends.

Where several policies are trained, a round comes out in parts, too, one for each: its own groups,
with advantages of their own, under the name `policy`.

When streaming, a round comes out in parts of one minibatch each, while the rest is still drawn:

    places of the round     1 2 3 4 5 6 7 8      in the order in which they finish
    next(source) ─> part 0  └─┴─┴─┘ │ │ │ │      as soon as its share of groups is there;
    next(source) ─> part 1          └─┴─┴─┘      dropped places make it wait for later ones
    next(source) ─> last_part                    what is left, perhaps nothing
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.errors import RunStopped
from jaxtrain.generation.episodes import Group
from jaxtrain.generation.producer import Producer, RoundSlot, earns_alike, reward_names
from jaxtrain.generation.ray.remote_producer import RemoteProducer
from jaxtrain.methods.rl.advantages import compute_advantages, turn_tables, weigh
from jaxtrain.methods.rl.batch_builder import BatchBuilder, RoundBatches, label
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round_metrics import (
    choose_samples,
    describe_episodes,
    describe_rewards,
    excerpt,
)


@dataclass(frozen=True)
class AdvantageOptions:
    """How rewards become advantages; see advantage.compute_advantages."""

    baseline: str = "group"
    scale: str = "group"
    combine: str = "sum_then_normalize"
    clip: tuple[float, float] | None = None
    whiten: bool = False


@dataclass(frozen=True, eq=False)
class RewardTable:
    """The rewards of a part, for whoever must compute its advantages anew."""

    rewards_TNK: list[np.ndarray]
    """As seen from each turn: see advantage.turn_tables."""
    weights: tuple[float, ...]
    sizes: tuple[int, ...]


@dataclass(eq=False)
class TakenGroups:
    """What was taken from the producer and what became of it: by one call, or in a round so far."""

    slots: list[RoundSlot] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """Those that are trained; of several policies, of each its own."""
    drops: Counter[str] = field(default_factory=Counter)
    saved_tokens: int = 0
    flat_tokens: int = 0

    def add(self, more: "TakenGroups") -> None:
        """Take in what another call took."""
        self.slots += more.slots
        self.groups += more.groups
        self.drops.update(more.drops)
        self.saved_tokens += more.saved_tokens
        self.flat_tokens += more.flat_tokens


class RoundSource:
    """Iterator of rounds with a JSON-able cursor; `version` is that of the policy that trains next.

    With parts > 1 it is one of parts: `part` counts them within their round, `last_part` says that
    the round ends with this one, which then may be an empty list. `metrics` are those of the round
    so far, `samples` come at its end, `table` has the rewards of the part alone.
    """

    def __init__(
        self,
        producer: Producer | RemoteProducer,
        labels: BatchBuilder,
        estimator: AdvantageOptions,
        *,
        prompts_per_round: int,
        parts: int = 1,
        max_lag: int | None = None,
        replay: ReplayBuffer | None = None,
        num_replayed: int = 0,
        num_samples: int | None = 2,
        counters: Callable[[], dict[str, float]] = dict,
        max_idle: int = 8,
        max_prompts: float | None = None,
    ):
        """parts: most parts of a round, each of which is labeled on its own. max_lag: groups with
        older tokens are dropped, if possible while they are played; None: none is. num_replayed:
        places of a round for groups of the replay buffer, as far as it has some. num_samples: of a
        round; None: all. counters: cumulative numbers of rewards and engines that go into the
        metrics. max_idle: rounds in a row without anything to learn from. max_prompts: no round
        begins once so many are done."""
        assert prompts_per_round % parts == 0, (prompts_per_round, parts)
        self.producer, self.labels, self.estimator = producer, labels, estimator
        self.prompts_per_round, self.parts, self.max_lag = prompts_per_round, parts, max_lag
        self.replay = ReplayBuffer(0, 1) if replay is None else replay
        self.num_replayed = num_replayed
        self._replayed: list[Group] = []
        """Of the round, not handed out yet."""
        self.num_samples, self.more_counters = num_samples, counters
        self.lengths = labels.shape.lengths
        self.version = 0
        """Of the policy that trains next."""
        self.part, self.last_part = 0, True
        self.policy = ""
        """Whose part it is, where policies have names."""
        self._pending: dict[str, list[Group]] = {}
        """What the round has for the policies that are to come."""
        self.metrics: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []
        self.table: RewardTable | None = None
        self.groups: list[Group] = []
        """Of the part, in the order of the table; also those whose answers are too long to train.
        """
        self._round = TakenGroups()
        self.judged: list[Group] = []
        """Of the round so far, those that taught nothing too; no replayed ones."""
        # Places of the round that were not taken yet, and those not even asked for.
        self._left = self._unasked = 0
        self.max_idle, self.max_prompts = max_idle, max_prompts
        self._idle, self._idle_drops = 0, Counter[str]()
        self.steps_share = 0.0
        """Optimizer steps done, as a share of the run's."""
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        """What the producer had counted when the last round was over."""
        self._efficiency = 0.0

    def __iter__(self) -> "RoundSource":
        return self

    def __next__(self) -> list[Batch]:
        if self.last_part:
            if self._idle >= self.max_idle:
                raise RunStopped(self._explain())
            if self.max_prompts is not None and self.producer.prompts.done >= self.max_prompts:
                raise StopIteration
            self._round, self.part = TakenGroups(), 0
            self._replayed = self.replay.draw(self.num_replayed, self.version)
            self._left = self._unasked = self.prompts_per_round - len(self._replayed)
        else:
            self.part += 1
        taken = TakenGroups()
        found = self._fill(taken)
        if found is not None:
            self._idle, self._idle_drops = 0, Counter()
        elif self.part == 0:
            self._idle += 1
            self._idle_drops.update(taken.drops)
        return self._hand_out(taken, found)

    def give_up_stale(self) -> None:
        """What is played with tokens that no round from now on may train is given up. To be called
        once the engine draws by the newest weights, or they would be asked of the last ones."""
        if self.max_lag is not None:
            self.producer.drop_older(self.version - self.max_lag)

    @property
    def progress(self) -> float:
        """How much of the run is over: by prompts where its length is in epochs, else by steps."""
        if self.max_prompts is not None:
            return self.producer.prompts.done / self.max_prompts
        return self.steps_share

    @property
    def rounds_begun(self) -> int:
        """Rounds that were handed out, in whole or in part."""
        return self._totals["rounds"]

    def _fill(self, taken: TakenGroups) -> RoundBatches | None:
        """The round's next part, or None if the places that are left give nothing to train."""
        share = self.prompts_per_round // self.parts
        while self._left or self._replayed:
            groups, self._replayed = self._replayed[:share], self._replayed[share:]
            while self._left and len(groups) < share:
                groups += self._take(min(self._left, share - len(groups)), taken)
            if not groups:
                return None
            if self.producer.rules.policies:
                self._pending = self._split(groups)
                break
            if (found := self._label(groups, taken)) is not None:
                return found
        while self._pending:
            self.policy = next(iter(self._pending))
            if (found := self._label(self._pending.pop(self.policy), taken)) is not None:
                return found
        return None

    def _split(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        """What there is for each policy to learn from, in their order."""
        rules, found = self.producer.rules, {}
        for policy in rules.policies:
            own = [part for group in groups if (part := group.of(policy)) is not None]
            if rules.drop_flat:
                own = [part for part in own if not earns_alike(part, rules)]
            if own:
                found[policy] = own
        return found

    def _label(self, groups: list[Group], taken: TakenGroups) -> RoundBatches | None:
        """The batches of some groups; None where there is nothing to train in them."""
        self._judge(groups)
        self.groups = groups
        found = label(groups, self.labels)
        if found.too_long:
            taken.drops["too_long_episodes"] += found.too_long
        if found.batches:
            taken.groups += groups
            taken.saved_tokens += found.saving.saved_tokens
            taken.flat_tokens += found.saving.flat_tokens
            return found
        taken.drops["nothing_to_train"] += len(groups)
        return None

    def _take(self, count: int, taken: TakenGroups) -> list[Group]:
        """Groups of the round's next `count` places: those fresh enough, replayed ones for the
        flat. A stale one leaves its place open."""
        slots = self.producer.next_slots(count, self._unasked)
        self._left -= count
        self._unasked = 0
        taken.slots += slots
        groups: list[Group] = []
        flat = 0
        for slot in slots:
            taken.drops.update(slot.dropped)
            if slot.group is None:
                flat += bool(slot.flat)
            elif self.max_lag is not None and self.lag(slot.group) > self.max_lag:
                taken.drops["stale"] += 1
                self._left += 1
                self._unasked += 1
            else:
                groups.append(slot.group)
        return groups + self.replay.draw(flat, self.version)

    def _explain(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in self._idle_drops.most_common(4))
        failure = self.producer.player.failures.newest
        advice = (
            "Where all answers of a group earn the same there is no better one: choose easier or"
            " harder prompts, raise rollout.group_size or sampling.temperature, or mend the rewards"
        )
        if any(reason.startswith("failed") for reason in self._idle_drops) and failure is not None:
            advice = f"The newest failure: {(failure.cause or str(failure))[:500]}"
        shown = ""
        if self.samples:
            sample = self.samples[0]
            shown = (
                f". One of the last answers (more are in samples.jsonl): prompt"
                f" {excerpt(sample['prompt'])}, answer {excerpt(sample['completion'])}, reward"
                f" {sample['reward']:g} {str(sample['rewards'])[:200]}"
            )
        return (
            f"{self._idle} rounds of {self.prompts_per_round} prompts in a row, as many as"
            f" rollout.max_idle_rounds allows, gave nothing to learn from (dropped:"
            f" {reasons or 'nothing'}). {advice}{shown}"
        )

    def lag(self, group: Group) -> int:
        """Versions between the oldest token of a group and the policy that trains next."""
        return self.version - group.min_version if group.min_version >= 0 else 0

    def _judge(self, groups: Sequence[Group]) -> None:
        """Fill in totals and advantages of the round's groups."""
        names = reward_names(groups)
        weights = tuple(self.producer.rules.weights.get(name, 1.0) for name in names)
        sizes = tuple(size for group in groups for size in group.sizes)
        self.table = RewardTable(turn_tables(groups, names), weights, sizes)
        advantages_NT = self.advantages(self.table)
        totals_N = weigh(self.table.rewards_TNK[0], weights, self.estimator.clip)
        bounds = np.cumsum([len(group.episodes) for group in groups])[:-1]
        for group, own, totals in zip(
            groups, np.split(advantages_NT, bounds), np.split(totals_N, bounds), strict=True
        ):
            group.advantages, group.totals = own, totals

    def advantages(self, table: RewardTable, penalty_N: np.ndarray | None = None) -> np.ndarray:
        """Advantages [N, turns] of a table of rewards, less a penalty of each episode; one turn
        where no single turns are rewarded."""
        estimator = self.estimator
        found = [
            compute_advantages(
                rewards_NK,
                table.sizes,
                table.weights,
                baseline=estimator.baseline,
                scale=estimator.scale,
                combine=estimator.combine,
                clip=estimator.clip,
                penalty_N=penalty_N,
                whiten=estimator.whiten,
            )
            for rewards_NK in table.rewards_TNK
        ]
        return np.stack(found, axis=1)

    def _hand_out(self, taken: TakenGroups, found: RoundBatches | None) -> list[Batch]:
        """The batches; what was taken for them is done and counted, as it was not before."""
        self.producer.mark_done(taken.slots)
        self.replay.store(taken.groups, self.version)
        self._dropped.update(taken.drops)
        self._totals.update(
            rounds=int(self.part == 0),
            groups=len(taken.groups),
            episodes=sum(len(group.episodes) for group in taken.groups),
        )
        if found is not None:
            self._totals.update(
                trained_tokens=found.trained_tokens, tokens=found.saving.packed_tokens
            )
            self._efficiency = found.packing_efficiency
        self._round.add(taken)
        self.last_part = self._left == 0 and not self._replayed and not self._pending
        fresh = [group for group in self._round.groups if not group.replayed]
        flat = [group for slot in self._round.slots for group in slot.flat if group not in fresh]
        judged = fresh + flat
        if policies := self.producer.rules.policies:
            games = [slot.group for slot in self._round.slots if slot.group is not None]
            games += [group for group in flat if group not in games]
            parts = [group.of(policy) for policy in policies for group in games]
            judged = [part for part in parts if part is not None]
        self.metrics = self._describe(judged)
        if self.parts > 1:
            self.metrics["part"] = float(self.part)
            self.metrics["part/groups"] = float(len(taken.groups))
        if self.last_part:
            self._seen = self._count()
        self.judged = judged
        self.samples = self.choose_samples() if self.last_part else []
        return [] if found is None else found.batches

    def choose_samples(self) -> list[dict[str, Any]]:
        """Lines for samples.jsonl, by the rewards of the round's answers as they are known now."""
        rules = self.producer.rules
        return choose_samples(self.judged, rules.weights, self.num_samples, rules.datasets)

    def _describe(self, judged: list[Group]) -> dict[str, float]:
        """Numbers about the round so far."""
        round = self._round
        groups = round.groups
        replayed = sum(group.replayed for group in groups)
        drawn = [e for group in judged for e in group.episodes if not e.given]
        return {
            **self._describe_policies(judged),
            **self._describe_agents(judged),
            **describe_rewards(judged, self.producer.rules.weights, self.producer.rules.datasets),
            **describe_episodes(drawn),
            **{f"dropped/{reason}": float(n) for reason, n in round.drops.items()},
            "groups": float(len(groups)),
            "groups/replayed": float(replayed),
            "groups/waiting_for_second_try": float(self.producer.prompts.waiting),
            **{name: float(n) for name, n in (self._count() - self._seen).items()},
            "episodes/redone": float(sum(slot.redone for slot in round.slots)),
            **self._describe_lag(groups),
            **({"idle_rounds": float(self._idle)} if self._idle else {}),
            "policy_version": float(self.version),
            "num_sampled_tokens": float(sum(episode.num_sampled for episode in drawn)),
            "prompt_tokens_saved": round.saved_tokens / max(round.flat_tokens, 1),
            **self.more_counters(),
        }

    def _describe_policies(self, judged: Sequence[Group]) -> dict[str, float]:
        """The same of each policy by itself, where they have names: {"solver/reward": 0.4}."""
        found: dict[str, float] = {}
        for policy in self.producer.rules.policies:
            own = [group for group in judged if group.episodes[0].policy == policy]
            trained = [one for one in self._round.groups if one.episodes[0].policy == policy]
            numbers = {
                **describe_rewards(own, self.producer.rules.weights),
                **describe_episodes([episode for group in own for episode in group.episodes]),
                **self._describe_lag(trained),
                "groups": float(len(trained)),
            }
            found |= {f"{policy}/{name}": value for name, value in numbers.items()}
        return found

    def _describe_agents(self, judged: Sequence[Group]) -> dict[str, float]:
        """The same of each agent by itself, where several have names."""
        found: dict[str, float] = {}
        named = [episode.agent for group in judged for episode in group.episodes if episode.agent]
        for agent in dict.fromkeys(named):
            if agent in self.producer.rules.policies:
                continue
            own = [part for group in judged if (part := group.of_agent(agent)) is not None]
            numbers = {
                **describe_rewards(own, self.producer.rules.weights),
                **describe_episodes([episode for group in own for episode in group.episodes]),
            }
            found |= {f"{agent}/{name}": value for name, value in numbers.items()}
        return found

    def _count(self) -> Counter[str]:
        """What was given up or left out since the start, before it came to a slot's end."""
        found = {f"cancelled/{reason}": n for reason, n in self.producer.cancelled.items()}
        return Counter({**found, "curator/skipped": self.producer.prompts.skipped})

    def _describe_lag(self, groups: Sequence[Group]) -> dict[str, float]:
        lags = [self.lag(group) for group in groups]
        return {"lag/mean": float(np.mean(lags)), "lag/max": float(max(lags))} if lags else {}

    def state(self) -> dict[str, Any]:
        """Cursor: prompts that were trained or dropped are done, all others will be asked again;
        and the replay buffer."""
        replay = {"replay": self.replay.state()} if self.replay.size else {}
        return {
            **replay,
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
        if "replay" in state:
            self.replay.restore(state["replay"])

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
