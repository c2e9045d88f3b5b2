"""A training run, opened: its folder, sinks, session and hooks, and everything that must be closed.

The order of the hooks is the order of events: a step is reported before it is evaluated, evaluated
before it is saved (the numbers choose the best checkpoint), and saved before observers' verdicts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtrain.config import Config
from jaxtrain.core.checkpointing import CheckpointHook
from jaxtrain.core.evaluation import AnswerEvaluator, EvaluationHook
from jaxtrain.core.hooks import Hook, HookList, NoObservers
from jaxtrain.core.roles import Roles
from jaxtrain.core.session import Session, open_session, start_state
from jaxtrain.core.step_reports import StepReports
from jaxtrain.core.task import Task
from jaxtrain.core.weights import count_weights
from jaxtrain.distributed.compile_cache import CompileCounter
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.distributed.processes import peers
from jaxtrain.errors import Interrupted
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.folder import RunFolder
from jaxtrain.runs.hardware import Hardware
from jaxtrain.runs.sinks import Sinks
from jaxtrain.runs.watchdog import Signals, Watchdog

OpenAnswers = Callable[[Session, Callable[[str], None]], AnswerEvaluator]
"""(session, log) -> what evaluates problem sets."""


class Run(NamedTuple):
    """Everything the loop works with."""

    session: Session
    reports: StepReports
    evaluation: EvaluationHook
    hooks: Hook
    sinks: Sinks
    watchdog: Watchdog
    observers: Any
    compiled: CompileCounter


@contextmanager
def open_run(
    config: Config, task: Task, command: list[str], open_answers: OpenAnswers | None
) -> Iterator[Run]:
    """Open a run at its start or its newest checkpoint; everything is closed at the end, in the
    opposite order. The arguments are those of `loop.train`."""
    primary = is_main_process()
    roles = Roles(task.roles)
    formats = list(task.data.check())  # before the folder is claimed: data may be what is wrong
    with ExitStack() as stack:
        compiled = stack.enter_context(CompileCounter())
        base = find_base(roles)
        copied = any(role.weights == "start" for role in roles.roles.values())
        folder = stack.enter_context(
            RunFolder(
                config, command, base=base, needs_base=copied or roles.bundle.adapter is not None
            )
        )
        sinks = stack.enter_context(Sinks(config, folder.path, primary=primary))
        watchdog = stack.enter_context(
            Watchdog(
                folder.path,
                config.log.watchdog_seconds,
                sinks.log,
                attempt=folder.attempt,
                primary=primary,
                compiling=compiled,
                show=sinks.show,
            )
        )
        observed = bool(config.observers) or config.eval.patience is not None
        observers: Any = NoObservers()
        if observed:
            from jaxtrain.runs.observers.dispatch import Observers

            options = {"attempt": folder.attempt, "phase": watchdog.phase, "primary": primary}
            observers = stack.enter_context(Observers(config, folder.path, sinks.log, **options))
        signals = stack.enter_context(open_signals(sinks))
        stack.enter_context(jax.set_mesh(task.mesh))
        for line in [*folder.describe(), *formats]:
            sinks.log(line)
        checkpoints = open_checkpoints(config, folder, sinks, observers)
        stack.callback(checkpoints.close)
        with watchdog.phase("opening the data"):
            session = open_session(config, task, sinks.log)
            stack.callback(session.rounds.close)
            session.folder, session.phase, session.signals = folder.path, watchdog.phase, signals
            answers = None if open_answers is None else open_answers(session, sinks.log)
            if answers is not None:
                stack.callback(answers.close)
        if jax.process_count() == 1:
            session.compile_ahead(compiled, sinks.log)
            stack.callback(session.end_compiling)
        with watchdog.phase("reading the weights"):
            start_state(session, checkpoints)
        if session.start < session.rounds.total_steps:
            # Programs compile meanwhile. What the engine refuses, it refuses before the start is
            # recorded.
            try:
                session.rounds.ready(session)
            except Interrupted:
                session.accept_stop()
        # What was written after the checkpoint comes again.
        folder.rewind(session.start)
        sinks.log(describe_start(session))
        sinks.log(describe_programs(session))
        for part in (sinks, watchdog, observers):
            part.start(session.rounds.total_steps, session.start)
        folder.accept()
        if primary and base is not None:
            from jaxtrain.core.base_model import keep_base

            keep_base(folder.path, config, base, roles.bundle, sinks.log)
        stack.enter_context(
            Hardware(folder.path, config.log.hardware_seconds, jax.local_devices, primary=primary)
        )
        reports = StepReports(session, sinks, watchdog, observers)
        evaluation = EvaluationHook(session, answers, reports)
        saving = CheckpointHook(session, checkpoints, evaluation, reports)
        hooks: list[Hook] = [reports, evaluation, saving]
        if config.log.profile_start is not None:
            # First of all: the window begins before a batch is reported, and ends before a save.
            hooks.insert(0, open_profile(config, session, stack, sinks.log))
        if observed:
            from jaxtrain.core.observation import ObserverHook

            hooks.append(ObserverHook(session, observers, evaluation, saving, sinks.log))
        all_hooks = HookList(hooks)
        yield Run(session, reports, evaluation, all_hooks, sinks, watchdog, observers, compiled)


def find_base(roles: Roles) -> Path | None:
    """Return the folder that model.path was opened from; None for a random start."""
    # Of a draft model.path is the target that it guesses for.
    role = roles.roles.get("target") if roles.bundle.architecture.guesses else None
    return roles.bundle.folder if role is None else role.bundle.folder


def open_signals(sinks: Sinks) -> Signals:
    """Return what catches signals and passes them on to the other processes."""
    processes = peers()
    if processes is None:
        return Signals(sinks.log)
    processes.log = sinks.log
    return Signals(sinks.log, processes.request_stop)


def open_profile(
    config: Config, session: Session, stack: ExitStack, log: Callable[[str], None]
) -> Hook:
    """Open the profile window of section log."""
    from jaxtrain.core.observation import ProfileHook
    from jaxtrain.runs.profile import ProfileWindow

    options = config.log.profile_start, config.log.profile_steps
    window = ProfileWindow(session.folder / "profile", *options, log=log)
    return ProfileHook(session, stack.enter_context(window))


def open_checkpoints(
    config: Config, folder: RunFolder, sinks: Sinks, observers: Any
) -> Checkpoints:
    """Open the run's checkpoints as section `checkpoint` says."""
    options: dict[str, Any] = config.checkpoint.model_dump(
        exclude={"every", "per_epoch", "every_minutes"}
    )
    path = folder.path / "checkpoints"

    def saved(step: int, checkpoint: Path) -> None:
        folder.note_saved()
        observers.saved(step, checkpoint)

    return Checkpoints(path, **options, log=sinks.log, saved=saved)


def describe_programs(session: Session) -> str:
    """Return a line about the step programs that the run may compile, whatever its batches hold."""
    lengths = session.row_lengths
    shown = ", ".join(map(str, lengths))
    rows = session.config.data.micro_batch_size * row_shards(session.bundle.mesh)
    return (
        f"{len(lengths)} step program{'s' * (len(lengths) > 1)}: {rows} rows of {shown} tokens,"
        " however many microsteps a step has"
        f"{', compiled while the weights are read' if session.compiled_ahead else ''}"
    )


def describe_start(session: Session) -> str:
    """Return a line that describes what is about to be trained."""
    roles, last = session.roles, session.rounds.total_steps
    model = roles.params(roles.trained, session.snapshot().weights)
    params = sum(count_weights(path, value) for path, value in model.items())
    trained = sum(value.size for value in session.state.params.values())
    trained *= max(1, len(session.policies))
    part = f"{trained / 1e6:.2f}M of " if trained < params else ""
    steps = f"steps {session.start + 1} to {last}"
    if session.start >= last:
        steps = f"all {last} steps are done"
    return (
        f"{part}{params / 1e6:.2f}M parameters on {session.bundle.mesh.size}"
        f" {jax.devices()[0].device_kind} device(s), {steps}"
    )
