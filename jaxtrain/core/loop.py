"""Training: one loop for every method.

    source (reads, packs ahead) -> feed (onto the mesh) -> step (compiled) -> sinks, one step late

The loop thread alone launches device work. What happens around the steps are hooks (core/hooks.py);
which ones a run has, and in what order, stands in core/run.py.
"""

from jaxtrain import plugins
from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.run import OpenAnswers, Run, open_run
from jaxtrain.core.run_end import finish, report_stop
from jaxtrain.core.task import Task
from jaxtrain.distributed.processes import peers
from jaxtrain.errors import Interrupted


def train(
    config: Config, task: Task, command: list[str], open_answers: OpenAnswers | None = None
) -> int:
    """Train from the start or the newest checkpoint to the last step; returns the exit code.

    open_answers: opens what evaluates problem sets, for a config with eval.sets. Raises UserError
    for what a person can fix and RunStopped when training cannot go on.
    """
    with open_run(config, task, command, open_answers) as run:
        train_rounds(run)
        if run.session.signals.stop:
            report_stop(run)
        else:
            finish(run)
    return 0


def train_rounds(run: Run) -> None:
    """Train until the last step, a stop request or an error; the state is saved at the end of
    each, after an error the last good one."""
    session, hooks = run.session, run.hooks
    try:
        hooks.on_start()
        while session.step < session.rounds.total_steps and not session.ended and not stops(run):
            before = session.step
            if not train_round(run):
                break
            hooks.on_round_end(before)
        hooks.on_end()
    except plugins.FAILURES as error:  # any error: what was trained before it must not be lost
        hooks.on_error(error)
        raise


def train_round(run: Run) -> bool:
    """Train on what belongs to one version of the weights; it may come in parts.

    Returns False if the run is to stop. A round that is interrupted while it waits for a part ends
    there; what was not trained comes again after a resume.
    """
    session, rounds, hooks, reports = run.session, run.session.rounds, run.hooks, run.reports
    before, last, interrupted = session.step, False, False
    while not last and session.step < rounds.total_steps:
        if rounds.pauses:
            # The wait may be long: what was trained is reported before it, not after.
            reports.flush()
        try:
            round_ = rounds.next(session)
        except Interrupted:
            session.accept_stop()
            interrupted = True
            break
        if rounds.pauses:
            reports.restart_clock()
        # The step that is made of it. A round without a batch counts to the next step as well: a
        # run that is resumed at the last one repeats the round, with its lines.
        step = session.step + bool(round_.batches or session.step == before)
        hooks.on_round(step, round_)
        metrics = round_.metrics
        for batch in round_.batches[: rounds.total_steps - session.step]:
            train_step(run, batch, metrics)
            metrics = {}
        reports.write(step, metrics)
        last = round_.last
    if session.step > before:
        if rounds.pauses:
            # Read the last step before `finish` publishes: engines must never get the weights of
            # a step that was not finite.
            reports.flush()
        metrics = dict(session.task.after_round(session, before) or {})
        metrics |= rounds.finish(session, interrupted=interrupted)
        # Before the next read, which may raise: a rescue needs this cursor.
        hooks.on_round_trained()
        reports.write(session.step, metrics)
    return not interrupted


def train_step(run: Run, batch: Batch, metrics: dict[str, float]) -> None:
    """Make one optimizer step; `metrics` join its line of numbers."""
    session = run.session
    run.hooks.on_batch(batch)
    with session.phase("running a step (a new shape compiles first)"):
        output = session.update(batch)
        # Within the phase: hooks read the step before, which waits for the devices.
        run.hooks.on_step(batch, output, metrics)


def stops(run: Run) -> bool:
    """Return whether a signal, on this or another process, forbids the next step on all of them."""
    session, processes = run.session, peers()
    if processes is not None:
        # All processes must agree on the last step, or collectives of the others would hang.
        session.signals.stop = processes.stops_before(session.step + 1)
        session.signals.name = processes.stop_name
    return session.signals.stop
