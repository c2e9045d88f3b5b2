"""Training: one loop for every method.

    source (reads, packs ahead) -> feed (onto the mesh) -> step (compiled) -> sinks, one step late

The loop thread alone launches device work. What happens around the steps are hooks (core/hooks.py);
which ones a run has, and in what order, stands in core/run.py.
"""

import os
import sys
from pathlib import Path

from jaxtrain import plugins
from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.run import OpenAnswers, Run, open_run
from jaxtrain.core.session import Session
from jaxtrain.core.task import Task
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.distributed.processes import peers
from jaxtrain.errors import Interrupted, UserError, is_out_of_memory


def train(
    config: Config, task: Task, command: list[str], open_answers: OpenAnswers | None = None
) -> int:
    """Train from the start or the newest checkpoint to the last step; returns the exit code.

    open_answers: opens what evaluates problem sets, for a config with eval.sets. Raises UserError
    for what a person can fix and RunStopped when training cannot go on.
    """
    with open_run(config, task, command, open_answers) as run:
        train_rounds(run)
        if run.session.stops_everywhere():
            run.session.accept_stop()
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
        if is_out_of_memory(error):
            from jaxtrain.runs.profile import save_memory

            # Before the rescue below, which may change what holds the memory.
            run.sinks.log(save_memory(session.folder))
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
    with session.phase("running a step"):
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


def report_stop(run: Run) -> None:
    """Report a run that ends by a stop request before its last step."""
    session, name = run.session, run.session.signals.name
    run.watchdog.stopped(name)
    run.observers.stopped(name)
    saved = "saved" if session.step > session.start else "nothing new to save after"
    run.sinks.summarize(
        f"{name}: {saved} step {session.step} of {session.rounds.total_steps} in"
        f" {session.folder}; the same command goes on from there"
    )


def finish(run: Run) -> None:
    """Export the model, draw the curves, and summarize where everything is."""
    with run.watchdog.phase("exporting the model"):
        text = write_outputs(run.session, run.evaluation.summarize())
        times = run.watchdog.progress.describe_times()
        run.sinks.summarize("\n".join(filter(None, (times, run.compiled.describe(), text))))


def write_outputs(session: Session, summary: str) -> str:
    """Write the outputs of a finished run; returns `summary` and where they are."""
    config, folder, lines = session.config, session.folder, [summary]
    places = {"checkpoints": folder / "checkpoints", "metrics": folder / "metrics.jsonl"}
    if is_main_process() and config.log.plot and (folder / "metrics.jsonl").exists():
        from jaxtrain.runs.plot import plot_runs

        try:
            plot_runs([folder], folder / "curves.png")
            places["curves"] = folder / "curves.png"
        except UserError as error:  # what was trained is worth more than its picture
            lines.append(f"no curves were drawn: {error}")
    if is_main_process() and config.log.report and (folder / "metrics.jsonl").exists():
        from jaxtrain.runs.report.command import write_report

        try:
            places["report"] = write_report(folder)
        except UserError as error:
            lines.append(f"no report was written: {error}")
    if config.run.export:
        from jaxtrain.core.export import export_model, export_policies

        if session.policies:
            snapshots = {name: session.snapshot(name) for name in session.policies}
            export_policies(session.task.export, snapshots, config, folder / "model")
            places |= {f"adapter of {name}": folder / "model" / name for name in snapshots}
        else:
            session.task.export(session.snapshot(), config, folder / "model")
            places["model" if session.bundle.adapter is None else "adapter"] = folder / "model"
        for name, auxiliary in session.auxiliary.items():
            export_model(auxiliary.snapshot(), config, folder / name)
            places[name] = folder / name
    lines += [f"{name:<12} {path}" for name, path in places.items()]
    program = f"{os.path.relpath(sys.executable)} -m jaxtrain.main"
    agent = " --env" if config.env.kind != "single_turn" else ""
    drafts = session.bundle.architecture.guesses
    writes = session.bundle.architecture.score is None
    trained = folder / "model" / session.policies[0] if session.policies else folder
    lines += [
        "try next",
        f"  {program} {suggest_speculate(config, folder)}" if drafts and config.model.path else "",
        f"  {program} generate {folder if agent else trained}{agent}"
        if writes and not drafts
        else "",
        f"  {program} score {folder} DATA.jsonl --output scores.jsonl" if not writes else "",
        f"  {program} merge {trained}" if session.bundle.adapter and writes else "",
        f"  {program} watch {folder} OTHER_RUN",
        f"  {program} --help",
    ]
    return "\n".join(line for line in lines if line)


def suggest_speculate(config: Config, folder: Path) -> str:
    """Return the command that measures a draft, on held-out data if the run has any."""
    datasets = config.data.eval_datasets[:1]
    split = [f"dataset.split={dataset.split}" for dataset in datasets]
    inputs = [f"--input {dataset.path}" for dataset in datasets] or ["--set gsm8k"]
    return " ".join(
        ["speculate", str(config.model.path), *split, f"--draft {folder / 'model'}", *inputs]
    )
