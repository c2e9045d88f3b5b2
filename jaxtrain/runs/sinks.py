"""Destinations of metrics and events: metrics.jsonl always; the console, TensorBoard, Weights &
Biases and user classes (log.sinks) by config.

A sink that cannot start stops the run before anything is trained (UserError). A sink that fails
later is dropped with one warning; training goes on. Values are host floats, read from the devices
before write() is called. No jax here.
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
"""Shortest time between two tables of answers for Weights & Biases."""


class Sink(Protocol):
    """Destination of metrics. A sink implements only the methods it needs; all are optional. A sink
    of log.sinks is constructed with (the run's folder, the config as a dict), on process 0."""

    name: str
    """Name in messages; optional in sinks of log.sinks."""

    def start(self, total_steps: int, start_step: int) -> None:
        """Begin training from `start_step` (steps already done) to `total_steps`."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record the metrics of one step, or of an evaluation after it ("eval/loss")."""

    def sampled(self, lines: list[dict[str, Any]]) -> None:
        """Record answers of the model, in the format of samples.jsonl (samples.py)."""

    def close(self, summary: str | None) -> None:
        """Release files and connections; `summary` is for people."""


class Sinks:
    """Set of all sinks of a run. Processes other than 0 pass primary=False, and write nothing."""

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
        """Sinks that receive no calls before start()."""
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
        """Open every sink; raise UserError if one cannot start."""
        for sink in self._sinks:
            sink.start(total_steps, start_step)
        for sink in self._waiting:
            try:
                getattr(sink, "start", _nothing)(total_steps, start_step)
            except UserError:
                raise
            except plugins.FAILURES as error:  # foreign code may raise anything
                raise UserError(f"{_name(sink)} cannot start: {plugins.describe(error)}") from error
            self._sinks.append(sink)
        self._waiting = []

    def write(self, step: int, values: dict[str, float]) -> None:
        """Hand one line of numbers to every sink."""
        self._each("write", step, values)

    def sampled(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append answers to samples.jsonl and pass them to every sink."""
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
        """Write a message to the console and log.txt."""
        if self.console is not None:
            try:
                self.console.log(str(text))
            except Exception as error:
                self._drop(self.console, error)

    def show(self, text: str) -> None:
        """Show beside the bar what takes long; "": nothing does."""
        if self.console is not None:
            self.console.show(text)

    def summarize(self, text: str) -> None:
        """Set the text that the console shows at the very end."""
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
            self._summary = None  # it describes a success
            if self.console is not None:
                self.console.record(f"{type(error).__name__}: {error}")
        self.close()

    def _each(self, method: str, *args: Any) -> None:
        for sink in list(self._sinks):
            try:
                getattr(sink, method, _nothing)(*args)
            except plugins.FAILURES as error:  # a broken sink must not end the run
                self._drop(sink, error)

    def _drop(self, sink: Any, error: BaseException) -> None:
        with self._dropping:
            self._sinks = [remaining for remaining in self._sinks if remaining is not sink]
        warning = f"warning: {_name(sink)} failed and is switched off: {plugins.describe(error)}"
        if sink is self.console:
            self.console = None
        try:
            print(
                escape_control_chars(warning), flush=True
            ) if self.console is None else self.console.log(warning)
        except OSError:
            self.console = None  # nothing reads stdout any more: a closed pipe, a full disk


def find_sink(name: str) -> Any:
    """Return the class that an entry of log.sinks names; UserError where it leads nowhere."""
    return plugins.find("sinks", name, {}, key="log.sinks")


def open_sink(name: str, folder: Path, config: Config) -> Any:
    """Construct the sink that an entry of log.sinks names; raise UserError if that fails."""
    sink_class = find_sink(name)
    try:
        return sink_class(folder, config.saved())
    except UserError:
        raise
    except plugins.FAILURES as error:  # foreign code may raise anything
        raise UserError(
            f"log.sinks {name!r} cannot be made with (folder, config): {plugins.describe(error)}"
        ) from error


def _name(sink: Any) -> str:
    return getattr(sink, "name", type(sink).__name__)


def _nothing(*args: Any) -> None:
    """Do nothing, in place of a method that a sink does not have."""


class JsonLines:
    """Sink that writes one JSON object per line, flushed at once: {"step": 12, "time": ..., "loss":
    ...}."""

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
    """Sink for TensorBoard event files, through tensorboardX."""

    name = "TensorBoard"

    def __init__(self, folder: Path):
        self.folder = folder
        self._module = _import("tensorboardX", "log.tensorboard", "tensorboard")
        self._writer: Any = None

    def start(self, total_steps: int, start_step: int) -> None:
        # Steps after the restored checkpoint are trained again: hide their earlier events.
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
    """Sink for Weights & Biases. A resumed run continues under its id, stored in
    <output_dir>/wandb_id."""

    name = "Weights & Biases"

    def __init__(self, project: str, name: str | None, folder: Path, config: Config):
        self._module = _import("wandb", "log.wandb_project", "wandb")
        self._settings = {"project": project, "name": name, "dir": str(folder)}
        self._config, self._id_file = config.saved(), folder / "wandb_id"
        self._run: Any = None
        self._samples: dict[str, list[dict[str, Any]]] = {}
        """Answers until the metrics of their step are written, since steps may only rise."""
        self._last_table, self._last = -math.inf, 0
        if os.environ.get("WANDB_MODE", "online") == "online" and not self._has_key():
            raise UserError(
                "log.wandb_project is set but Weights & Biases knows no API key: run `wandb login`,"
                " set WANDB_API_KEY, set WANDB_MODE=offline, or leave log.wandb_project out"
            )

    def _read_id(self) -> str | None:
        """Return the stored run id; None if there is none or it is not valid."""
        try:
            run_id = read_text(self._id_file, 1024).strip()
        except (OSError, ValueError):
            return None
        return run_id if re.fullmatch(r"[\w.-]{1,128}", run_id, re.ASCII) else None

    def _has_key(self) -> bool:
        return bool(os.environ.get("WANDB_API_KEY") or self._module.api.api_key)

    def start(self, total_steps: int, start_step: int) -> None:
        run_id = self._read_id() if start_step else None
        try:
            self._run = self._module.init(
                **self._settings, config=self._config, id=run_id, resume="allow" if run_id else None
            )
        except Exception as error:  # whatever the service raises must reach the user
            raise UserError(
                f"Weights & Biases could not start: {error}. Set WANDB_MODE=offline, or leave"
                " log.wandb_project out"
            ) from error
        self._id_file.write_text(self._run.id)

    def write(self, step: int, values: dict[str, float]) -> None:
        if step < self._last:  # steps may only rise; a background evaluation ends later
            values, step = {**values, "eval/step": float(step)}, self._last
        self._last = step
        self._run.log({**values, **self._tables(step)}, step=step)

    def sampled(self, lines: list[dict[str, Any]]) -> None:
        newest: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            table_name = f"samples/{line['set']}" if "set" in line else "samples"
            newest.setdefault(table_name, []).append(line)
        self._samples |= newest

    def _tables(self, step: int) -> dict[str, Any]:
        """Return the newest answers, at most once a minute, because every table becomes a file."""
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
    """Import an optional package, or raise a UserError that names the config key and the pip
    command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{key} needs the package {module} ({error}): pip install 'jaxtrain[{extra}]', or leave"
            f" {key} out"
        ) from error
