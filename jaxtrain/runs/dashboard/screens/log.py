"""Screen 3: log.txt, with search and warnings only."""

from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.widgets import RichLog
from typing_extensions import override

from jaxtrain.runs.dashboard.run_data import KEPT_LOG
from jaxtrain.runs.dashboard.screens.pane import Pane
from jaxtrain.runs.dashboard.status import is_warning

MAX_LINE = 2000
"""Characters of a line that are shown."""


class LogPane(Pane):
    """Screen 3."""

    NAME, MAIN = "log", "RichLog"
    DEFAULT_CSS = "LogPane RichLog { border: round $surface-lighten-2; }"
    BINDINGS: ClassVar = [
        Binding("n", "hit(True)", "next hit"),
        Binding("N,shift+n", "hit(False)", "hit before"),
        Binding("w", "warnings", "warnings"),
        Binding("g,home", "top", "top"),
        Binding("G,shift+g,end", "bottom", "end"),
    ]
    warnings = False
    hit_line = -1
    _source: Any = None
    _seen = 0

    def compose(self) -> ComposeResult:
        """Yield the log."""
        self.lines: list[str] = []
        yield RichLog(max_lines=KEPT_LOG, min_width=0)

    @property
    def log_view(self) -> RichLog:
        """The widget."""
        return self.query_one(RichLog)

    @property
    def following(self) -> bool:
        """True if the end of the log is shown as it grows."""
        return self.log_view.is_vertical_scroll_end

    @override
    def draw(self) -> None:
        run, log = self.view.first, self.log_view
        pattern = self.view.pattern("log")
        source = (run and (run.path, run.log_starts), self.warnings, pattern, self.hit_line)
        follow = self.following
        if source != self._source:
            log.clear()
            self.lines.clear()
            self._source, self._seen = source, 0
        if run is not None:
            new = list(run.log)[-(run.log_lines - self._seen) :]
            new = new if run.log_lines > self._seen else []
            self._seen = run.log_lines
            for text in [t for t in new if not self.warnings or is_warning(t)]:
                line = Text(text[:MAX_LINE].expandtabs(4), "yellow" if is_warning(text) else "")
                for match in pattern.finditer(line.plain) if pattern else ():
                    line.stylize("black on yellow", *match.span())
                if len(self.lines) == self.hit_line:
                    line.stylize("bold underline")
                self.lines.append(text)
                log.write(line, scroll_end=False)
            del self.lines[:-KEPT_LOG]
        if follow:
            log.scroll_end(animate=False)
        parts = ["following" if follow else f"line {log.scroll_offset.y + 1} of {len(self.lines)}"]
        parts += ["warnings only"] * self.warnings
        parts += [f"{len(self.hits())} hits"] if pattern else []
        if not self.lines:
            parts = ["no warning" if self.warnings else "no line yet"]
        log.border_title = Text(f"log of {run.name}" if run else "log")
        log.border_subtitle = ", ".join(parts)

    def hits(self) -> list[int]:
        """Lines in which the searched text stands."""
        pattern = self.view.pattern("log")
        return [i for i, line in enumerate(self.lines) if pattern and pattern.search(line)]

    def action_hit(self, forward: bool) -> None:
        """Go to the next line with the searched text, or the one before; around the end."""
        rows = self.hits()
        if not rows:
            self.notify("nothing found")
            return
        ahead = [row for row in rows if row > self.hit_line] or rows
        behind = [row for row in rows if row < self.hit_line] or rows
        self.hit_line = ahead[0] if forward else behind[-1]
        self.draw()
        middle = max(self.hit_line - self.log_view.size.height // 2, 0)
        self.log_view.scroll_to(y=middle, animate=False)

    def action_warnings(self) -> None:
        """Show warnings only, or all lines."""
        self.warnings, self.hit_line = not self.warnings, -1
        self.draw()
        self.action_bottom()

    def action_top(self) -> None:
        """Go to the first line."""
        self.log_view.scroll_home(animate=False)

    def action_bottom(self) -> None:
        """Go to the end and follow it."""
        self.log_view.scroll_end(animate=False)
