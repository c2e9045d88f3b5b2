"""Where numbers and events go: metrics.jsonl always; the console, TensorBoard, Weights & Biases and
classes from outside (log.sinks) by config.

A sink that cannot start stops the run before anything is trained (UserError). A sink that fails
later is dropped with one warning; training goes on. Values are host floats: who calls write() has
read them already. No jax here.
"""

import importlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.runs.console import Console
from jaxtrain.runs.samples import SAMPLES, TABLE_COLUMNS, append_samples, table_rows
from jaxtrain.safe_io import read_text
from jaxtrain.text_safety import escape_control_chars

TABLE_SECONDS = 60.0
"""Least time between two tables of answers for Weights & Biases."""


class Sink(Protocol):
    """One destination of numbers: it has those of these methods that it needs. One from outside is
    made with (the run's folder, the config as a dict), on process 0."""

    name: str
    """What messages call it. One from outside needs none."""

    def start(self, total_steps: int, start_step: int) -> None:
        """Training goes from `start_step` (steps already done) to `total_steps`."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """The numbers of one step, or of an evaluation after it ("eval/loss")."""

    def sampled(self, lines: list[dict[str, Any]]) -> None:
        """Answers of the model, as they stand in samples.jsonl: see samples.py."""

    def close(self, summary: str | None) -> None:
        """Let go of files and connections; `summary` is for people."""


class Sinks:
    """All sinks of a run. Processes other than the first pass primary=False: nothing is written."""

    def __init__(
        self,
        config: Config,
        folder: str | Path,
        *,
        primary: bool = True,
        extra: Iterable[Sink] = (),
    ):
        self.folder = folder = Path(folder)
        options = config.log
        self.console = Console(options.console, folder / "log.txt") if primary else None
        self._sinks: list[Any] = []
        self._waiting: list[Any] = [*extra]
        """Sinks that hear of nothing before they were started."""
        self._dropping = threading.Lock()
        self._missed_samples = False
        self._summary: str | None = None
        if primary:
            self._sinks += [JsonLines(folder / "metrics.jsonl"), self.console]
            if options.tensorboard:
                self._sinks.append(TensorBoard(folder / "tensorboard"))
            if options.wandb_project:
                self._sinks.append(WandB(options.wandb_project, options.wandb_name, folder, config))
            self._waiting += [open_sink(name, folder, config) for name in options.sinks]

    def start(self, total_steps: int, start_step: int = 0) -> None:
        """Open every sink; an error here is the user's to see."""
        for sink in self._sinks:
            sink.start(total_steps, start_step)
        for sink in self._waiting:
            try:
                getattr(sink, "start", _nothing)(total_steps, start_step)
            except UserError:
                raise
            except Exception as error:  # the border: whatever foreign code may raise
                raise UserError(f"{_name(sink)} cannot start: {plugins.describe(error)}") from error
            self._sinks.append(sink)
        self._waiting = []

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand one line of numbers to every sink."""
        self._each("write", step, values)

    def sampled(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append answers to samples.jsonl, and tell of them."""
        try:
            lines = append_samples(self.folder, step, samples)
        except OSError as error:  # a full disk costs the samples, not the run
            if not self._missed_samples:
                self.log(f"warning: {SAMPLES} is not written: {error.strerror or error}")
            self._missed_samples = True
            return
        if lines:
            self._each("sampled", lines)

    def log(self, text: object) -> None:
        """A message for people: console and log.txt."""
        if self.console is not None:
            try:
                self.console.log(str(text))
            except Exception as error:
                self._drop(self.console, error)

    def summarize(self, text: str) -> None:
        """What the console shows at the very end."""
        self._summary = text

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        self._each("close", self._summary)
        self._sinks = []

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        if error is not None:
            self._summary = None  # it promised what the error has just undone
            if self.console is not None:
                self.console.record(f"{type(error).__name__}: {error}")
        self.close()

    def _each(self, method: str, *args: Any) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method, _nothing)(*args)
            except Exception as error:  # the border: a broken sink must not cost the run
                self._drop(sink, error)

    def _drop(self, sink: Any, error: Exception) -> None:
        with self._dropping:
            self._sinks = [other for other in self._sinks if other is not sink]
        warning = f"warning: {_name(sink)} failed and is switched off: {plugins.describe(error)}"
        if sink is self.console:
            self.console = None
        try:
            print(
                escape_control_chars(warning), flush=True
            ) if self.console is None else self.console.log(warning)
        except OSError:
            self.console = None  # nobody is listening any more: a closed pipe, a full disk


def open_sink(name: str, folder: Path, config: Config) -> Any:
    """The sink that an entry of log.sinks names; UserError where it cannot be found or made."""
    made = plugins.find("sinks", name, {}, key="log.sinks")
    try:
        return made(folder, config.saved())
    except UserError:
        raise
    except Exception as error:  # the border: whatever foreign code may raise
        raise UserError(
            f"log.sinks {name!r} cannot be made with (folder, config): {plugins.describe(error)}"
        ) from error


def _name(sink: Any) -> str:
    return getattr(sink, "name", type(sink).__name__)


def _nothing(*args: Any) -> None:
    """Stands for a method that a sink does not have."""


class JsonLines:
    """One JSON object a line, flushed at once: {"step": 12, "time": ..., "loss": ...}."""

    def __init__(self, path: Path):
        self.name, self.path = path.name, path

    def start(self, total_steps: int, start_step: int) -> None:
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from error

    def write(self, step: int, values: dict[str, float]) -> None:
        line = {"step": step, "time": round(time.time(), 3)}
        # JSON has no NaN and no infinity; null is what every reader takes.
        line |= {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self, summary: str | None) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class TensorBoard:
    """Event files, through tensorboardX."""

    name = "TensorBoard"

    def __init__(self, folder: Path):
        self.folder = folder
        self._module = _import("tensorboardX", "log.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, total_steps: int, start_step: int) -> None:
        # Steps after the restored checkpoint are trained again: hide what was written for them.
        purge = start_step + 1 if start_step else None
        try:
            self._writer = self._module.SummaryWriter(str(self.folder), purge_step=purge)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}") from error

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, summary: str | None) -> None:
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Weights & Biases. A resumed run goes on under its own id, kept in <output_dir>/wandb_id."""

    name = "Weights & Biases"

    def __init__(self, project: str, name: str | None, folder: Path, config: Config):
        self._module = _import("wandb", "log.wandb_project", "wandb")
        self._settings = {"project": project, "name": name, "dir": str(folder)}
        self._config, self._id_file = config.saved(), folder / "wandb_id"
        self._run: Any = None
        self._samples: dict[str, list[dict[str, Any]]] = {}
        """Answers that wait for the numbers of their step: steps may only rise."""
        self._last_table, self._last = -math.inf, 0
        if os.environ.get("WANDB_MODE", "online") == "online" and not self._has_key():
            raise UserError(
                "log.wandb_project is set but Weights & Biases knows no API key: run `wandb login`,"
                " set WANDB_API_KEY, set WANDB_MODE=offline, or leave log.wandb_project out"
            )

    def _read_id(self) -> str | None:
        """The run's id there; None where none was kept, or what is kept is no id."""
        try:
            found = read_text(self._id_file, 1024).strip()
        except (OSError, ValueError):
            return None
        return found if re.fullmatch(r"[\w.-]{1,128}", found, re.ASCII) else None

    def _has_key(self) -> bool:
        return bool(os.environ.get("WANDB_API_KEY") or self._module.api.api_key)

    def start(self, total_steps: int, start_step: int) -> None:
        known = self._read_id() if start_step else None
        try:
            self._run = self._module.init(
                **self._settings, config=self._config, id=known, resume="allow" if known else None
            )
        except Exception as error:  # the border: whatever the service says, the user must hear it
            raise UserError(
                f"Weights & Biases could not start: {error}. Set WANDB_MODE=offline, or leave"
                " log.wandb_project out"
            ) from error
        self._id_file.write_text(self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        if step < self._last:  # steps may only rise: an evaluation beside training comes later
            values, step = {**values, "eval/step": float(step)}, self._last
        self._last = step
        self._run.log({**values, **self._tables(step)}, step=step)

    def sampled(self, lines: list[dict[str, Any]]) -> None:
        newest: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            place = f"samples/{line['set']}" if "set" in line else "samples"
            newest.setdefault(place, []).append(line)
        self._samples |= newest

    def _tables(self, step: int) -> dict[str, Any]:
        """The newest answers, once a minute at most: every table is a file of its own."""
        if time.monotonic() - self._last_table < TABLE_SECONDS:
            return {}
        due = [name for name, lines in self._samples.items() if lines[0]["step"] <= step]
        if due:
            self._last_table = time.monotonic()
        return {
            name: self._module.Table(list(TABLE_COLUMNS), table_rows(self._samples.pop(name)))
            for name in due
        }

    def close(self, summary: str | None) -> None:
        if self._run is not None:
            self._last_table = -math.inf
            if self._samples:
                last = max(lines[0]["step"] for lines in self._samples.values())
                self._run.log(self._tables(last), step=last)
            self._run.finish()


def _import(module: str, key: str, extra: str) -> Any:
    """An optional package, or a UserError that names the config key and the pip command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{key} needs the package {module} ({error}): pip install 'jaxtrain[{extra}]', or leave"
            f" {key} out"
        ) from error
