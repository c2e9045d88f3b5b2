"""View state of the dashboard: runs, selections, and a cache of drawn parts."""

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from rich.text import Text

from jaxtrain.runs.dashboard.chart import COLORS, Window
from jaxtrain.runs.dashboard.run_data import WatchedRun

SCREENS = ("metrics", "samples", "log", "runs", "servers")
"""Keys 1 to 5, in this order."""
SMOOTH = (0.0, 0.05, 0.2)
X_AXES = ("step", "time", "tokens")
MOST_DRAWN = 400
"""Parts of screens that are kept."""

T = TypeVar("T")


@dataclass
class ViewState:
    """Selections made by keys. Drawing clamps numbers that are out of range."""

    screen: str = "metrics"
    open: bool = False
    """True if the selected chart or sample fills the screen."""
    help: bool = False
    selected: dict[str, int] = field(default_factory=dict)
    """Selected chart, sample, line or run by screen."""
    scrolled: int = 0
    """Lines of an open sample that are above the screen."""
    filters: dict[str, str] = field(default_factory=dict)
    """Regular expression by screen: names of metrics, texts of the others."""
    typed: str | None = None
    """Text typed behind "/" so far; None if the prompt is closed."""
    log_y: bool = False
    smooth: int = 0
    x: int = 0
    columns: int = 0
    """Columns of charts; 0: by the width."""
    paused: bool = False
    sidebar: bool = False
    hidden: set[str] = field(default_factory=set)
    """Paths of runs that are not drawn."""
    marked: str | None = None
    """Path of the run that others are compared with."""
    order: str = "newest"
    """Order of samples: newest, best or worst first."""
    unfolded: bool = False
    """True if tool calls and their results are shown in full."""
    follow: bool = True
    """True if the log follows its end."""
    warnings: bool = False
    """True if the log shows warnings only."""
    cursor: float | None = None
    """Share of the open chart's width, 0 to 1."""
    window: Window | None = None
    """Part of the open chart's x axis."""
    notice: str = ""
    """Message in the last line."""


class ClickTarget(NamedTuple):
    """Clickable area of the screen: columns x0 to x1 and rows y0 to y1, ends excluded."""

    x0: int
    y0: int
    x1: int
    y1: int
    action: str
    """screen or select."""
    value: Any


class Frame(NamedTuple):
    """A screen as it is shown."""

    lines: list[Text]
    spots: list[ClickTarget]


class DashboardView:
    """Runs and view state, with a cache of drawn parts."""

    def __init__(
        self,
        runs: list[WatchedRun],
        choice: ViewState | None = None,
        timestamp: float | None = None,
    ):
        self.runs, self.choice = runs, choice or ViewState()
        self.now = timestamp
        """Unix time from which relative times are computed; None: the clock."""
        self.grid: tuple[int, int] = (2, 3)
        """Columns and rows of charts on the last picture."""
        self._drawn: dict[Hashable, Any] = {}

    @property
    def shown(self) -> list[WatchedRun]:
        """Runs that are drawn over each other."""
        return [run for run in self.runs if str(run.path) not in self.choice.hidden]

    @property
    def first(self) -> WatchedRun | None:
        """Run that the head line, samples, log and servers show: selected on screen 4."""
        if not self.runs:
            return None
        index = min(self.choice.selected.get("runs", 0), len(self.runs) - 1)
        return self.runs[index]

    def color(self, run: WatchedRun) -> str:
        """A run's color on all screens."""
        return COLORS[self.runs.index(run) % len(COLORS)]

    def pattern(self, screen: str | None = None) -> re.Pattern[str] | None:
        """Return the compiled search pattern; a text that is no regular expression matches
        literally."""
        text = self.choice.filters.get(screen or self.choice.screen, "")
        if not text:
            return None
        try:
            return re.compile(text, re.IGNORECASE)
        except re.error:
            return re.compile(re.escape(text), re.IGNORECASE)

    def select(self, screen: str, count: int) -> int:
        """The chosen place among `count` on a screen, brought into range."""
        index = min(max(self.choice.selected.get(screen, 0), 0), max(count - 1, 0))
        self.choice.selected[screen] = index
        return index

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value for a key, computing it with make() the first time."""
        if key not in self._drawn:
            if len(self._drawn) >= MOST_DRAWN:
                self._drawn.clear()
            self._drawn[key] = make()
        return self._drawn[key]
