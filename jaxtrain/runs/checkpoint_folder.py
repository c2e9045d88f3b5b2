"""Folder of a run's checkpoints: which are good, which are damaged, which are retained. No jax
here.

40/                        a checkpoint; finished when it has a manifest.json
60.orbax-checkpoint-tmp/   being written, or left behind by a killed process
60.writing                 exists from before the write until after the manifest
20.damaged/                set aside: its files no longer agreed with its manifest
20.trash/                  being deleted
"""

import math
import shutil
from pathlib import Path
from typing import Literal, NamedTuple

from jaxtrain.runs.manifest import find_damage, is_sealed, read_manifest

ORBAX_TMP = ".orbax-checkpoint-tmp"
WRITING, DAMAGED, TRASH = ".writing", ".damaged", ".trash"


class CheckpointProblem(NamedTuple):
    """Why a checkpoint cannot be used."""

    step: int
    reason: str
    damaged: bool
    """False: it was never finished, as when a run is killed."""

    def describe(self) -> str:
        if self.damaged:
            return (
                f"checkpoint {self.step} is damaged ({self.reason}) and skipped; it was moved to"
                f" {self.step}{DAMAGED}"
            )
        return f"checkpoint {self.step} was never finished and is removed"


def find_steps(folder: Path) -> list[int]:
    """Return the steps below `folder` that have a manifest, oldest first."""
    return sorted(step for p in folder.glob("[0-9]*") if (step := read_number(p)) and is_sealed(p))


def read_number(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder or of a marker next to it."""
    number = path.name.split(".")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def find_good_step(folder: str | Path) -> tuple[int, list[CheckpointProblem]]:
    """Return the newest step whose files agree with their manifest, or -1, and the problems of the
    steps after it. Only reads."""
    folder, problems = Path(folder), []
    started = [*folder.glob(f"[0-9]*{ORBAX_TMP}*"), *folder.glob(f"[0-9]*{WRITING}")]
    started = {step for path in started if (step := read_number(path)) is not None}
    plain = [path for path in folder.glob("[0-9]*") if "." not in path.name]
    finished = {step for path in plain if (step := read_number(path)) is not None}
    for step in sorted(started | finished, reverse=True):
        path = folder / str(step)
        if step in started and not is_sealed(path):
            problems.append(CheckpointProblem(step, "it was never finished", damaged=False))
        elif damage := find_damage(path):
            problems.append(CheckpointProblem(step, damage, damaged=True))
        else:
            return step, problems
    return -1, problems


def read_metrics(checkpoint: Path) -> dict[str, float]:
    """Return the metrics saved with the checkpoint; empty if its manifest is damaged."""
    try:
        return read_manifest(checkpoint)["metrics"]
    except (OSError, ValueError):
        return {}


def choose_retained(
    metrics: dict[int, dict[str, float]],
    keep: int,
    keep_every: int | None,
    best_metric: str | None,
    best_mode: Literal["min", "max"],
) -> set[int]:
    """Return the steps to retain: the newest ones, multiples of `keep_every`, and the best one."""
    retained = set(sorted(metrics)[-keep:])
    if keep_every:
        retained |= {step for step in metrics if step % keep_every == 0}
    metric_values = {step: values.get(best_metric or "") for step, values in metrics.items()}
    scores = {s: v for s, v in metric_values.items() if v is not None and not math.isnan(v)}
    if scores:
        pick = min if best_mode == "min" else max
        retained.add(pick(sorted(scores), key=scores.__getitem__))
    return retained


def clear_folder(folder: Path, problems: list[CheckpointProblem], step: int) -> str:
    """Remove unfinished checkpoints and set damaged ones aside; return a report for the user (empty
    if nothing was wrong). The run continues from `step`, or from the beginning if it is -1."""
    for leftover in [*folder.glob("*" + ORBAX_TMP + "*"), *folder.glob("*" + TRASH)]:
        shutil.rmtree(leftover, ignore_errors=True)
    for marker in folder.glob("*" + WRITING):
        marker.unlink()
    if any(problem.damaged for problem in problems):
        for old in folder.glob("*" + DAMAGED):  # retain the newest damaged ones only
            shutil.rmtree(old, ignore_errors=True)
    for problem in problems:
        path = folder / str(problem.step)
        if problem.damaged:
            path.rename(path.with_name(path.name + DAMAGED))
        elif path.is_dir():
            remove_folder(path)
    if not problems:
        return ""
    then = f"going on from step {step}" if step >= 0 else "starting from the beginning"
    return "; ".join(problem.describe() for problem in problems) + f"; {then}"


def describe_all_damaged(folder: Path) -> str:
    """Return the message for a folder without a usable checkpoint."""
    _, problems = find_good_step(folder)
    listed = "; ".join(f"{p.step}: {p.reason}" for p in problems)
    return (
        f"no checkpoint in {folder} can be used ({listed}). Put a good copy there, or set"
        " run.overwrite=true to start again"
    )


def remove_folder(folder: Path) -> None:
    """Delete such that a kill in between leaves no folder that looks like a checkpoint."""
    trash = folder.with_name(folder.name + TRASH)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
