"""The folder of a run's checkpoints: which are good, which are not, which are kept. No jax here.

40/                        a checkpoint; finished when it has a manifest.json
60.orbax-checkpoint-tmp/   being written, or left behind by a killed process
60.writing                 there from before the write until after the manifest
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
    """False: it was never finished, which is what a killed run leaves behind."""

    def describe(self) -> str:
        if self.damaged:
            return (
                f"checkpoint {self.step} is damaged ({self.reason}) and skipped; it was moved to"
                f" {self.step}{DAMAGED}"
            )
        return f"checkpoint {self.step} was never finished and is removed"


def find_steps(folder: Path) -> list[int]:
    """Steps below `folder` that have a manifest, oldest first."""
    return sorted(step for p in folder.glob("[0-9]*") if (step := read_number(p)) and is_sealed(p))


def read_number(path: Path) -> int | None:
    """The step that a checkpoint's folder, or what is written beside it, is named after."""
    number = path.name.split(".")[0]
    return int(number) if number.isascii() and number.isdigit() else None


def find_good_step(folder: str | Path) -> tuple[int, list[CheckpointProblem]]:
    """The newest step whose files agree with their manifest, or -1; and what is wrong with those
    after it. Only reads."""
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
    """What the checkpoint was saved with; nothing when its manifest is damaged."""
    try:
        return read_manifest(checkpoint)["metrics"]
    except (OSError, ValueError):
        return {}


def choose_kept(
    metrics: dict[int, dict[str, float]],
    keep: int,
    keep_every: int | None,
    best_metric: str | None,
    best_mode: Literal["min", "max"],
) -> set[int]:
    """Of the steps with their metrics: the newest, those on the period, and the best."""
    wanted = set(sorted(metrics)[-keep:])
    if keep_every:
        wanted |= {step for step in metrics if step % keep_every == 0}
    found = {step: values.get(best_metric or "") for step, values in metrics.items()}
    scores = {s: v for s, v in found.items() if v is not None and not math.isnan(v)}
    if scores:
        pick = min if best_mode == "min" else max
        wanted.add(pick(sorted(scores), key=scores.__getitem__))
    return wanted


def clear_folder(folder: Path, problems: list[CheckpointProblem], step: int) -> str:
    """Remove what was never finished and set damaged checkpoints aside; returns what to tell people
    (empty: nothing was wrong). The run goes on from `step`, or from the beginning at -1.
    """
    for leftover in [*folder.glob("*" + ORBAX_TMP + "*"), *folder.glob("*" + TRASH)]:
        shutil.rmtree(leftover, ignore_errors=True)
    for marker in folder.glob("*" + WRITING):
        marker.unlink()
    if any(problem.damaged for problem in problems):
        for old in folder.glob("*" + DAMAGED):  # keep the newest damaged ones only
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
    """The message for a folder without one usable checkpoint."""
    _, problems = find_good_step(folder)
    listed = "; ".join(f"{p.step}: {p.reason}" for p in problems)
    return (
        f"no checkpoint in {folder} can be used ({listed}). Put a good copy there, or set"
        " run.overwrite=true to start again"
    )


def remove_folder(folder: Path) -> None:
    """Delete so that a kill in the middle leaves no folder that looks like a checkpoint."""
    trash = folder.with_name(folder.name + TRASH)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)
