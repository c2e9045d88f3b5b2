"""Optuna's study of a sweep: a journal on disk that several processes, and machines, share."""

import fcntl
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.runs.sweep.space import Params, Range, SweepFile, list_axes, list_grid
from jaxtrain.safe_io import parse_json, read_text

JOURNAL, RECORD, LOCK, LOCKS = "study.journal", "sweep.json", ".lock", ".locks"
MAX_BYTES = 2**24
"""Largest size of the record."""
AGAIN = "again"
"""Attribute of a trial that repeats a failed one."""
KEPT = ("config", "metric", "mode", "value", "method", "seed", "overrides")
"""Keys that must not change between starts of a sweep."""


def load_optuna() -> Any:
    """Import Optuna; raise UserError that says what to install."""
    try:
        import optuna
    except ImportError:
        raise UserError("a sweep needs Optuna: pip install 'jaxtrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class RequestedTrial(NamedTuple):
    """A trial that is this process's to run."""

    number: int
    params: Params
    lock: Any
    """Held as long as it is."""
    resumed: bool


class Study:
    """Which values are tried, and what came of them."""

    def __init__(self, file: SweepFile):
        """Opens the study in sweep.output_dir, or makes it; UserError where the folder holds
        something else, or another sweep."""
        self.file, self.folder = file, Path(file.sweep.output_dir)
        self.optuna = load_optuna()
        axes = list_axes(file)
        self.distributions = {
            axis: self._distribution(candidates) for axis, candidates in axes.items()
        }
        self.left: set[int] = set()
        """Trials that were given back unfinished: not again in this process."""
        claim(self.folder, describe_sweep(file))
        backend = self.optuna.storages.journal.JournalFileBackend(str(self.folder / JOURNAL))
        sweep = file.sweep
        pruner = self.optuna.pruners.NopPruner()
        if sweep.prune == "median":
            pruner = self.optuna.pruners.MedianPruner(
                sweep.prune_after_trials, sweep.prune_after_step
            )
        with self.locked():
            try:
                self.study = self.optuna.create_study(
                    storage=self.optuna.storages.JournalStorage(backend),
                    study_name="sweep",
                    direction="minimize" if sweep.mode == "min" else "maximize",
                    sampler=self._sampler(),
                    pruner=pruner,
                    load_if_exists=True,
                )
            except Exception as error:  # Optuna replays its journal without checking it
                raise UserError(
                    f"{self.folder / JOURNAL} is damaged ({type(error).__name__}:"
                    f" {str(error)[:200]}); restore it, or name a new sweep.output_dir"
                ) from None
            trials = self.trials()
            planned = sum(AGAIN not in candidates.user_attrs for candidates in trials)
            for params in self.list_known()[planned:]:
                self.study.enqueue_trial(params)

    def _distribution(self, axis: list[str] | Range) -> Any:
        distributions = self.optuna.distributions
        if not isinstance(axis, Range):
            return distributions.CategoricalDistribution(axis)
        integral = isinstance(axis.low, int) and isinstance(axis.high, int)
        kind = distributions.IntDistribution if integral else distributions.FloatDistribution
        return kind(axis.low, axis.high, log=axis.log)

    def _sampler(self) -> Any:
        samplers, sweep = self.optuna.samplers, self.file.sweep
        if sweep.method == "tpe":
            # Of other processes that share the study, each draws otherwise.
            seed = sweep.seed + sum(1 for _ in (self.folder / LOCKS).iterdir())
            return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.RandomSampler(seed=sweep.seed)

    def list_known(self) -> list[Params]:
        """The trials that hang on no result, in their order."""
        sweep = self.file.sweep
        if sweep.method == "grid":
            return list_grid(self.file)
        return draw_random(self.file) if sweep.method == "random" else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that all processes sharing the folder respect."""
        with open(self.folder / LOCK, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def trials(self) -> list[Any]:
        """Return all trials as Optuna's FrozenTrials."""
        return self.study.get_trials(deepcopy=False)

    def ask(self) -> RequestedTrial | None:
        """Return the next trial: an interrupted one that no process runs, or a new one; None if
        there are no more."""
        states = self.optuna.trial.TrialState
        with self.locked():
            trials = self.trials()
            for earlier in trials:
                if earlier.state == states.RUNNING and earlier.number not in self.left:
                    if lock := self._take(earlier.number):
                        return RequestedTrial(earlier.number, dict(earlier.params), lock, True)
            waiting = any(earlier.state == states.WAITING for earlier in trials)
            needs_trials = self.file.sweep.method == "tpe" and len(trials) < (
                self.file.sweep.trials or 0
            )
            if not (waiting or needs_trials):
                return None
            trial = self.study.ask(self.distributions)
            lock = self._take(trial.number)
            assert lock is not None, "a new trial is nobody else's"
            return RequestedTrial(trial.number, dict(trial.params), lock, False)

    def _take(self, number: int) -> Any:
        """The lock of a trial, or None where another process (or this one) has it."""
        file = open(self.folder / LOCKS / f"{number:03d}", "w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    def report(self, number: int, points: list[tuple[int, float]]) -> bool:
        """(step, value) of a metric that came; whether the trial is to end."""
        reported = next(candidate for candidate in self.trials() if candidate.number == number)
        trial = self.optuna.trial.Trial(self.study, reported._trial_id)
        for step, value in points:
            if step not in reported.intermediate_values:  # or before it was interrupted
                trial.report(value, step)
        return trial.should_prune()

    def record(self, number: int, value: float | None, state: str) -> None:
        """Record the outcome of a trial: state "complete" with a value, "pruned" or "fail"."""
        with self.locked():
            trial_state = self.optuna.trial.TrialState[state.upper()]
            self.study.tell(number, value if state == "complete" else None, state=trial_state)

    def retry(self) -> int:
        """Put the failed trials at the end of the queue, once each; how many."""
        states = self.optuna.trial.TrialState
        with self.locked():
            trials = self.trials()
            repeated = {trial.user_attrs.get(AGAIN) for trial in trials}
            failed = [trial for trial in trials if trial.state == states.FAIL]
            failed = [trial for trial in failed if trial.number not in repeated]
            for trial in failed:
                self.study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
        return len(failed)


def draw_random(file: SweepFile) -> list[Params]:
    """The trials of method random: a function of the seed alone, in whatever process."""
    draw, axes, drawn = random.Random(file.sweep.seed), list_axes(file), []
    for _ in range(file.sweep.trials or 0):
        drawn.append({axis: draw_one(draw, candidates) for axis, candidates in axes.items()})
    return drawn


def draw_one(draw: random.Random, axis: list[str] | Range) -> Any:
    """A choice, or a number of a range."""
    if not isinstance(axis, Range):
        return draw.choice(axis)
    integral = isinstance(axis.low, int) and isinstance(axis.high, int)
    if not axis.log:
        ends = (axis.low, axis.high)
        return draw.randint(*map(int, ends)) if integral else draw.uniform(*ends)
    value = math.exp(draw.uniform(math.log(axis.low), math.log(axis.high)))
    value = min(max(value, axis.low), axis.high)
    return round(value) if integral else value


def describe_sweep(file: SweepFile) -> dict[str, Any]:
    """Return the properties of a sweep that must not change between its processes."""
    sweep = file.sweep.model_dump(mode="json")
    axes = {
        axis: candidates.model_dump() if isinstance(candidates, Range) else candidates
        for axis, candidates in list_axes(file).items()
    }
    return {"made_by": "jaxtrain", **{key: sweep[key] for key in KEPT}, "axes": axes}


def claim(folder: Path, record: dict[str, Any]) -> None:
    """Make the sweep's folder, or go on in it; UserError where it is something else's."""
    path = folder / RECORD
    try:
        if not path.exists():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UserError(
                    f"sweep.output_dir {str(folder)!r} is not empty and holds no {RECORD}; name a"
                    " new folder"
                )
            (folder / LOCKS).mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record, indent=1) + "\n")
        owner = parse_json(read_text(path, MAX_BYTES))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"sweep.output_dir {folder}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path} is damaged; name a new sweep.output_dir") from None
    changed = [
        key for key in record if not isinstance(owner, dict) or owner.get(key) != record[key]
    ]
    if changed:
        raise UserError(
            f"{path} is of a sweep with other {', '.join(changed)}; name a new"
            " sweep.output_dir (only trials, jobs and pruning may change)"
        )
