"""Reader that finds the requested runs and keeps them up to date."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.runs.dashboard.run_data import WatchedRun, find_runs
from jaxtrain.runs.dashboard.status import number, read_state
from jaxtrain.runs.hardware import HardwareReader
from jaxtrain.text_safety import escape_control_chars

SEARCH_SECONDS, HARDWARE_SECONDS = 10.0, 5.0
"""Between two looks for new runs; between two of our own lines about hardware, where a live run on
this host writes none."""


class RunReader:
    """Keeps `runs` up to date with the folders; reads files only."""

    def __init__(self, paths: list[Path], clock: Callable[[], float] = time.monotonic):
        for path in paths:
            if path.exists() and not path.is_dir():
                raise UserError(
                    f"{path} is a file; give the output_dir of a run, or a folder with runs in it"
                )
        self.paths, self.clock = paths, clock
        self.runs: list[WatchedRun] = []
        self._searched = self._measured = -1e9
        self._hardware: HardwareReader | None = None

    def read(self) -> bool:
        """Take in what is new; whether anything was."""
        new = False
        if self.clock() - self._searched >= SEARCH_SECONDS or not self.runs:
            self._searched = self.clock()
            paths = {str(run.path) for run in self.runs}
            new_runs = [
                WatchedRun(path) for path in find_runs(self.paths) if str(path) not in paths
            ]
            self.runs += new_runs
            name_apart(self.runs)
            new = bool(new_runs)
        for run in self.runs:
            new = run.read() or new
        return new

    def read_all(self) -> None:
        """Read everything that is there now; raise UserError if there is no run."""
        self.read()
        while any(run.behind for run in self.runs):
            self.read()
        if not self.runs:
            if missing := [str(path.absolute()) for path in self.paths if not path.exists()]:
                raise UserError(f"{', '.join(missing)} does not exist; give a run.output_dir")
            raise UserError(
                f"no run in {', '.join(map(str, self.paths))}: a run's folder holds config.json and"
                " metrics.jsonl; give the run.output_dir of one that has started, or a folder above"
            )

    def measure(self, run: WatchedRun | None) -> bool:
        """Measure this host's hardware for a live run on it whose own lines are old or missing;
        return whether there is a new line."""
        if run is None or self.clock() - self._measured < HARDWARE_SECONDS:
            return False
        self._measured = self.clock()
        host = platform.node()
        lines: Any = run.hardware.get(host) or ()
        fresh = bool(lines) and time.time() - number(lines[-1].get("time")) < 120
        if fresh or run.beat.get("host") != host or not read_state(run).live:
            return False
        self._hardware = self._hardware or HardwareReader(run.path)
        run.keep_hardware(host, self._hardware.read())
        return True


def name_apart(runs: list[WatchedRun]) -> None:
    """Give runs the shortest ends of their paths that distinguish them: seed0/run, seed1/run."""
    for run in runs:
        parts = run.path.absolute().parts
        other_paths = [second.path.absolute().parts for second in runs if second is not run]
        length = 1
        while length < len(parts) and any(o[-length:] == parts[-length:] for o in other_paths):
            length += 1
        run.name = escape_control_chars(os.path.join(*parts[-length:]))
