"""Status of a run, its progress and remaining time, from its files alone."""

import os
import platform
import time
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.runs.console import format_time
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.text import flat
from jaxtrain.runs.plot import is_number
from jaxtrain.runs.samples import finite

SILENT = 60.0
"""Seconds without a heartbeat after which a run may have died."""
PACE_LINES = 50
"""Newest lines of metrics from which the remaining time is estimated."""
WARNING = ("warning", "error", "failed", "died", "refused", "timed out", "is gone", "not finite")
"""Words of log lines that people should see."""


class RunStatus(NamedTuple):
    """State of a run."""

    kind: str
    """running, waiting, silent, finished, stopped, failed or unknown."""
    text: str
    """Current phase, or reason of the end; may be empty."""

    @property
    def live(self) -> bool:
        """True while the run is going on."""
        return self.kind in ("running", "waiting")


MARKS = {
    "running": ("●", "live", "green"),
    "waiting": ("●", "waiting", "yellow"),
    "silent": ("○", "silent", "red"),
    "finished": ("✓", "finished", "cyan"),
    "stopped": ("■", "stopped", "yellow"),
    "failed": ("✗", "failed", "red"),
    "unknown": ("?", "not begun", "bright_black"),
}
"""Sign, word and color of each kind of state."""


def read_state(run: WatchedRun, timestamp: float | None = None) -> RunStatus:
    """Return the state of a run at a Unix time, by default now."""
    timestamp = time.time() if timestamp is None else timestamp
    beat = run.beat
    if not beat:
        return RunStatus("unknown", "")
    kind, message = beat.get("state"), flat(beat.get("message") or "")
    if kind in ("finished", "stopped", "failed"):
        return RunStatus(str(kind), message)
    # Clocks of hosts differ: neither the writer's nor the file system's may lie in the future.
    signs = [run.beat_seen, number(beat.get("time"))]
    age = timestamp - max(
        (sign for sign in signs if sign and sign <= timestamp + 5), default=max(signs)
    )
    if kind != "running":  # written before runs recorded how they ended
        return RunStatus("silent", f"last sign {ago(age)} ago")
    if age <= SILENT and is_gone(beat):
        return RunStatus("silent", f"process {beat.get('pid')} is gone")
    if age > SILENT:
        return RunStatus(
            "silent",
            f"last sign {ago(age)} ago; process {beat.get('pid')} on {flat(beat.get('host'))}",
        )
    phase = flat(beat.get("phase") or "")
    still = number(beat.get("time")) - number(beat.get("moved"))
    limit = number(run.key("log.watchdog_seconds")) or 300.0
    if still > limit:
        return RunStatus("waiting", f"{phase}, {ago(still)} without progress")
    return RunStatus("running", phase)


def is_gone(beat: dict[str, Any]) -> bool:
    """Return whether the process that wrote a heartbeat ran on this host and has ended."""
    pid = beat.get("pid")
    if beat.get("host") != platform.node() or not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    return os.path.isdir("/proc/self") and not os.path.isdir(f"/proc/{pid}")


def number(value: Any) -> float:
    """A number of a stranger's file; 0 where it is none."""
    return float(value) if is_number(value) else 0.0


def ago(seconds: float) -> str:
    """40 s, 12 min, 3 h, 2 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def current_step(run: WatchedRun) -> int:
    """The last step that is known to be done."""
    logged = int(run.steps[-1]) if run.steps else 0
    return max(logged, int(number(run.beat.get("step"))))


def total_steps(run: WatchedRun) -> int | None:
    """Return the last step of the run; None if unknown."""
    for steps in (run.beat.get("total_steps"), run.key("run.max_steps")):
        if is_number(steps) and steps > 0:
            return int(steps)
    return None


def time_left(run: WatchedRun) -> float | None:
    """Seconds to the last step by the pace of the last lines of this attempt."""
    total = total_steps(run)
    if total is None or not run.steps:
        return None
    steps, clock = np.array(run.steps[-PACE_LINES:]), np.array(run.clock[-PACE_LINES:])
    keep = clock >= number(run.beat.get("started"))
    steps, clock = steps[keep], clock[keep]
    if len(steps) < 2 or steps[-1] <= steps[0]:
        return None
    pace = (clock[-1] - clock[0]) / (steps[-1] - steps[0])
    return max(total - current_step(run), 0) * float(max(pace, 0.0))


def time_passed(run: WatchedRun, timestamp: float | None = None) -> float:
    """Seconds that the run took so far, pauses between attempts left out."""
    logged = run.times[-1] if run.times else 0.0
    started = number(run.beat.get("started"))
    if not started:
        return logged
    before = int(np.count_nonzero(np.array(run.clock) < started))
    earlier = run.times[before - 1] if before else 0.0
    end = number(run.beat.get("time")) or (time.time() if timestamp is None else timestamp)
    return max(earlier + end - started, logged, 0.0)


def describe(run: WatchedRun) -> str:
    """grpo · Qwen3-0.6B · 4 × H200"""
    return " · ".join(part for part in (method(run), model(run), devices(run)) if part)


def method(run: WatchedRun) -> str:
    """The method by its name: grpo rather than rl, where the config says so."""
    kind = flat(run.key("task.kind") or "")
    for key in ("task.algorithm", "task.loss", "task.objective"):
        name = run.key(key)
        if kind in ("rl", "preference") and isinstance(name, str):
            return flat(name)[:24]
    return kind[:24]


def model(run: WatchedRun) -> str:
    """The model's name: the end of its path, or its family and width."""
    path = run.key("model.path")
    adapter = run.key("adapter.kind")
    ending = f" + {flat(adapter)}" if isinstance(adapter, str) and adapter != "none" else ""
    if isinstance(path, str) and path:
        parts = path.rstrip("/").split("/")
        tail = parts[-2:] if parts[-1] in ("model", "merged") else parts[-1:]
        return flat("/".join(tail))[-32:] + ending
    family = run.key("model.architecture.model_type")
    return (flat(family)[:24] if family else "") + ending


def devices(run: WatchedRun) -> str:
    """4 × H200"""
    kinds = run.attempts[-1].get("devices") if run.attempts else None
    if not isinstance(kinds, list) or not kinds:
        return ""
    kind = flat(kinds[0]).removeprefix("NVIDIA ")[:20]
    return f"{len(kinds)} × {kind}" if len(kinds) > 1 else kind


def is_warning(line: str) -> bool:
    """Return whether a line of log.txt is a warning or an error."""
    lowered = line[:400].lower()
    return any(word in lowered for word in WARNING)


def is_step(line: str) -> bool:
    """Return whether a line of log.txt reports a step, whose numbers are shown elsewhere."""
    rest = line[9:] if line[2:3] == ":" else line
    return rest.startswith(("step ", "eval at step "))


def best(run: WatchedRun) -> tuple[str, float, int] | None:
    """(metric, value, step) of the best evaluation, by checkpoint.best_metric or what is usual."""
    best_metric = run.key("checkpoint.best_metric")
    sets = [name for name in run.metrics if name.startswith("eval/") and name.endswith("/reward")]
    names = [best_metric, *sets, "eval/accuracy", "eval/loss", "reward", "loss"]
    for name in names:
        if isinstance(name, str) and run.metrics.get(name):
            smallest = name.endswith("loss")
            if name == best_metric:
                smallest = run.key("checkpoint.best_mode", "min") == "min"
            x, y = run.curve(name)
            index = int(np.argmin(y) if smallest else np.argmax(y))
            return name, float(y[index]), int(x[index])
    return None


def facts(run: WatchedRun) -> dict[str, Any]:
    """Return a summary of a run as JSON, for `jaxtrain watch --json`."""
    state, seconds_left, best_value = read_state(run), time_left(run), best(run)
    document = {
        "run": str(run.path),
        "state": state.kind,
        "message": state.text,
        "task": flat(run.key("task.kind") or ""),
        "model": model(run),
        "devices": devices(run),
        "step": current_step(run),
        "total_steps": total_steps(run),
        "eta_seconds": round(seconds_left, 1) if seconds_left is not None and state.live else None,
        "elapsed_seconds": round(time_passed(run), 1),
        "phase": flat(run.beat.get("phase") or ""),
        "attempt": run.beat.get("attempt") or len(run.attempts) or None,
        "best": dict(zip(("metric", "value", "step"), best_value, strict=True))
        if best_value
        else None,
        "metrics": {name: series.values[-1] for name, series in run.metrics.items()},
        "servers": run.servers,
        "hardware": {host: lines[-1] for host, lines in run.hardware.items() if lines},
        "warnings": [flat(line)[:500] for line in run.log if is_warning(line)][-20:],
    }
    return finite(document)


def elapsed_and_left(run: WatchedRun, live: bool) -> str:
    """0:05:12   ETA 0:02:36"""
    seconds_left = time_left(run) if live else None
    ending = f"   ETA {format_time(seconds_left)}" if seconds_left is not None else ""
    return format_time(time_passed(run)) + ending
