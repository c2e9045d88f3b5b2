"""Data of a run's folder, updated incrementally as the run writes.

Everything here was written by others and may be damaged, hostile or half there: what cannot be used
is left out, and no text is shown before `escape_control_chars` had it.
"""

import os
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.runs.dashboard.tail import Tail
from jaxtrain.runs.plot import is_number
from jaxtrain.runs.records import flatten, read_object
from jaxtrain.safe_io import parse_json, read_bytes
from jaxtrain.text_safety import escape_control_chars

KEPT_SAMPLES, KEPT_LOG, KEPT_HARDWARE = 2000, 5000, 6000
"""Newest lines that are kept of each file."""
MAX_BYTES = 2**24
"""Of a small file: config, heartbeat, servers."""


class Series:
    """Values of one metric and the rows (lines of metrics.jsonl) that have it."""

    def __init__(self):
        self.rows, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.values)


class WatchedRun:
    """Contents of one run's folder; `read` adds what is new."""

    def __init__(self, path: Path):
        self.path = path
        self.name = escape_control_chars(path.name or str(path))
        self.config: dict[str, Any] = {}
        self.flat: dict[str, Any] = {}
        """The config as {"task.kind": ...}."""
        self.attempts: list[dict[str, Any]] = []
        self.beat: dict[str, Any] = {}
        self.beat_seen = 0.0
        """Unix time at which heartbeat.json was written, by whichever clock is later."""
        self.servers: list[dict[str, Any]] = []
        self.checkpoints: list[int] = []
        """Steps of the checkpoints on the disk."""
        self.version = 0
        """Incremented with every change, so that an unchanged run is not drawn again."""
        self._tails = {name: Tail(path / name) for name in TAILED}
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._hardware: dict[str, Tail] = {}
        self.hardware: dict[str, deque[dict[str, Any]]] = {}
        """Newest lines by host."""
        self._clear_metrics()
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self.log: deque[str] = deque(maxlen=KEPT_LOG)
        self.samples_seen = self.log_lines = self.log_starts = 0
        """Samples and lines of the log read so far; times that the log began anew."""

    def read(self) -> bool:
        """Read on; whether anything is new."""
        before = self.version
        for name in ("config.json", "heartbeat.json", "servers.json"):
            self._read_small(name)
        for name, tail in self._tails.items():
            restarted = tail.restarted
            lines = tail.read()
            if tail.restarted != restarted:
                self._clear(name)
                self.version += 1
            if lines:
                getattr(self, TAILED[name])(lines)
                self.version += 1
        self._read_hardware()
        self._read_checkpoints()
        return self.version != before

    @property
    def behind(self) -> bool:
        """True if the last reading left unread data."""
        return any(tail.behind for tail in self._tails.values())

    def curve(self, name: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """A metric's (x, values), float64 [points]; x: "step", "time" (seconds of the run) or
        "tokens" (trained so far)."""
        series = self.metrics.get(name)
        if series is None:
            return np.zeros(0), np.zeros(0)
        rows = np.array(series.rows, dtype=np.int64)
        return np.array(self.along(x))[rows], np.array(series.values)

    def along(self, x: str) -> array:
        """Return the position of each line of metrics.jsonl on an x axis: "step", "time" or
        "tokens"."""
        return {"step": self.steps, "time": self.times, "tokens": self.tokens}[x]

    def points(self, name: str) -> tuple[int, int]:
        """(times that metrics.jsonl began anew, points of a metric): what its curve hangs on."""
        return self._tails["metrics.jsonl"].restarted, len(self.metrics.get(name, ()))

    def last(self, name: str) -> float | None:
        """The newest value of a metric."""
        series = self.metrics.get(name)
        return series.values[-1] if series else None

    def key(self, name: str, default: Any = None) -> Any:
        """The value of a config key, "task.kind"."""
        return self.flat.get(name, default)

    def keep_hardware(self, host: str, line: dict[str, Any]) -> None:
        """Add a line about a host that another process measured."""
        self.hardware.setdefault(host, deque(maxlen=KEPT_HARDWARE)).append(line)
        self.version += 1

    def _clear(self, name: str) -> None:
        if name == "metrics.jsonl":
            self._clear_metrics()
        elif name == "attempts.jsonl":
            self.attempts = []
        elif name == "samples.jsonl":
            self.samples.clear()
        else:
            self.log.clear()
            self.log_lines, self.log_starts = 0, self.log_starts + 1

    def _clear_metrics(self) -> None:
        self.metrics: dict[str, Series] = {}
        self.steps, self.times, self.tokens = array("d"), array("d"), array("d")
        self.clock = array("d")
        """Unix time of each line; `times` leaves out what passed between two attempts."""

    def _take_metrics(self, lines: list[bytes]) -> None:
        for raw in lines:
            line = read_object(raw)
            step = (line or {}).get("step")
            if line is None or isinstance(step, bool) or not isinstance(step, int):
                continue
            if abs(step) >= 2**53:
                continue
            self._take_place(step, line)
            row = len(self.steps) - 1
            for name, value in line.items():
                if name in ("step", "time") or not is_number(value):
                    continue
                series = self.metrics.get(name)
                if series is None:
                    series = self.metrics[name] = Series()
                series.rows.append(row)
                series.values.append(float(value))

    def _take_place(self, step: int, line: dict[str, Any]) -> None:
        """Append the position of a line on each x axis."""
        timestamp = line.get("time")
        timestamp = (
            float(timestamp) if is_number(timestamp) else (self.clock[-1] if self.clock else 0.0)
        )
        passed = timestamp - self.clock[-1] if self.clock else 0.0
        seconds = line.get("step_seconds")
        if passed > 3600 or passed < 0:  # the run stood still between two attempts
            passed = float(seconds) if is_number(seconds) else 0.0
        new = step - self.steps[-1] if self.steps else 1
        tokens = line.get("tokens")
        grown = float(tokens) * max(new, 1) if is_number(tokens) else 0.0
        self.times.append((self.times[-1] if self.times else 0.0) + passed)
        self.tokens.append((self.tokens[-1] if self.tokens else 0.0) + grown)
        self.steps.append(step)
        self.clock.append(timestamp)

    def _take_samples(self, lines: list[bytes]) -> None:
        self.samples_seen += len(lines)
        self.samples.extend(sample for raw in lines if (sample := read_object(raw)) is not None)

    def _take_log(self, lines: list[bytes]) -> None:
        self.log_lines += len(lines)
        self.log.extend(escape_control_chars(raw.decode(errors="replace")) for raw in lines)

    def _take_attempts(self, lines: list[bytes]) -> None:
        self.attempts += [attempt for raw in lines if (attempt := read_object(raw)) is not None]

    def _read_small(self, name: str) -> None:
        path = self.path / name
        try:
            stat = path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if self._seen.get(name) == seen:
                return
            value = parse_json(read_bytes(path, MAX_BYTES))
        except (OSError, ValueError):
            return
        self._seen[name] = seen
        self.version += 1
        if name == "config.json" and isinstance(value, dict):
            self.config, self.flat = value, flatten(value)
        elif name == "heartbeat.json" and isinstance(value, dict):
            self.beat, self.beat_seen = value, stat.st_mtime
        elif name == "servers.json" and isinstance(value, list):
            self.servers = [server for server in value if isinstance(server, dict)]

    def _read_hardware(self) -> None:
        folder = self.path / "hardware"
        for path in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
            if path.name.endswith(".old.jsonl"):
                continue
            tail = self._hardware.setdefault(path.stem, Tail(path))
            history = self.hardware.setdefault(path.stem, deque(maxlen=KEPT_HARDWARE))
            lines = tail.read()  # of a rotated file the kept lines stay
            history.extend(record for raw in lines if (record := read_object(raw)) is not None)
            self.version += bool(lines)

    def _read_checkpoints(self) -> None:
        try:
            names = os.listdir(self.path / "checkpoints")
        except OSError:
            names = []
        steps = sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)
        self.version += steps != self.checkpoints
        self.checkpoints = steps


TAILED = {
    "metrics.jsonl": "_take_metrics",
    "samples.jsonl": "_take_samples",
    "log.txt": "_take_log",
    "attempts.jsonl": "_take_attempts",
}


def list_gpus(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the accelerators of a line about a host."""
    gpus = line.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def find_runs(paths: list[Path], most: int = 64) -> list[Path]:
    """The runs that paths name: each itself, or those at most three folders below, newest first."""
    runs_by_path: dict[str, Path] = {}
    for path in paths:
        below = [path] if is_run(path) else sorted(_search(path, 3), key=_age)
        for run in below[:most]:
            runs_by_path.setdefault(os.path.realpath(run), run)
    return list(runs_by_path.values())


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run: its config and metrics, or the record of a start."""
    if not (path / "config.json").is_file():
        return False
    return (path / "metrics.jsonl").is_file() or (path / "attempts.jsonl").is_file()


def _search(path: Path, depth: int) -> Iterator[Path]:
    try:
        below = [
            folder
            for folder in path.iterdir()
            if folder.is_dir() and not folder.name.startswith(".")
        ]
    except OSError:
        return
    for folder in below:
        if is_run(folder):
            yield folder
        elif depth > 1:
            yield from _search(folder, depth - 1)


def _age(run: Path) -> float:
    """For the newest first."""
    times = [0.0]
    for name in ("heartbeat.json", "metrics.jsonl", "config.json"):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return -max(times)
