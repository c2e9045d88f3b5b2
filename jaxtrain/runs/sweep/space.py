"""Search space of a sweep: its file, and the overrides of every trial."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from jaxtrain.config import load_config
from jaxtrain.config.base import Place, Problems, Section
from jaxtrain.config.limits import SEED, WORKERS
from jaxtrain.config.load import validate
from jaxtrain.errors import UserError

MAX_CHECKED = 256
"""Up to this many combinations, all are checked; of more, each value with the first others."""
MAX_TRIALS = 10_000
LONGEST_NAME = 80
OWN_KEYS = ("run.output_dir",)

Values = dict[str, Any]
"""{key of the config: value}."""
Params = dict[str, Any]
"""The same as the study keeps it: {axis: a number of its range, or a choice as JSON}."""


class Range(Section):
    """Numbers between two, both included; whole ones if both are."""

    low: int | float
    """The smallest."""
    high: int | float
    """The largest."""
    log: bool = False
    """Drawn evenly in the logarithm."""

    @model_validator(mode="after")
    def check_order(self):
        if not self.low < self.high:
            raise ValueError(f"low must be below high, found {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs numbers above 0, found low = {self.low}")
        return self


class SweepSection(Section):
    """Section `sweep`."""

    config: Place
    """The config of all runs: a file, or the name of one that comes with jaxtrain."""
    output_dir: Place
    """Folder of the sweep; a trial's run.output_dir is OUTPUT_DIR/NNN-what-it-tries."""
    metric: str = "eval/loss"
    """Name in metrics.jsonl by which trials are compared."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest is best."""
    value: Literal["last", "best"] = "last"
    """Which of a run's values of the metric counts."""
    method: Literal["grid", "random", "tpe"] = "grid"
    """grid: all combinations; random: as many as trials says; tpe: by what earlier ones gave
    (Bergstra et al. 2011, in Optuna's form)."""
    trials: int | None = Field(None, ge=1, le=MAX_TRIALS)
    """How many; of a grid by default all."""
    jobs: int = Field(1, ge=1, le=WORKERS)
    """Runs at once on this machine; its GPUs are shared out evenly among them."""
    seed: int = Field(0, ge=0, le=SEED)
    """Of what is drawn."""
    overrides: tuple[str, ...] = ()
    """section.key=value for every trial."""
    prune: Literal["none", "median"] = "none"
    """median: a trial whose best value so far is worse than the median of earlier ones at the same
    step is stopped."""
    prune_after_trials: int = Field(5, ge=0, le=MAX_TRIALS)
    """Trials that must be finished before any is pruned."""
    prune_after_step: int = Field(0, ge=0)
    """Step before which none is pruned."""
    stop_seconds: int = Field(600, ge=1, le=86_400)
    """How long a trial that is to stop may take to save, before it is killed."""


class SweepFile(Section):
    """The whole file."""

    sweep: SweepSection
    """What is run, and how much of it."""
    grid: dict[str, list[Any]] = {}
    """{key: values to try}."""
    ranges: dict[str, Range] = {}
    """{key: range}, for random and tpe."""
    together: list[dict[str, list[Any]]] = []
    """Keys whose values go in pairs: the first of each, the second of each, ..."""

    @model_validator(mode="after")
    def check_keys(self):
        problems = []
        keys = [*self.grid, *self.ranges, *itertools.chain(*self.together)]
        problems += [
            f"{key}: named twice" for key in sorted({k for k in keys if keys.count(k) > 1})
        ]
        problems += [
            f"{key}: the sweep names the folders itself" for key in OWN_KEYS if key in keys
        ]
        if not keys:
            problems.append("nothing is varied: add [grid], [ranges] or [[together]]")
        lists = [*self.grid.items(), *itertools.chain(*(group.items() for group in self.together))]
        problems += [f"{key}: an empty list of values" for key, values in lists if not values]
        for group in self.together:
            counts = {len(values) for values in group.values()}
            if len(counts) > 1 or len(group) < 2:
                sizes = ", ".join(f"{key} {len(values)}" for key, values in group.items())
                problems.append(
                    f"together: two keys or more with equally many values, found {sizes}"
                )
        if self.sweep.method == "grid" and self.ranges:
            problems.append('ranges: a grid tries lists; set sweep.method to "random" or "tpe"')
        if self.sweep.method != "grid" and self.sweep.trials is None:
            problems.append(f"sweep.trials: {self.sweep.method} needs a number of trials")
        if problems:
            raise Problems(problems)
        return self


def check_sweep(table: dict[str, Any], origin: str, **overrides: Any) -> SweepFile:
    """Validate the table of a sweep file."""
    overrides = {key: value for key, value in overrides.items() if value is not None}
    section = table.get("sweep", {})
    table = {**table, "sweep": {**section, **overrides} if isinstance(section, dict) else section}
    for name, stop in (("grid", None), ("ranges", "low")):
        if isinstance(table.get(name), dict):
            table[name] = flatten(table[name], stop)
    if isinstance(table.get("together"), list):
        groups = table["together"]
        table["together"] = [
            flatten(group) if isinstance(group, dict) else group for group in groups
        ]
    return validate(SweepFile, table, origin)


def flatten(table: Mapping[str, Any], stop: str | None = None, before: str = "") -> dict[str, Any]:
    """{"a.b": value} of nested tables; one with the key `stop` is a value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and (stop is None or stop not in value):
            flat |= flatten(value, stop, f"{before}{key}.")
        else:
            flat[before + key] = value
    return flat


def list_axes(file: SweepFile) -> dict[str, list[str] | Range]:
    """{axis: its choices as JSON, or its range}; keys that go together are one axis."""
    axes: dict[str, list[str] | Range] = {
        key: [json.dumps(value) for value in values] for key, values in file.grid.items()
    }
    for group in file.together:
        rows = zip(*group.values(), strict=True)
        axes["+".join(group)] = [json.dumps(list(row)) for row in rows]
    return {**axes, **file.ranges}


def list_grid(file: SweepFile) -> list[Params]:
    """Every combination, the last axis fastest, at most `trials` of them."""
    axes = list_axes(file)
    size = math.prod(len(choices) for choices in axes.values() if isinstance(choices, list))
    most = file.sweep.trials or size
    if most > MAX_TRIALS:
        raise UserError(f"a grid of {size} trials; at most {MAX_TRIALS}: set sweep.trials")
    lists = [choices for choices in axes.values() if isinstance(choices, list)]
    rows = itertools.islice(itertools.product(*lists), most)
    return [dict(zip(axes, row, strict=True)) for row in rows]


def read_values(params: Params) -> Values:
    """Return a trial's parameters as config values."""
    values: Values = {}
    for axis, value in params.items():
        parsed = json.loads(value) if isinstance(value, str) else value
        if "+" in axis:
            values |= dict(zip(axis.split("+"), parsed, strict=True))
        else:
            values[axis] = parsed
    return values


def write_overrides(values: Values) -> list[str]:
    """Return the overrides as words of a command line; JSON of numbers, texts and lists is valid
    TOML."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def name_trial(number: int, values: Values) -> str:
    """Return the name of a trial's folder, such as 003-learning_rate_0.0001-rank_8."""
    words = []
    for key, value in values.items():
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        words.append(f"{key.rsplit('.', 1)[-1]}_{shown}")
    text = re.sub(r"[^A-Za-z0-9_.+-]+", "_", "-".join(words)).strip("_.")
    return f"{number:03d}-{text}"[:LONGEST_NAME].rstrip("_.-")


def list_checked(file: SweepFile) -> list[Params]:
    """Combinations of choices and ends of ranges that stand for all trials."""
    ends = {
        axis: [candidates.low, candidates.high] if isinstance(candidates, Range) else candidates
        for axis, candidates in list_axes(file).items()
    }
    if math.prod(map(len, ends.values())) <= MAX_CHECKED:
        return [dict(zip(ends, row, strict=True)) for row in itertools.product(*ends.values())]
    first = {axis: choices[0] for axis, choices in ends.items()}
    return [{**first, axis: choice} for axis, choices in ends.items() for choice in choices]


def check_trials(file: SweepFile, params: Sequence[Params]) -> None:
    """UserError, before any run starts, for a config that is none with these values."""
    sweep = file.sweep
    for trial_params in params:
        values = read_values(trial_params)
        words = [*sweep.overrides, *write_overrides(values)]
        try:
            load_config(sweep.config, words)
        except UserError as error:
            shown = " ".join(write_overrides(values))
            raise UserError(f"no trial was started; with {shown}: {error}") from None
