"""What people are told of a run at its start, and what is written and told at its end."""

import os
import sys
from pathlib import Path

import jax

from jaxtrain.adapters.storage import count_weights
from jaxtrain.config import Config
from jaxtrain.core.evaluate import Evaluation
from jaxtrain.core.export import export_model, export_policies
from jaxtrain.core.session import Session
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import UserError
from jaxtrain.runs.plot import plot_runs
from jaxtrain.runs.report.command import write_report


def describe_start(session: Session) -> str:
    """One line on what is about to be trained."""
    roles, last = session.roles, session.rounds.total_steps
    model = roles.params(roles.trained, {**session.frozen, **session.state.params})
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


def finish(session: Session, evaluation: Evaluation) -> str:
    """Export, draw the curves, and tell people where everything lies."""
    config, folder, lines = session.config, session.folder, [evaluation.summary()]
    places = {
        "checkpoints": folder / "checkpoints",
        "metrics": folder / "metrics.jsonl",
    }
    if is_main_process() and config.log.plot and (folder / "metrics.jsonl").exists():
        try:
            plot_runs([folder], folder / "curves.png")
            places["curves"] = folder / "curves.png"
        except UserError as error:  # what was trained is worth more than its picture
            lines.append(f"no curves were drawn: {error}")
    if is_main_process() and config.log.report and (folder / "metrics.jsonl").exists():
        try:
            places["report"] = write_report(folder)
        except UserError as error:
            lines.append(f"no report was written: {error}")
    if config.run.export:
        if session.policies:
            snapshots = {name: session.snapshot(name) for name in session.policies}
            export_policies(session.task.export, snapshots, config, folder / "model")
            places |= {f"adapter of {name}": folder / "model" / name for name in snapshots}
        else:
            session.task.export(session.snapshot(), config, folder / "model")
            places["model" if session.bundle.adapter is None else "adapter"] = folder / "model"
        for name, one in session.auxiliary.items():
            export_model(one.snapshot(), config, folder / name)
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
    """The command that measures a draft: on held-out data where the run has some."""
    datasets = config.data.eval_datasets[:1]
    split = [f"dataset.split={one.split}" for one in datasets]
    asked = [f"--input {one.path}" for one in datasets] or ["--set gsm8k"]
    return " ".join(
        ["speculate", str(config.model.path), *split, f"--draft {folder / 'model'}", *asked]
    )
