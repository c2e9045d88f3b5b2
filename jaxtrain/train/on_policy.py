"""What happens around the steps of a round whose data come from the policy itself.

publish(version) ─> next(source): answers, rewards, labels ─> prepare: log-probs before the
first update ─> one optimizer step a batch ─> version + 1, reference mixed, publish again

Streaming, `next` gives a part of the round, and all but the last step of the line happen for each.
"""

import json
import time
from pathlib import Path

from jaxtrain.batch import Batch
from jaxtrain.core.step import mix_reference
from jaxtrain.parallel.mesh import is_main_process
from jaxtrain.parallel.processes import asked_to_stop
from jaxtrain.rollout.producer import Interrupted
from jaxtrain.run.watchdog import Signals, Watchdog
from jaxtrain.train.session import Session, keeps_reference, open_scorer


class OnPolicy:
    """The rounds of a run of task.kind rl, as the loop takes them."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        watchdog: Watchdog,
        signals: Signals,
    ):
        assert session.rollouts is not None, "not a run of task.kind rl"
        self.session, self.rollouts = session, session.rollouts
        self.samples = folder / "samples.jsonl"
        self.watchdog = watchdog
        self.scorer = open_scorer(session)
        self.published: dict[str, float] | None = None
        self.unwritten: dict[str, float] = {}
        """Numbers of a round of which more is to come."""
        self.began = self.waited = self.scored = 0.0
        self.signals = signals
        session.source.stop_when(lambda: bool(signals.stop) or asked_to_stop())

    def next(self, step: int) -> tuple[list[Batch], dict[str, float]]:
        """(batches of the next round or part, numbers for the line of the first one's step); raises
        Interrupted when the run is to stop.

        The numbers of a round come with its last part. step: optimizer steps done, for
        samples.jsonl.
        """
        source = self.session.source
        self.ready()
        start = time.monotonic()
        if source.last_part:
            self.began, self.waited, self.scored = start, 0.0, 0.0
        with self.watchdog.phase("waiting for answers and rewards"):
            try:
                batches = next(source)
            except Interrupted:
                self.signals.stop = True  # here, too, where another process got the signal
                self.signals.name = self.signals.name or asked_to_stop()
                raise
        drawn = time.monotonic()
        if source.last_part:
            self.rollouts.publisher.sleep()
        with self.watchdog.phase("scoring the answers"):
            batches = self.rollouts.prepare(batches, self.scorer, source.part)
        self.waited += drawn - start
        self.scored += time.monotonic() - drawn
        found = {**source.metrics, **self.rollouts.prepare.metrics, **(self.published or {})}
        found["rollout/seconds"] = self.waited
        drawing = drawn - self.began
        found["rollout/tokens_per_second"] = found.get("num_sampled_tokens", 0.0) / drawing
        found["rollout/score_seconds"] = self.scored
        if "part" in found:
            found["part/seconds"] = drawn - start
        self.write_samples(step)
        if source.last_part:
            self.unwritten = {}
            return batches, found
        self.unwritten = found
        own = {name: value for name, value in found.items() if name.startswith("part")}
        return batches, {**own, **self.rollouts.prepare.metrics}

    def finish(self, before: int, step: int, *, interrupted: bool = False) -> dict[str, float]:
        """The round was trained: steps `before` + 1 to `step`. The numbers of one that was cut
        short, which no line has yet.

        interrupted: the run is to stop, so nobody needs the weights.
        """
        task = self.session.config.task
        if keeps_reference(self.session.config, self.session.parts.adapter) == "mixed":
            if step // task.reference_every > before // task.reference_every:
                self.session.state = mix_reference(self.session.state, task.reference_alpha)
        self.session.source.version += 1
        if not interrupted:
            self.publish()
        unwritten, self.unwritten = self.unwritten, {}
        return unwritten

    def ready(self) -> None:
        """Bring the first weights to the engine, if nobody has yet."""
        if self.published is None:
            self.publish()

    def publish(self) -> None:
        """Bring the current weights to the engine."""
        session = self.session
        with self.watchdog.phase("bringing weights to the engine"):
            self.published = self.rollouts.publisher.publish(
                session.source.version, session.params, session.rebuild
            )

    def write_samples(self, step: int) -> None:
        """Append the round's best and worst answers to samples.jsonl."""
        if not is_main_process() or not self.session.source.samples:
            return
        with self.samples.open("a", encoding="utf-8") as file:
            for sample in self.session.source.samples:
                line = {"step": step, **sample}
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
