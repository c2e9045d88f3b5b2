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
from jaxtrain.runs.dashboard.view import DashboardView
from jaxtrain.runs.hardware import HardwareReader
from jaxtrain.text_safety import escape_control_chars

SEARCH_SECONDS, HARDWARE_SECONDS = 10.0, 5.0
"""Between two looks for new runs; between two of our own lines about hardware, where a live run on
this host writes none."""


class RunReader:
    """Keeps look.runs up to date with the folders; reads files only."""

    def __init__(
        self, paths: list[Path], look: DashboardView, clock: Callable[[], float] = time.monotonic
    ):
        self.paths, self.look, self.clock = paths, look, clock
        self._searched = self._measured = -1e9
        self._hardware: HardwareReader | None = None

    def read(self) -> bool:
        """Take in what is new; whether anything was."""
        new = False
        if self.clock() - self._searched >= SEARCH_SECONDS or not self.look.runs:
            self._searched = self.clock()
            known_paths = {str(run.path) for run in self.look.runs}
            new_runs = [
                WatchedRun(path) for path in find_runs(self.paths) if str(path) not in known_paths
            ]
            self.look.runs += new_runs
            name_apart(self.look.runs)
            new = bool(new_runs)
        for run in self.look.runs:
            new = run.read() or new
        return self._measure() or new

    def read_all(self) -> None:
        """Read everything that is there now."""
        self.read()
        while any(run.behind for run in self.look.runs):
            self.read()

    def _measure(self) -> bool:
        """This host's hardware, for a live run on it whose own lines are old or missing."""
        run = self.look.first
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
    """Give runs the shortest ends of their paths that tell them apart: seed0/run, seed1/run."""
    for run in runs:
        parts = run.path.absolute().parts
        other_paths = [
            path_parts.path.absolute().parts for path_parts in runs if path_parts is not run
        ]
        length = 1
        while length < len(parts) and any(
            path_parts[-length:] == parts[-length:] for path_parts in other_paths
        ):
            length += 1
        run.name = escape_control_chars(os.path.join(*parts[-length:]))


def check_paths(paths: list[Path]) -> None:
    """Raise UserError for a path that can never become a run's."""
    for path in paths:
        if path.exists() and not path.is_dir():
            raise UserError(
                f"{path} is a file; give the output_dir of a run, or a folder with runs in it"
            )
