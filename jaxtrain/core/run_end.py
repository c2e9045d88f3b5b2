"""The end of a run: export, curves, report, and a summary for people."""

import os
import sys
from pathlib import Path

from jaxtrain.config import Config
from jaxtrain.core.run import Run
from jaxtrain.core.session import Session
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError


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
        times = run.watchdog.describe_times()
        run.sinks.summarize("\n".join(filter(None, (times, run.compiled.describe(), text))))


def write_outputs(session: Session, summary: str) -> str:
    """Write the outputs of a finished run; returns `summary` and where they are."""
    config, folder, lines = session.config, session.folder, [summary]
    places = {
        "checkpoints": folder / "checkpoints",
        "metrics": folder / "metrics.jsonl",
    }
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
