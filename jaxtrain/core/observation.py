"""Hooks that watch a run: the profiler's window, and observers, whose verdicts can stop it."""

from collections.abc import Callable

import jax
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.core.checkpointing import CheckpointHook
from jaxtrain.core.evaluation import EvaluationHook
from jaxtrain.core.hooks import POLL_STEPS, Hook
from jaxtrain.core.session import Session
from jaxtrain.core.task import Round
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.runs.observers.dispatch import Observers
from jaxtrain.runs.profile import ProfileWindow


class ProfileHook(Hook):
    """Traces the steps of section log's profile window."""

    def __init__(self, session: Session, window: ProfileWindow):
        self.session, self.window = session, window

    @override
    def on_batch(self, batch: Batch) -> None:
        self.window.before(self.session.step + 1, self.session.state)

    @override
    def on_end(self) -> None:
        self.window.close(self.session.state)


class ObserverHook(Hook):
    """Reports rounds to the observers and carries out their verdicts, on all processes alike."""

    def __init__(
        self,
        session: Session,
        observers: Observers,
        evaluation: EvaluationHook,
        checkpoints: CheckpointHook,
        log: Callable[[str], None],
    ):
        """observers: empty except on process 0. evaluation, checkpoints: targets of verdicts."""
        self.session, self.observers, self.log = session, observers, log
        self.evaluation, self.checkpoints = evaluation, checkpoints

    @override
    def on_start(self) -> None:
        self.obey(poll=True)

    @override
    def on_round(self, step: int, round: Round) -> None:
        if not self.observers:
            return
        if round.published is not None:
            self.observers.notify("publish", round.version, round.published)
        if round.samples:
            self.observers.notify("samples", step, list(round.samples))
        if round.groups:
            self.observers.notify("round", round.groups)

    @override
    def on_round_end(self, before: int) -> None:
        if self.session.step < self.session.rounds.total_steps:
            # All processes have just waited for an evaluation: one more broadcast costs nothing.
            self.obey(poll=self.evaluation.recorded_this_round)

    def obey(self, *, poll: bool) -> None:
        """Do what observers request. poll: ask process 0 even where steps are short."""
        session = self.session
        if jax.process_count() > 1:
            # A broadcast makes all wait for process 0, which short steps would feel.
            if not (poll or session.rounds.pauses or session.step % POLL_STEPS == 0):
                return
            verdicts = broadcast("what observers ask for", self.observers.take)
        else:
            verdicts = self.observers.take()
        if "evaluate" in verdicts and self.evaluation.evaluated_step < session.step:
            self.evaluation.evaluate()
        # A save that failed at this step is not tried again at the same step.
        unsaved = session.step > session.start and self.checkpoints.tried < session.step
        if "save" in verdicts and unsaved:
            self.checkpoints.save()
        if "stop" in verdicts:
            self.log(f"observer {verdicts['stop']} ends the run after step {session.step}")
            session.ended = True
