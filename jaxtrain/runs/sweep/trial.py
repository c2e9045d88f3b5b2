"""Trial of a sweep: a run in its own process, monitored through its folder."""

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.sweep.space import SweepSection, Values, name_trial, write_overrides
from jaxtrain.runs.sweep.study import RequestedTrial
from jaxtrain.text_safety import escape_control_chars

LOG_LINES, LOG_BYTES = 6, 4096
"""Part of a failed trial's log that is shown."""


class Process(Protocol):
    """Protocol of a running process, as distributed.child_processes.ServerProcess implements it."""

    def start(self) -> None: ...
    def poll(self) -> int | None: ...
    def stop(self, seconds: float = ...) -> int: ...


Start = Callable[[Sequence[str], Mapping[str, str] | None, Path], Process]
"""(command, environment or None for this one's, log) -> a process, not started."""


def make_process(command: Sequence[str], env: Mapping[str, str] | None, log: Path) -> Process:
    """Start a process that ends, with all of its children, when this process ends."""
    return ServerProcess(command, env, log, port=0)


def write_command(sweep: SweepSection, folder: Path, values: Values) -> list[str]:
    """Return the command that runs a trial."""
    words = [*sweep.overrides, *write_overrides(values)]
    words += write_overrides({"run.output_dir": str(folder)})
    return [sys.executable, "-m", "jaxtrain.main", "--config", sweep.config, *words]


class TrialRun:
    """Trial in progress."""

    def __init__(
        self,
        requested: RequestedTrial,
        values: Values,
        sweep: SweepSection,
        gpus: Sequence[str] | None,
    ):
        """gpus: what it alone may use, as CUDA_VISIBLE_DEVICES names them; None: all there is."""
        self.asked, self.values, self.sweep, self.gpus = requested, values, sweep, gpus
        self.number = requested.number
        self.name = name_trial(requested.number, values)
        self.folder = Path(sweep.output_dir) / self.name
        self.log = Path(sweep.output_dir) / "logs" / f"{self.name}.log"
        self.run = WatchedRun(self.folder)
        self.process: Process | None = None
        self.pruned = False
        self.reported = 0
        """Points of the metric that were seen."""
        self._stopper: threading.Thread | None = None

    def start(self, make: Start, environ: Mapping[str, str]) -> None:
        """Start its process."""
        env = None
        if self.gpus is not None:
            env = {**environ, "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = make(write_command(self.sweep, self.folder, self.values), env, self.log)
        self.process.start()

    def read(self) -> list[tuple[int, float]]:
        """(step, value) of the metric that came since the last call."""
        self.run.read()
        while self.run.behind:
            self.run.read()
        steps, values = self.run.curve(self.sweep.metric)
        if len(steps) < self.reported:  # a resumed run cut its metrics back
            self.reported = 0
        new = [
            (int(step), float(value))
            for step, value in zip(steps[self.reported :], values[self.reported :], strict=True)
            if math.isfinite(value)
        ]
        self.reported = len(steps)
        return new

    @property
    def value(self) -> float | None:
        """The metric by which it is compared; None: the run has none that is finite."""
        values = [value for value in self.run.curve(self.sweep.metric)[1] if math.isfinite(value)]
        if not values:
            return None
        best = min if self.sweep.mode == "min" else max
        return float(values[-1] if self.sweep.value == "last" else best(values))

    @property
    def state(self) -> Any:
        """State by the run's heartbeat: running, finished, stopped, failed."""
        return self.run.beat.get("state")

    def stop(self) -> None:
        """SIGTERM, upon which the run saves and ends; killed after sweep.stop_seconds. Returns at
        once; again: nothing."""
        if self._stopper is None and self.process is not None:
            stop, seconds = self.process.stop, float(self.sweep.stop_seconds)
            self._stopper = threading.Thread(target=stop, args=(seconds,), daemon=True)
            self._stopper.start()

    def release(self) -> None:
        """Release the claim so that other processes can take the trial."""
        if self._stopper is not None:
            self._stopper.join()
        self.asked.lock.close()

    def last_lines(self) -> list[str]:
        """The end of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        lines = [escape_control_chars(line.rstrip()) for line in text.splitlines() if line.strip()]
        return lines[-LOG_LINES:]
