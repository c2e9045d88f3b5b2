"""Training: one loop for every method.

    source (reads, packs ahead) -> feed (onto the mesh) -> step (compiled) -> sinks, one step late

The loop thread alone launches device work. It reads a step's numbers only after the next step was
dispatched, so the devices never wait for the host; before anything is saved or evaluated it reads
the current step's, so that a state with a loss that is not finite is never saved.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.evaluate import Evaluation
from jaxtrain.core.run_end import describe_start, finish
from jaxtrain.core.saving import LOOK_EVERY, Saves, is_due
from jaxtrain.core.session import Session, open_session, start_state
from jaxtrain.core.step_metrics import ExpertOverflowWarning, PendingStep, StepReader
from jaxtrain.core.task import Round
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.distributed.processes import peers, stop_requested
from jaxtrain.errors import Interrupted
from jaxtrain.generation.engine import KeepsVersions
from jaxtrain.generation.evaluation.background import BackgroundEval, find_broken_off
from jaxtrain.generation.evaluation.problem_sets import ProblemSets, open_problem_sets
from jaxtrain.methods.registry import make_task
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.folder import RunFolder
from jaxtrain.runs.hardware import Hardware
from jaxtrain.runs.observers.dispatch import Observers, list_observers
from jaxtrain.runs.profile import ProfileWindow
from jaxtrain.runs.sinks import Sinks
from jaxtrain.runs.watchdog import Signals, Watchdog


def train(config: Config, command: list[str]) -> int:
    """Run a config from its start or newest checkpoint to its last step; returns the exit code.

    Raises UserError for what a person can fix and RunStopped when training cannot go on.
    """
    task = make_task(config)
    primary = is_main_process()
    formats = list(task.data.check())
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config, command))
        sinks = stack.enter_context(Sinks(config, folder.path, primary=primary))
        watchdog = stack.enter_context(
            Watchdog(
                folder.path,
                config.log.watchdog_seconds,
                sinks.log,
                attempt=folder.attempt,
                primary=primary,
            )
        )
        stack.enter_context(
            Hardware(folder.path, config.log.hardware_seconds, jax.local_devices, primary=primary)
        )
        observers = stack.enter_context(
            Observers(
                config,
                folder.path,
                sinks.log,
                attempt=folder.attempt,
                phase=watchdog.phase,
                primary=primary,
            )
        )
        others = peers()
        if others is not None:
            others.log = sinks.log
        tell = None if others is None else others.request_stop
        signals = stack.enter_context(Signals(sinks.log, tell))
        stack.enter_context(jax.set_mesh(task.mesh))
        for line in [*folder.describe(), *formats]:
            sinks.log(line)
        checkpoints = open_checkpoints(config, folder.path, sinks, observers)
        stack.callback(checkpoints.close)
        with watchdog.phase("opening the data"):
            session = open_session(config, task, sinks.log)
            stack.callback(session.rounds.close)
            sets = open_problem_sets(config, session.bundle, sinks.log)
            if sets is not None:
                stack.callback(sets.close)
        with watchdog.phase("reading the weights"):
            start_state(session, checkpoints)
        folder.rewind(session.start)
        sinks.log(describe_start(session))
        sinks.start(session.rounds.total_steps, session.start)
        watchdog.start(session.rounds.total_steps, session.start)
        observers.start(session.rounds.total_steps, session.start)
        session.folder, session.phase, session.signals = folder.path, watchdog.phase, signals

        def sampled(step: int, lines: Iterable[Mapping[str, Any]]) -> None:
            lines = list(lines)
            sinks.sampled(step, lines)
            if lines:
                observers.tell("samples", step, lines)

        evaluation = Evaluation(
            config,
            task,
            session.roles,
            sinks.log,
            sampled,
            sets,
            session.rounds.engine,
            served=session.rounds.serves,
            run_eval=session.run_eval,
            policies=lambda: {name: session.snapshot(name) for name in session.policies},
            should_stop=session.stop_requested,
            beside=open_beside(session, sets),
        )
        stack.callback(evaluation.close)
        run = Loop(session, sinks, watchdog, signals, checkpoints, evaluation, observers)
        with stack.enter_context(
            ProfileWindow(
                folder.path / "profile", config.log.profile_start, config.log.profile_steps
            )
        ) as profile:
            run.go(profile)
        if signals.stop:
            watchdog.stopped(signals.name)
            observers.stopped(signals.name)
            done = "saved" if session.step > session.start else "nothing new to save after"
            sinks.summarize(
                f"{signals.name}: {done} step {session.step} of {session.rounds.total_steps} in"
                f" {folder.path}; the same command goes on from there"
            )
            return 0
        with watchdog.phase("exporting the model"):
            sinks.summarize(finish(session, evaluation))
    return 0


def open_beside(session: Session, sets: ProblemSets | None) -> BackgroundEval | None:
    """Where some of the engine's servers may answer the sets while training goes on."""
    engine = session.rounds.engine
    wanted = session.config.rollout.vllm.eval_servers and session.rounds.serves
    if sets is None or not wanted or not isinstance(engine, KeepsVersions):
        return None
    return BackgroundEval(engine, sets, session.folder, session.stop_requested)


def open_checkpoints(
    config: Config, folder: Path, sinks: Sinks, observers: Observers
) -> Checkpoints:
    """The run's checkpoints by section `checkpoint`."""
    options = config.checkpoint.model_dump(exclude={"every", "per_epoch", "every_minutes"})

    return Checkpoints(folder / "checkpoints", **options, log=sinks.log, saved=observers.saved)


class Loop:
    """The steps of one run; holds what changes while they pass."""

    def __init__(
        self,
        session: Session,
        sinks: Sinks,
        watchdog: Watchdog,
        signals: Signals,
        checkpoints: Checkpoints,
        evaluation: "Evaluation",
        observers: Observers,
    ):
        self.session, self.config, self.observers = session, session.config, observers
        self.sinks, self.watchdog, self.signals = sinks, watchdog, signals
        self.saves, self.evaluation = Saves(session, checkpoints, sinks.log), evaluation
        self.reader, self.crowding = StepReader(session), ExpertOverflowWarning()
        self.pending: PendingStep | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self.evaluated = -1
        """The last step that was evaluated."""
        self.observed = bool(list_observers(self.config))
        """Whether process 0 has observers, known to all."""
        self.noted = 0
        """Evaluations whose numbers came."""
        self.over = False
        """Whether an observer has ended the run."""
        self.latest: dict[str, float] = {}
        self.newest: dict[str, dict[str, float]] = {}
        self.round: dict[str, float] = {}
        """Numbers about rounds that wait for the next line."""

    def go(self, profile: ProfileWindow) -> None:
        """Train until the last step, a signal or an error; the state is saved at the end of each,
        after an error the last good one."""
        session = self.session
        try:
            self.train_rounds(profile)
            profile.close(session.state)
            if not self.signals.stop and self.collect(wait=True):
                self.evaluate(aside=False)
            if session.step > session.start:
                self.save()
        except Exception as error:  # whatever it is, it goes on from here
            with self.watchdog.phase("saving what was trained"):
                self.saves.rescue(error, self.report, self.latest)
            raise

    def train_rounds(self, profile: ProfileWindow) -> None:
        """All rounds, with what is due between them."""
        session = self.session
        begun = broadcast("broken off", lambda: find_broken_off(session.folder, session.start))
        if begun is not None:
            self.sinks.log(f"the evaluation of step {begun} was broken off: it is asked again")
        if begun is not None or (self.config.eval.at_start and session.step == 0):
            session.rounds.ready(session)
            self.evaluate()
        self.obey(look=True)
        while session.step < session.rounds.total_steps and not self.over and not self.stopping():
            before = session.step
            if not self.train_round(profile):
                break
            self.act(before)

    def train_round(self, profile: ProfileWindow) -> bool:
        """What is trained under one version of the weights; it may come in parts.

        False: the run is to stop. A round that was interrupted while it waited for a part ends
        there; what was not trained comes again after a resume.
        """
        session, rounds = self.session, self.session.rounds
        before, last, interrupted = session.step, False, False
        while not last and session.step < rounds.total_steps:
            if rounds.pauses:
                self.report()
            try:
                round_ = rounds.next(session)
            except Interrupted:
                self.stop()
                interrupted = True
                break
            if rounds.pauses:
                self.reader.restart()
            # The step that is made of it. A round without a batch is one of those before the next
            # step: a run that goes on from the last one repeats it, with its lines.
            step = session.step + bool(round_.batches or session.step == before)
            self.sinks.sampled(step, round_.samples)
            self.observe_round(step, round_)
            found = round_.metrics
            for batch in round_.batches[: rounds.total_steps - session.step]:
                self.train(batch, found, profile)
                found = {}
            self.note(step, found)
            last = round_.last
        if session.step > before:
            if rounds.pauses:
                self.report()  # nobody shall get the weights of a bad step
            found = dict(session.task.after_round(session, before) or {})
            found |= rounds.finish(session, interrupted=interrupted)
            self.saves.mark()
            self.note(session.step, found)
        return not interrupted

    def note(self, step: int, found: dict[str, float]) -> None:
        """Numbers that no step's line has: a line of their own."""
        if found:
            self.report()
            self.sinks.write(step, found)

    def stop(self) -> None:
        """Somebody waited in vain because the run is to stop; the signal may be another's."""
        self.signals.stop = True
        self.signals.name = self.signals.name or stop_requested()

    def train(self, batch: Batch, found: dict[str, float], profile: ProfileWindow) -> None:
        """One optimizer step; `found` goes into its line of metrics."""
        session = self.session
        profile.before(session.step + 1, session.state)
        compiled = self.announce(batch)
        with self.watchdog.phase("running a step (a new shape compiles first)"):
            output = session.update(feed(batch, session.bundle.mesh))
            last, counters = self.pending, session.rounds.counters()
            # Streams that were made on devices may be large.
            streams = {n: v for n, v in batch.streams.items() if not isinstance(v, jax.Array)}
            kept = batch._replace(streams=streams)
            self.pending = PendingStep(
                session.step,
                output,
                kept,
                counters,
                found,
                session.policy,
                session.updates[session.policy],
                compiled,
            )
            if last is not None:
                self.read(last)

    def stopping(self) -> bool:
        """Whether a signal, here or on another process, forbids the next step on all of them."""
        others = peers()
        if others is not None:
            self.signals.stop = others.stops_before(self.session.step + 1)
            self.signals.name = others.stop_name
        return self.signals.stop

    def announce(self, batch: Batch) -> bool:
        """Say so when a batch has a shape that this process has not compiled yet."""
        shape = batch.tokens.shape
        if shape in self.shapes:
            return False
        self.report()
        self.shapes.add(shape)
        self.sinks.log(
            f"compiling program {len(self.shapes)}:"
            f" {shape[0]} x {shape[1]} rows of {shape[2]} tokens"
        )
        return True

    def act(self, before: int) -> None:
        """Whatever is due after the steps `before` + 1 to the current one."""
        step, total, options = self.session.step, self.session.rounds.total_steps, self.config.eval
        last, again, evaluated = step == total, self.collect(), self.noted
        times = (options.per_epoch or 0) * (self.config.run.num_epochs or 0)
        due = options.every != "never" and (
            (last and self.evaluated < step) or is_due(step, before, options.every, times, total)
        )
        if due or again:
            self.report()
            self.evaluate()
        if not last and self.saves.due(before):
            self.save()
        if not last:
            self.obey(look=self.noted > evaluated)

    def obey(self, *, look: bool) -> None:
        """Do what observers ask for; all processes alike. look: even where steps are short."""
        session = self.session
        if not self.observed:
            return
        if jax.process_count() > 1:
            if not (look or session.rounds.pauses or session.step % LOOK_EVERY == 0):
                return
            wanted = broadcast("what observers ask for", self.observers.take)
        else:
            wanted = self.observers.take()
        if "evaluate" in wanted and self.evaluated < session.step:
            self.report()
            self.evaluate()
        if "save" in wanted and session.step > session.start and self.saves.tried < session.step:
            self.save()
        if "stop" in wanted:
            self.sinks.log(f"observer {wanted['stop']} ends the run after step {session.step}")
            self.over = True

    def observe_round(self, step: int, round_: Round) -> None:
        """Tell observers of a round that is about to be trained, and of the weights behind it."""
        if not self.observers:
            return
        if round_.published is not None:
            self.observers.tell("publish", round_.version, round_.published)
        if round_.samples:
            self.observers.tell("samples", step, list(round_.samples))
        if round_.groups:
            self.observers.tell("round", round_.groups)

    def report(self) -> None:
        """Read and report the step that is still pending; raises NotFinite if it is not."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.read(pending)

    def read(self, pending: PendingStep) -> None:
        """Read and report a step; raises NotFinite."""
        # Of several policies each one's last numbers since the last line.
        self.newest[pending.policy] = own = self.reader.read(pending)
        self.latest = {name: x for found in self.newest.values() for name, x in found.items()}
        if (warning := self.crowding.look(self.latest)) is not None:
            self.sinks.log(warning)
        self.watchdog.beat(pending.step)
        self.round |= pending.round
        efficiency = pending.counters["packing_efficiency"]
        found = {**pending.counters.get("metrics", {}), "packing_efficiency": efficiency}
        self.observers.tell("step", pending.step, {**own, **pending.round, **found})
        if (
            pending.step % self.config.log.every == 0
            or pending.step == self.session.rounds.total_steps
        ):
            values = {**self.latest, **self.round, **found}
            self.round, self.newest = {}, {}
            self.sinks.write(pending.step, values)

    def evaluate(self, *, aside: bool = True) -> None:
        """Held-out numbers of the current weights; none if the run is to stop meanwhile. aside:
        those of problem sets may come later, but after the last step."""
        session = self.session
        self.evaluated = session.step
        aside = aside and session.step < session.rounds.total_steps
        self.collect(wait=True)
        if self.signals.stop:
            return
        try:
            with self.watchdog.phase("evaluating"):
                found = self.evaluation.run(session.snapshot(), session.scorer, aside=aside)
        except Interrupted:
            self.stop()
            return
        self.reader.restart()
        self.note_evaluation(session.step, found)

    def collect(self, *, wait: bool = False) -> bool:
        """Note what was evaluated beside training and is over; whether it is to be asked again."""
        try:
            with self.watchdog.phase("waiting for an evaluation") if wait else nullcontext():
                found, again = self.evaluation.collect(wait=wait)
        except Interrupted:
            self.stop()
            return False
        if found is not None:
            self.report()
            self.note_evaluation(*found)
            if self.evaluation.beside is not None:
                self.evaluation.beside.written()
        return again

    def note_evaluation(self, step: int, found: dict[str, float]) -> None:
        """Numbers of the weights after `step`, perhaps an earlier one."""
        if not found:
            return
        if step == self.session.step:
            self.latest = {**self.latest, **found}
        self.noted += 1
        self.sinks.write(step, found)
        self.observers.tell("evaluation", step, found)

    def save(self) -> None:
        """Checkpoint the current state together with the data's cursor."""
        if (self.config.checkpoint.best_metric or "").startswith("eval/"):
            self.collect(wait=True)  # the best one is found by the numbers of its own step
        self.report()
        with self.watchdog.phase("saving a checkpoint"):
            self.saves.save(self.latest)
        self.reader.restart()
