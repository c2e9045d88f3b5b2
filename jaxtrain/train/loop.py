"""Training: one loop for every method.

    source (reads, packs ahead) -> feed (onto the mesh) -> step (compiled) -> sinks, one step late

The loop thread alone launches device work. It reads a step's numbers only after the next step was
dispatched, so the devices never wait for the host; before anything is saved or evaluated it reads
the current step's, so that a state with a loss that is not finite is never saved.
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import jax

from jaxtrain.adapters.storage import count_weights
from jaxtrain.batch import Batch
from jaxtrain.config import Config, RLTask
from jaxtrain.core.assemble import assemble
from jaxtrain.core.export import export_params
from jaxtrain.data.pipeline import probe_dataset
from jaxtrain.parallel.feed import feed
from jaxtrain.parallel.mesh import is_main_process
from jaxtrain.parallel.processes import peers
from jaxtrain.rollout.open import reserved_devices
from jaxtrain.rollout.problem_sets import open_problem_sets
from jaxtrain.rollout.producer import Interrupted
from jaxtrain.run.checkpoint import Checkpoints
from jaxtrain.run.folder import RunFolder
from jaxtrain.run.plot import plot_runs
from jaxtrain.run.profile import ProfileWindow
from jaxtrain.run.sinks import Sinks
from jaxtrain.run.watchdog import Signals, Watchdog
from jaxtrain.train.evaluate import Evaluation
from jaxtrain.train.on_policy import OnPolicy
from jaxtrain.train.session import Session, open_session, start_state
from jaxtrain.train.step_metrics import Pending, Reader


def train(config: Config, command: list[str]) -> int:
    """Run a config from its start or newest checkpoint to its last step; returns the exit code.

    Raises UserError for what a person can fix and RunStopped when training cannot go on.
    """
    parts = assemble(config, reserved_devices(config))
    primary = is_main_process()
    formats = []
    if not isinstance(config.task, RLTask):
        formats = [
            str(probe_dataset(dataset, config.data, parts.tokenizer, config.task))
            for dataset in [*config.data.datasets, *config.data.eval_datasets]
        ]
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config, command))
        sinks = stack.enter_context(Sinks(config, folder.path, primary=primary))
        watchdog = stack.enter_context(
            Watchdog(folder.path, config.log.watchdog_seconds, sinks.say, primary=primary)
        )
        others = peers()
        if others is not None:
            others.say = sinks.say
        tell = None if others is None else others.ask_to_stop
        signals = stack.enter_context(Signals(sinks.say, tell))
        stack.enter_context(jax.set_mesh(parts.mesh))
        for line in [*folder.describe(), *formats]:
            sinks.say(line)
        checkpoints = open_checkpoints(config, folder.path, sinks)
        stack.callback(checkpoints.close)
        with watchdog.phase("opening the data"):
            session = open_session(config, parts, sinks.say)
            stack.callback(session.close)
            sets = open_problem_sets(config, parts, sinks.say)
            if sets is not None:
                stack.callback(sets.close)
        with watchdog.phase("reading the weights"):
            start_state(session, checkpoints)
        folder.rewind(session.start)
        sinks.say(describe_start(session))
        sinks.start(session.total_steps, session.start)
        engine = session.rollouts.engine if config.rollout.engine == "vllm" else None
        samples = folder.path / "samples.jsonl"
        evaluation = Evaluation(config, parts, sinks.say, samples, sets, engine)
        run = Loop(session, folder.path, sinks, watchdog, signals, checkpoints, evaluation)
        with stack.enter_context(
            ProfileWindow(
                folder.path / "profile", config.log.profile_start, config.log.profile_steps
            )
        ) as profile:
            run.go(profile)
        if signals.stop:
            done = "saved" if run.step > session.start else "nothing new to save after"
            sinks.summarise(
                f"{signals.name}: {done} step {run.step} of {session.total_steps} in {folder.path};"
                " the same command goes on from there"
            )
            return 0
        with watchdog.phase("exporting the model"):
            sinks.summarise(finish(session, folder.path, evaluation))
    return 0


def open_checkpoints(config: Config, folder: Path, sinks: Sinks) -> Checkpoints:
    """The run's checkpoints by section `checkpoint`."""
    options = config.checkpoint.model_dump(exclude={"every"})
    return Checkpoints(folder / "checkpoints", **options, say=sinks.say)


class Loop:
    """The steps of one run; holds what changes while they pass."""

    def __init__(
        self,
        session: Session,
        folder: Path,
        sinks: Sinks,
        watchdog: Watchdog,
        signals: Signals,
        checkpoints: Checkpoints,
        evaluation: "Evaluation",
    ):
        self.session, self.config = session, session.config
        self.sinks, self.watchdog, self.signals = sinks, watchdog, signals
        self.checkpoints, self.evaluation = checkpoints, evaluation
        self.reader = Reader(session, folder)
        self.step = session.start
        self.pending: Pending | None = None
        self.shapes: set[tuple[int, ...]] = set()
        self.latest: dict[str, float] = {}
        self.round: dict[str, float] = {}
        """Numbers about rounds that wait for the next line."""
        self.on_policy: OnPolicy | None = None
        if session.rollouts is not None:
            self.on_policy = OnPolicy(session, folder, watchdog, signals)

    def go(self, profile: ProfileWindow) -> None:
        """Train until the last step or a signal; the state is saved at the end of either."""
        session = self.session
        if self.config.eval.at_start and self.step == 0:
            if self.on_policy is not None:
                self.on_policy.ready()  # servers answer the sets with the run's own weights
            self.evaluate()
        while self.step < session.total_steps and not self.stopping():
            before = self.step
            if not self.train_round(profile):
                break
            self.act(before)
        profile.close(session.state)
        if self.step > session.start:
            self.save()

    def train_round(self, profile: ProfileWindow) -> bool:
        """What is trained under one policy version; a streamed round comes in parts.

        False: the run is to stop. A round that was interrupted while it waited for a part ends
        there; what was not trained is asked again after a resume.
        """
        before, more, interrupted = self.step, True, False
        while more and self.step < self.session.total_steps:
            try:
                batches, found = self.next_batches()
            except Interrupted:
                interrupted = True
                break
            for batch in batches[: self.session.total_steps - self.step]:
                self.train(batch, found, profile)
                found = {}
            self.note(found)
            more = self.on_policy is not None and not self.session.source.last_part
        if self.on_policy is not None and self.step > before:
            self.note(self.on_policy.finish(before, self.step, interrupted=interrupted))
        return not interrupted

    def note(self, found: dict[str, float]) -> None:
        """Numbers that no step's line has: a line of their own."""
        if found:
            self.settle()
            self.sinks.write(self.step, found)

    def next_batches(self) -> tuple[list[Batch], dict[str, float]]:
        """A round, or a part of a streamed one, and numbers about it."""
        if self.on_policy is None:
            with self.watchdog.phase("waiting for data"):
                return next(self.session.source), {}
        self.settle()
        round_and_metrics = self.on_policy.next(self.step)
        self.reader.restart()
        return round_and_metrics

    def train(self, batch: Batch, found: dict[str, float], profile: ProfileWindow) -> None:
        """One optimizer step; `found` goes into its line of metrics."""
        session = self.session
        profile.before(self.step + 1, session.state)
        compiled = self.announce(batch)
        with self.watchdog.phase("running a step (a new shape compiles first)"):
            placed = feed(batch, session.parts.mesh)
            session.state, output = session.step(session.state, placed, session.frozen)
            self.settle()
        self.step += 1
        counters = session.source.counters()
        self.pending = Pending(self.step, output, batch, counters, found, compiled)

    def stopping(self) -> bool:
        """Whether a signal, here or on another process, forbids the next step on all of them."""
        others = peers()
        if others is not None:
            self.signals.stop = others.stops_before(self.step + 1)
            self.signals.name = others.stop_name
        return self.signals.stop

    def announce(self, batch: Batch) -> bool:
        """Say so when a batch has a shape that this process has not compiled yet."""
        shape = batch.tokens.shape
        if shape in self.shapes:
            return False
        self.settle()
        self.shapes.add(shape)
        self.sinks.say(
            f"compiling program {len(self.shapes)}:"
            f" {shape[0]} x {shape[1]} rows of {shape[2]} tokens"
        )
        return True

    def act(self, before: int) -> None:
        """Whatever is due after the steps `before` + 1 to the current one."""
        last = self.step == self.session.total_steps
        if last or self.due(self.config.eval.every, before):
            self.settle()
            self.evaluate()
        if self.due(self.config.checkpoint.every, before) and not last:
            self.save()

    def due(self, every: int | None, before: int) -> bool:
        return bool(every) and self.step // every > before // every

    def settle(self) -> None:
        """Read and report the step that is still pending; raises RunStopped if not finite."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        self.latest = self.reader.read(pending)
        self.watchdog.beat(pending.step)
        self.round |= pending.round
        if pending.step % self.config.log.every == 0 or pending.step == self.session.total_steps:
            efficiency = pending.counters["packing_efficiency"]
            values = {**self.latest, **self.round, "packing_efficiency": efficiency}
            self.round = {}
            self.sinks.write(pending.step, values)

    def evaluate(self) -> None:
        """Held-out numbers of the current weights."""
        with self.watchdog.phase("evaluating"):
            found = self.evaluation.run(self.session, self.step)
        self.reader.restart()
        if found:
            self.latest = {**self.latest, **found}
            self.sinks.write(self.step, found)

    def save(self) -> None:
        """Checkpoint the current state together with the data's cursor."""
        self.settle()
        with self.watchdog.phase("saving a checkpoint"):
            self.checkpoints.save(
                self.step,
                self.session.state,
                self.session.source.state(),
                metrics=self.latest,
                config=self.config.model_dump(mode="json"),
            )
        self.reader.restart()


def describe_start(session: Session) -> str:
    """One line on what is about to be trained."""
    params = sum(count_weights(path, value) for path, value in session.params.items())
    trained = sum(value.size for value in session.state.params.values())
    share = f"{trained / 1e6:.2f}M of " if trained < params else ""
    steps = f"steps {session.start + 1} to {session.total_steps}"
    if session.start >= session.total_steps:
        steps = f"all {session.total_steps} steps are done"
    return (
        f"{share}{params / 1e6:.2f}M parameters on {session.parts.mesh.size}"
        f" {jax.devices()[0].device_kind} device(s), {steps}"
    )


def finish(session: Session, folder: Path, evaluation: "Evaluation") -> str:
    """Export, draw the curves, and tell people where everything lies."""
    config, lines = session.config, [evaluation.summary()]
    places = {
        "checkpoints": folder / "checkpoints",
        "metrics": folder / "metrics.jsonl",
    }
    if is_main_process() and config.log.plot and (folder / "metrics.jsonl").exists():
        plot_runs([folder], folder / "curves.png")
        places["curves"] = folder / "curves.png"
    if config.run.export:
        export_params(
            session.params,
            session.rebuild,
            session.parts,
            folder / "model",
            config=config,
            step=session.total_steps,
        )
        places["model" if session.parts.adapter is None else "adapter"] = folder / "model"
    lines += [f"{name:<12} {path}" for name, path in places.items()]
    program = f"{os.path.relpath(sys.executable)} -m jaxtrain.main"
    agent = " --env" if config.env.kind != "single_turn" else ""
    lines += [
        "try next",
        f"  {program} generate {folder}{agent}",
        f"  {program} merge {folder}" if session.parts.adapter else "",
        f"  {program} plot {folder} OTHER_RUN --output both.png",
        f"  {program} --help",
    ]
    return "\n".join(line for line in lines if line)
