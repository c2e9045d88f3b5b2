"""Choices that all screens share: runs, the chosen one, searches."""

import re
import time
from collections.abc import Callable

from jaxtrain.runs.dashboard.chart import COLORS
from jaxtrain.runs.dashboard.run_data import WatchedRun

SCREENS = ("metrics", "samples", "log", "runs", "servers")
"""Keys 1 to 5, in this order."""


class DashboardView:
    """Runs and the choices made among them."""

    def __init__(self, runs: list[WatchedRun], clock: Callable[[], float] = time.time):
        self.runs, self.clock = runs, clock
        self.chosen = 0
        """Index of the run that the head, samples, log and servers show: the cursor of screen 4."""
        self.hidden: set[str] = set()
        """Paths of runs that are not drawn."""
        self.marked: WatchedRun | None = None
        """Run that the chosen one is compared with."""
        self.filters: dict[str, str] = {}
        """Regular expression by screen: names of metrics, texts of the others."""

    @property
    def shown(self) -> list[WatchedRun]:
        """Runs that are drawn over each other."""
        return [run for run in self.runs if str(run.path) not in self.hidden]

    @property
    def first(self) -> WatchedRun | None:
        """The chosen run."""
        return self.runs[min(self.chosen, len(self.runs) - 1)] if self.runs else None

    def color(self, run: WatchedRun) -> str:
        """A run's color on all screens."""
        return COLORS[self.runs.index(run) % len(COLORS)]

    def pattern(self, screen: str) -> re.Pattern[str] | None:
        """Return the compiled search of a screen; a text that is no regular expression matches
        literally."""
        text = self.filters.get(screen, "")
        if not text:
            return None
        try:
            return re.compile(text, re.IGNORECASE)
        except re.error:
            return re.compile(re.escape(text), re.IGNORECASE)
