"""What happens around the steps of a round whose data come from the policy itself.

publish(version) ─> next(source): answers, rewards, labels ─> prepare: log-probs before the
first update ─> one optimizer step a batch ─> version + 1, publish again

Streaming, `next` gives a part of the round, and all but the last step of the line happen for each.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from jaxtrain.core.task import DRAFT, Round, TrainingContext
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.publisher import DraftPublisher, Publisher
from jaxtrain.methods.rl.shared_rounds import SharedRounds


class OnPolicy:
    """`core.task.Rounds` of answers that an engine draws from the run's own weights."""

    pauses = True

    def __init__(
        self,
        source: SharedRounds,
        publisher: Publisher,
        engine: Engine | None,
        closing: ExitStack,
        *,
        serves: bool,
        total_steps: int,
        policies: Sequence[str] = (),
    ):
        """engine: on process 0; the others never sample. closing: stops the producer first, then
        what it works with. policies: names of several that are trained."""
        self.policies = policies
        self.source, self.publisher, self.engine = source, publisher, engine
        self.serves, self.total_steps = serves, total_steps
        self.state, self.restore = source.state, source.restore
        self.counters, self.close = source.counters, closing.close
        self.published: dict[str, float] | None = None
        self.begun = False
        """Whether a round was handed out, in part at least, that did not count as trained yet."""
        self.unwritten: dict[str, float] = {}
        """Numbers of a round of which more is to come."""
        self.began = self.waited = self.scored = 0.0

    def ready(self, live: TrainingContext) -> None:
        """Bring the first weights to the engine, if nobody has yet."""
        if self.published is None:
            self.source.stop_when(live.stop_requested)
            self.publish(live)

    def next(self, live: TrainingContext) -> Round:
        """The next round or part; the numbers of a round come with its last part."""
        source = self.source
        self.ready(live)
        start = time.monotonic()
        if source.last_part:
            self.began, self.waited, self.scored = start, 0.0, 0.0
            source.tell_progress(live.step / self.total_steps)
        try:
            with live.phase("waiting for answers and rewards"):
                batches = next(source)
        except StopIteration:  # the epochs are over, in fewer steps than they could have been
            self.total_steps = live.step
            return Round([])
        drawn = time.monotonic()
        self.begun = self.begun or bool(batches)
        if source.last_part and (batches or source.part):
            self.publisher.sleep()  # of a round with nothing to train the next is drawn at once
        with live.phase("scoring the answers"):
            live.activate_policy(source.policy)
            round = Round(
                batches,
                part=source.part,
                last=source.last_part,
                version=source.version,
                policy=source.policy,
            )
            found = live.prepare(round)
            if source.policy:
                named = {f"{source.policy}/{name}": x for name, x in found.metrics.items()}
                found = found._replace(metrics=named)
        if source.part == 0:
            found = found._replace(published=self.published)
        self.waited += drawn - start
        self.scored += time.monotonic() - drawn
        metrics = {**source.metrics, **found.metrics, **(self.published or {})}
        metrics["rollout/seconds"] = self.waited
        drawing = drawn - self.began
        metrics["rollout/tokens_per_second"] = metrics.get("num_sampled_tokens", 0.0) / drawing
        metrics["rollout/score_seconds"] = self.scored
        if "part" in metrics:
            metrics["part/seconds"] = drawn - start
        if found.last:
            self.unwritten = {}
            return found._replace(metrics=metrics, samples=source.samples, groups=source.judged)
        self.unwritten = metrics
        own = {name: value for name, value in metrics.items() if name.startswith("part")}
        return found._replace(metrics={**own, **found.metrics})

    def finish(self, live: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """A round was trained. interrupted: the run is to stop, so nobody needs the weights. Asked
        again, where publishing them failed, it counts no second version."""
        self.source.version += self.begun
        self.begun = False
        if not interrupted:
            self.publish(live)
        unwritten, self.unwritten = self.unwritten, {}
        return unwritten

    def publish(self, live: TrainingContext) -> None:
        """Bring the current weights to the engine."""
        held: Any = live.snapshot()
        with live.phase("bringing weights to the engine"):
            rebuild = held.roles.rebuild(held.roles.trained)
            if self.policies:
                params = {name: live.snapshot(name).params() for name in self.policies}
                self.published = self.publisher.publish(self.source.version, params, rebuild)
                return
            if (draft := live.auxiliary.get(DRAFT)) is not None:
                assert isinstance(self.publisher, DraftPublisher), "the config says who takes one"
                self.publisher.use_draft(draft.snapshot())
            self.published = self.publisher.publish(self.source.version, held.params(), rebuild)
        self.source.give_up_stale()  # its prompts are asked anew, now of these weights
