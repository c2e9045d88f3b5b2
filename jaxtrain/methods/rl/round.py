"""A round of reinforcement learning, from prompts to published weights.

    process 0      take slots ─> drop stale groups ─> add replayed ones ─> advantages ─> batches
    every process  <── broadcast ── log-probs before the first update (prepare) ─> train each batch
                   version + 1 ─> publish ─> cancel episodes that are too old for the next round

A round is what is trained under one version of the policy: one Batch per minibatch. A share of its
places may be the replay buffer's; the producer fills the others. Every group that the producer made
is trained here exactly once, or counted under the reason why it was not. A round with nothing to
learn from has no batches, but numbers and samples; after too many of them in a row the run ends.

Prompts, replay, drops and advantages live on process 0 alone, and so does the cursor: nothing can
be trained twice, whatever the number of processes.

With several trained policies a round comes in parts, one for each: its own groups, with their own
advantages. When streaming, a round comes in parts of one minibatch each, while its other places are
still played:

    places of the round        1 2 3 4 5 6 7 8      in the order in which they finish
    next() ─> part 0           └─┴─┴─┘ │ │ │ │      as soon as its share of groups has finished;
    next() ─> part 1                   └─┴─┴─┘      dropped places make it wait for later ones
    next() ─> last_part                             what remains, perhaps nothing
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtrain.batch import Batch
from jaxtrain.core.task import DRAFT, Round, TrainingContext
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.errors import RunStopped
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.episodes import Group
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.publisher import AwaitedPublisher, DraftPublisher, Publisher
from jaxtrain.generation.ray.remote_producer import RemoteProducer
from jaxtrain.methods.rl.advantages import AdvantageOptions, RewardTable, assign_advantages
from jaxtrain.methods.rl.batch_builder import BatchBuilder, RoundBatches, build_batches
from jaxtrain.methods.rl.places import RoundOptions, RoundPlaces
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round_metrics import (
    RoundTally,
    RunTotals,
    SilentRewardWarning,
    choose_samples,
    describe_groups,
    explain_idle_rounds,
)


@dataclass(frozen=True, eq=False)
class RoundStages:
    """Stages of a round on process 0."""

    producer: Producer | RemoteProducer
    builder: BatchBuilder
    advantages: AdvantageOptions
    replay: ReplayBuffer
    counters: Callable[[], dict[str, float]] = dict
    """Cumulative numbers of rewards and engines that go into the metrics."""
    log: Callable[[str], None] = print
    """Gets warnings about what is drawn."""


@dataclass(frozen=True, eq=False)
class EngineAccess:
    """Engine of a run, and the publisher of its weights."""

    engine: Engine | None
    """On process 0; no other process samples."""
    publisher: Publisher
    serves: bool
    """Whether evaluations may use it, too."""
    policies: Sequence[str] = ()
    """Names of several that are trained."""


class DrawnPart(NamedTuple):
    """A part of a round, or a whole one, as process 0 sends it to the others."""

    batches: list[Batch]
    part: int
    last_part: bool
    metrics: dict[str, float]
    counters: dict[str, Any]
    policy: str


class RolloutRounds:
    """`core.task.Rounds` of answers that an engine draws from the run's own weights."""

    pauses = True

    def __init__(
        self,
        stages: RoundStages | None,
        options: RoundOptions,
        access: EngineAccess,
        *,
        total_steps: int = 0,
        closing: ExitStack | None = None,
    ):
        """stages: on process 0, and nowhere else. closing: stops the producer first, then what it
        works with."""
        assert options.prompts_per_round % options.parts == 0, options
        self.stages, self.options, self.closing = stages, options, closing or ExitStack()
        self.access, self.engine, self.serves = access, access.engine, access.serves
        self.total_steps = total_steps
        self.version = 0
        """Version of the policy that trains next: the rounds that were trained."""
        # The round, as far as it was drawn. `metrics` are those of the round so far.
        self.part, self.last_part, self.policy = 0, True, ""
        self.metrics: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []
        """Lines for samples.jsonl; at the end of a round, on process 0."""
        self.judged: list[Group] = []
        """Groups of the round so far, flat ones too, but no replayed ones; on process 0."""
        self.groups: list[Group] = []
        """Groups of the part in the order of `table`, with those that are too long to train."""
        self.table: RewardTable | None = None
        """Rewards of the part."""
        self._tally = RoundTally()
        self._places = RoundPlaces(stages.producer, stages.replay, options) if stages else None
        self._totals = RunTotals()
        self._counted: Counter[str] = Counter()
        """Counts of the producer when the last round was over."""
        self._counters: dict[str, Any] = {}
        self._idle, self._idle_drops = 0, Counter[str]()
        self._silent = SilentRewardWarning()
        self._step_share = 0.0
        """Optimizer steps done, as a share of the run's."""
        # Publishing and timing.
        self.published: dict[str, float] | None = None
        self._trained = False
        """Whether a round was returned, in part at least, that `version` does not count yet."""
        self._unwritten: dict[str, float] = {}
        """Metrics of a round of which more parts are to come."""
        self._began = self._waited = self._scored = 0.0

    @property
    def producer(self) -> Producer | RemoteProducer:
        """The source of groups, on process 0."""
        assert self.stages is not None, "only process 0 draws"
        return self.stages.producer

    def ready(self, context: TrainingContext) -> None:
        """Publish the first weights, unless that was done; Interrupted if the run is to stop while
        servers start."""
        if self.published is None:
            if self.stages is not None:
                self.producer.stop_when(context.stop_requested)
            if isinstance(self.access.publisher, AwaitedPublisher):
                with context.phase("waiting for the servers"):
                    self.access.publisher.wait(context.stop_requested)
            self.publish(context)

    def next(self, context: TrainingContext) -> Round:
        """Return the next round or part; the metrics of a round come with its last part."""
        self.ready(context)
        start = time.monotonic()
        if self.last_part:
            # Only at the first part: a streamed round's times add up over its parts.
            self._began, self._waited, self._scored = start, 0.0, 0.0
            self._step_share = context.step / self.total_steps
        try:
            detail = None if self.stages is None else self.producer.describe
            with context.phase("waiting for answers and rewards", detail):
                batches = self._draw_everywhere()
        except StopIteration:  # the epochs are over, in fewer steps than they could have taken
            self.total_steps = context.step
            return Round([])
        drawn = time.monotonic()
        self._trained = self._trained or bool(batches)
        if self.last_part and (batches or self.part):
            # After a round with nothing to train the next one is drawn at once, by an awake engine.
            self.access.publisher.sleep()
        with context.phase("scoring the answers"):
            round = self._prepare(context, batches)
        self._waited += drawn - start
        self._scored += time.monotonic() - drawn
        metrics = {**self.metrics, **round.metrics, **(self.published or {})}
        metrics["rollout/seconds"] = self._waited
        sampled = metrics.get("num_sampled_tokens", 0.0)
        metrics["rollout/tokens_per_second"] = sampled / (drawn - self._began)
        metrics["rollout/score_seconds"] = self._scored
        if "part" in metrics:
            metrics["part/seconds"] = drawn - start
        if round.last:
            self._unwritten = {}
            return round._replace(metrics=metrics, samples=self.samples, groups=self.judged)
        self._unwritten = metrics
        of_part = {name: value for name, value in metrics.items() if name.startswith("part")}
        return round._replace(metrics={**of_part, **round.metrics})

    def draw(self) -> DrawnPart:
        """Draw the next part of a round, from prompts to batches; on process 0.

        Raises StopIteration when all prompts are done, Interrupted when the run is to stop.
        """
        if self.last_part:
            self._begin_round()
        else:
            self.part += 1
        assert self.stages is not None and self._places is not None, "only process 0 draws"
        tally, built = RoundTally(), None
        while built is None:
            policy, groups = self._places.take_part(tally)
            if not groups:
                break
            self.policy, self.groups = policy, groups
            weights = self.producer.rules.weights
            self.table = assign_advantages(groups, weights, self.stages.advantages)
            # Nothing to train among them: the next groups are taken within the same part, since an
            # empty part would end the round early.
            built = self._build(groups, tally)
        if built is not None:
            self._idle, self._idle_drops = 0, Counter()
        elif self.part == 0:
            self._idle += 1
            self._idle_drops.update(tally.drops)
        self._finish_part(tally, built)
        batches = [] if built is None else built.batches
        return DrawnPart(
            batches, self.part, self.last_part, self.metrics, self.counters(), self.policy
        )

    def finish(self, context: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """Count a trained round and publish its weights, unless the run is to stop; returns metrics
        that no step's line has yet."""
        # Called again after publishing failed, it must not count a second version.
        self.version += self._trained
        self._trained = False
        if not interrupted:
            self.publish(context)
        unwritten, self._unwritten = self._unwritten, {}
        return unwritten

    def publish(self, context: TrainingContext) -> None:
        """Bring the current weights to the engine, and cancel episodes that became too old."""
        # Taken on every process: gathering the weights is collective, although process 0 alone
        # sends them.
        snapshot: Any = context.snapshot()
        publisher, policies = self.access.publisher, self.access.policies
        with context.phase("bringing weights to the engine"):
            rebuild = snapshot.roles.rebuild(snapshot.roles.trained)
            if policies:
                params = {name: context.snapshot(name).params() for name in policies}
                self.published = publisher.publish(self.version, params, rebuild)
                return
            if (draft := context.auxiliary.get(DRAFT)) is not None:
                assert isinstance(publisher, DraftPublisher), "the config checks that it takes one"
                publisher.use_draft(draft.snapshot())
            self.published = publisher.publish(self.version, snapshot.params(), rebuild)
        # After publishing: the prompts are played again at once, and must meet the new weights.
        if self.stages is not None and self.options.max_lag is not None:
            self.producer.drop_older(self.version - self.options.max_lag)

    def _draw_everywhere(self) -> list[Batch]:
        """Draw on process 0 and return the batches on every process; what process 0 raises, all
        raise."""
        # StopIteration and Interrupted travel as well: no process may go on alone to the next
        # collective.
        part = DrawnPart._make(broadcast_or_raise("a round", lambda: tuple(self.draw())))
        self.part, self.last_part, self.policy = part.part, part.last_part, part.policy
        self.metrics, self._counters = part.metrics, part.counters
        return part.batches

    def _prepare(self, context: TrainingContext, batches: list[Batch]) -> Round:
        """Return the part with what needs the current weights, under the policy that it trains."""
        context.activate_policy(self.policy)
        round = context.prepare(
            Round(
                batches,
                part=self.part,
                last=self.last_part,
                version=self.version,
                policy=self.policy,
            )
        )
        if self.policy:
            named = {f"{self.policy}/{name}": value for name, value in round.metrics.items()}
            round = round._replace(metrics=named)
        return round._replace(published=self.published) if self.part == 0 else round

    def _begin_round(self) -> None:
        assert self._places is not None, "only process 0 draws"
        options, producer = self.options, self.producer
        if self._idle >= options.max_idle:
            failure = producer.player.failures.newest
            count, drops = options.prompts_per_round, self._idle_drops
            raise RunStopped(explain_idle_rounds(self._idle, count, drops, failure, self.samples))
        if options.max_prompts is not None and producer.prompts.done >= options.max_prompts:
            raise StopIteration
        self._tally, self.part = RoundTally(), 0
        self._places.begin(self.version)

    def _build(self, groups: list[Group], tally: RoundTally) -> RoundBatches | None:
        """Return the batches of groups; None if nothing in them can be trained."""
        assert self.stages is not None, "only process 0 draws"
        built = build_batches(groups, self.stages.builder)
        if built.too_long:
            tally.drops["too_long_episodes"] += built.too_long
        if not built.batches:
            tally.drops["nothing_to_train"] += len(groups)
            return None
        tally.groups += groups
        tally.saved_tokens += built.saving.saved_tokens
        tally.flat_tokens += built.saving.flat_tokens
        return built

    def _finish_part(self, tally: RoundTally, built: RoundBatches | None) -> None:
        """Mark what was taken as done, and count it."""
        assert self.stages is not None and self._places is not None, "only process 0 draws"
        # Only now: a run that is interrupted while it waits for a part plays its prompts again.
        self.producer.mark_done(tally.slots)
        # Under the version that trains them now, so that they cannot be drawn again in this round.
        self.stages.replay.store(tally.groups, self.version)
        self._totals.add(tally, built, begins=self.part == 0)
        self._tally.add(tally)
        self.last_part = self._places.taken
        self.judged = self._tally.list_judged(list(self.producer.rules.policies))
        self.metrics = self._describe()
        if self.options.parts > 1:
            self.metrics["part"] = float(self.part)
            self.metrics["part/groups"] = float(len(tally.groups))
        if self.last_part:
            # Cancelled and skipped prompts count in the round during which they happened.
            self._counted = self._count()
            for warning in self._silent.check(self.metrics):
                self.stages.log(warning)
        # EBFT chooses them again once its rewards, which need the model, are known.
        self.samples = self.choose_samples() if self.last_part else []

    def _describe(self) -> dict[str, float]:
        """Return the metrics of the round so far."""
        assert self.stages is not None, "only process 0 draws"
        return {
            **describe_groups(self._tally, self.judged, self.producer.rules, self.version),
            "groups/waiting_for_second_try": float(self.producer.prompts.waiting),
            **{name: float(n) for name, n in (self._count() - self._counted).items()},
            **({"idle_rounds": float(self._idle)} if self._idle else {}),
            "policy_version": float(self.version),
            **self.stages.counters(),
        }

    def _count(self) -> Counter[str]:
        """Return what was cancelled or skipped since the start, without filling a slot."""
        cancelled = {f"cancelled/{reason}": n for reason, n in self.producer.cancelled.items()}
        return Counter({**cancelled, "curator/skipped": self.producer.prompts.skipped})

    def choose_samples(self) -> list[dict[str, Any]]:
        """Return lines for samples.jsonl, by the rewards of the round's answers as known now."""
        rules, count = self.producer.rules, self.options.num_samples
        return choose_samples(self.judged, rules.weights, count, rules.datasets)

    @property
    def progress(self) -> float:
        """Share of the run that is over: of prompts if its length is in epochs, else of steps."""
        if self.options.max_prompts is not None:
            return self.producer.prompts.done / self.options.max_prompts
        return self._step_share

    @property
    def rounds_begun(self) -> int:
        """Rounds that were returned, in whole or in part."""
        return self._totals.counts["rounds"]

    def state(self) -> dict[str, Any]:
        """Return the cursor: prompts that were trained or dropped are done, all others will be
        played again; and the replay buffer. Process 0's is the one to save."""
        if self.stages is None:
            return {}
        # Absent where there is no buffer, so that a cursor stays small and one from before the key
        # was set can be restored.
        replay = {"replay": self.stages.replay.state()} if self.stages.replay.size else {}
        return {
            **replay,
            "prompts": self.producer.state(),
            "version": self.version,
            **self._totals.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the round that would have followed."""
        self.version = state["version"]
        if self.stages is None:
            return
        self.producer.restore(state["prompts"])
        self._totals.restore(state)
        if "replay" in state:
            self.stages.replay.restore(state["replay"])

    def counters(self) -> dict[str, Any]:
        """Return totals of the run so far, dropped groups by reason, and the last packing
        efficiency; on other processes, those of process 0 when it sent the last part."""
        if self.stages is None:
            return self._counters
        return self._totals.counters()

    def close(self) -> None:
        """Stop what is being played."""
        self.closing.close()
