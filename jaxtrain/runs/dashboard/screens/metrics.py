"""Screen 1: numbers, charts, hardware and events; a chart on the whole screen."""

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.visual import VisualType
from textual.widgets import Static
from typing_extensions import override

from jaxtrain.runs.dashboard.chart import Curve, Plot, Window, label_place, spark
from jaxtrain.runs.dashboard.marks import place_marks
from jaxtrain.runs.dashboard.names import SHORT, group, order_charts
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.hardware import draw_hardware, summarize_hardware
from jaxtrain.runs.dashboard.screens.pane import Pane
from jaxtrain.runs.dashboard.status import MARKS, is_step, is_warning, read_state
from jaxtrain.runs.dashboard.text import cut_middle, fit, flat, plain
from jaxtrain.runs.plot import smooth

SMOOTH = (0.0, 0.05, 0.2)
X_AXES = ("step", "time", "tokens")
TIME = re.compile(r"\d\d:\d\d:\d\d ")
MAX_ROWS, MAX_COLUMNS, CHART_ROWS, WIDE = 10, 3, 8, 126
"""Charts below and beside each other; rows that one needs; columns from which three are beside
each other."""
MAX_EVENTS = 50
CHOICES = {"log": 2, "smooth": len(SMOOTH), "axis": len(X_AXES), "columns": MAX_COLUMNS + 1}
"""What keys change, and the number of its values; no columns: by the width."""


class MetricsPane(Pane, can_focus=True):
    """Screen 1. The keys come to the pane itself; its charts only draw."""

    NAME = "metrics"
    DEFAULT_CSS = """
    MetricsPane {
        #runs-list, #numbers, #hardware, #events { border: round $surface-lighten-2; height: 1fr; }
        #runs-list { display: none; width: 24; }
        #numbers { width: 34; scrollbar-size-vertical: 1; }
        #panels { height: 8; }
        #hardware { width: 42%; min-width: 50; }
        #events { width: 1fr; }
        #brief { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
        #notes { display: none; height: auto; padding: 0 1; }
        &.open #notes { display: block; }
        &.open #panels, &.open #numbers, &.open #brief { display: none; }
        Plot { border: round $surface-lighten-2; width: 1fr; height: 1fr; }
        Plot, Static, VerticalScroll { border-title-color: $foreground; }
        Plot { border-subtitle-color: $foreground; }
        Plot.chosen { border: round $accent; }
    }
    """
    BINDINGS: ClassVar = [
        Binding("enter", "open(True)", "open"),
        Binding("escape", "open(False)", "back", show=False),
        Binding("y", "choose('log')", "log y"),
        Binding("s", "choose('smooth')", "smooth"),
        Binding("x", "choose('axis')", "axis"),
        Binding("c", "choose('columns')", "columns of charts", show=False),
        Binding("r", "list_runs", "runs"),
        Binding("left", "move(-1, 0)", "chart before; open: cursor", show=False),
        Binding("right", "move(1, 0)", "next chart; open: cursor", show=False),
        Binding("up", "move(0, -1)", "chart above", show=False),
        Binding("down", "move(0, 1)", "chart below", show=False),
        Binding("pageup", "page(-1)", "page before", show=False),
        Binding("pagedown", "page(1)", "next page", show=False),
        Binding("plus", "zoom(0.25)", "open: zoom in", show=False),
        Binding("minus", "zoom(1.0)", "open: zoom out", show=False),
        Binding("0", "zoom(0)", "open: whole curve", show=False),
    ]
    opened = False
    grid = (1, 1)
    """Columns and rows of charts."""
    cursor: float | None = None
    """Share of the open chart's width, 0 to 1."""
    window: Window | None = None
    """Part of the open chart's x axis."""
    chosen = 0
    """Index of the chosen chart."""
    marks: Sequence[tuple[float, str]] = ()
    """Events of the chosen run, on the x axis of every chart."""

    def compose(self) -> ComposeResult:
        """Yield numbers beside charts, hardware and events below."""
        self.values = dict.fromkeys(CHOICES, 0)
        with Horizontal():
            yield Static(id="runs-list")
            with VerticalScroll(id="numbers", can_focus=False):
                yield Static()
            with Grid():
                for _ in range(MAX_ROWS * MAX_COLUMNS):
                    yield Plot()
        yield Static(id="notes")
        with Horizontal(id="panels"):
            yield Static(id="hardware")
            yield Static(id="events")
        yield Static(id="brief")

    @override
    def focus_main(self) -> None:
        self.focus()

    @override
    def legend(self) -> Text:
        text = Text(no_wrap=True)
        for run in self.view.shown[:4] if len(self.view.runs) > 1 else ():
            text.append("● ", self.view.color(run)).append(f"{cut_middle(run.name, 18)}  ")
        text.append_text(super().legend())
        text.append("log y  " if self.values["log"] else "", "yellow")
        settings = f"smooth {SMOOTH[self.values['smooth']]:.0%}  x: {X_AXES[self.values['axis']]} "
        return text.append(settings, "bright_black")

    def chart_names(self) -> list[str]:
        """Metrics of the shown runs that fit the filter, in the order of their charts."""
        runs, pattern = self.view.shown, self.view.pattern("metrics")
        names = dict.fromkeys(name for run in runs for name in run.metrics)
        kind = str(runs[0].key("task.kind") or "") if runs else ""
        return order_charts([n for n in names if pattern is None or pattern.search(n)], kind)

    @override
    def draw(self) -> None:
        names, first, clock = self.chart_names(), self.view.first, self.view.clock()
        self.set_class(self.opened and bool(names), "open")
        self.draw_charts(names)
        marks = []
        for run in self.view.runs:
            sign = Text("● " if run in self.view.shown else "○ ", self.view.color(run))
            mark, _, color = MARKS[read_state(run, clock).kind]
            marks.append(sign.append(fit(run.name, 18), "default").append(mark, color))
        self.fill("#runs-list", "runs", Text("\n").join(marks))
        several = first is not None and len(self.view.runs) > 1
        numbers = f"numbers of {first.name}" if first and several else "numbers"
        self.query_one("#numbers").border_title = Text(numbers)
        self.query_one("#numbers Static", Static).update(draw_numbers(first, names))
        hardware = draw_hardware(first, clock, *self.query_one("#hardware").size)
        self.fill("#hardware", *hardware)
        lines = [style_event(line) for line in list_events(first)]
        space = max(self.query_one("#events").size.height, 1)
        self.fill("#events", "events", Text("\n").join(lines[-space:]))
        self.fill("#brief", "", Text("\n").join([Text(summarize_hardware(first)), *lines[-1:]]))

    def fill(self, selector: str, title: str, content: VisualType) -> None:
        """Show content below a title."""
        widget = self.query_one(selector, Static)
        widget.border_title = Text(title)
        widget.update(content, layout=False)

    def draw_charts(self, names: Sequence[str]) -> None:
        """Draw the page of charts that holds the chosen one, or that alone."""
        area, plots = self.query_one(Grid), list(self.query(Plot))
        width, height = area.size
        by_width = 1 if width < 60 else 3 if width >= WIDE else 2
        columns = max(min(self.values["columns"] or by_width, width // 24, len(names)), 1)
        rows = max(min(height // CHART_ROWS, -(-len(names) // columns), MAX_ROWS), 1)
        columns, rows = self.grid = (1, 1) if self.opened else (columns, rows)
        styles = area.styles
        if (styles.grid_size_columns, styles.grid_size_rows) != (columns, rows):
            styles.grid_size_columns, styles.grid_size_rows = columns, rows
        run, kind = self.view.first, X_AXES[self.values["axis"]]
        self.marks = tuple(place_marks(run, kind)) if run in self.view.shown else ()
        self.chosen = min(max(self.chosen, 0), max(len(names) - 1, 0))
        first = self.chosen // (columns * rows) * columns * rows
        for index, plot in enumerate(plots, start=first):
            plot.display = index < min(first + columns * rows, len(names))
            plot.set_class(index == self.chosen, "chosen")
            if plot.display:
                last = index == min(first + columns * rows, len(names)) - 1
                pages = -(-len(names) // (columns * rows))
                page = f"page {first // (columns * rows) + 1}/{pages}  " if pages > 1 else ""
                self.draw_chart(plot, names[index], page if last and not self.opened else "")
        if not names:
            searched = self.view.pattern("metrics") is not None
            plots[0].display = True
            plots[0].show(
                "no metric has this name" if searched else "no step was logged yet", "", ()
            )

    def draw_chart(self, plot: Plot, name: str, page: str) -> None:
        """Draw one metric of all shown runs."""
        view, kind, log = self.view, X_AXES[self.values["axis"]], bool(self.values["log"])
        runs = [run for run in view.shown if name in run.metrics]
        share = SMOOTH[self.values["smooth"]]
        # All charts reach to the newest line.
        state = [
            (run.path, run.points(name), len(run.steps), view.color(run)) for run in view.shown
        ]
        window = self.whole_extent(runs, name) if self.opened else self.whole_extent(view.shown)
        cursor = None
        if self.opened:
            low, high = window = self.window or window
            cursor = None if self.cursor is None else low + self.cursor * (high - low)
        value = plain(next((v for run in view.shown if (v := run.last(name)) is not None), None))
        options = dict(log=log, x=kind, window=window, cursor=cursor, marks=self.marks)
        if not plot.show(name, page + value, (*state, share), **options) and not self.opened:
            return
        curves = []
        for run in runs:
            x, y = run.curve(name, kind)
            y = np.array(smooth(y.tolist(), share)) if share else y
            curves.append(Curve(x, y, view.color(run)))
        plot.curves = curves
        if self.opened:
            pairs = zip(runs, curves, strict=True)
            notes = [describe_curve(run, curve, kind, cursor) for run, curve in pairs]
            self.query_one("#notes", Static).update(Text("\n", no_wrap=True).join(notes[:8]))

    def whole_extent(self, runs: Sequence[WatchedRun], name: str = "") -> Window:
        """The part of the x axis that all lines of runs cover, or those with a metric."""
        kind = X_AXES[self.values["axis"]]
        places = [run.curve(name, kind)[0] if name else run.along(kind) for run in runs]
        ends = [float(end) for x in places if len(x) for end in (x[0], x[-1])]
        return Window(min(ends), max(ends)) if ends else Window(0.0, 1.0)

    def action_open(self, opened: bool) -> None:
        """Show the chosen chart alone, or the page; without an open chart drop the search."""
        if not (opened or self.opened):
            self.view.filters.pop(self.NAME, None)
        self.opened = opened and bool(self.chart_names())
        self.window = self.cursor = None
        self.redraw()

    def action_choose(self, name: str) -> None:
        """Go to the next value of a choice."""
        self.values[name] = (self.values[name] + 1) % CHOICES[name]
        self.window = None if name == "axis" else self.window
        self.redraw()

    def action_list_runs(self) -> None:
        """Show the list of runs, or hide it."""
        runs = self.query_one("#runs-list")
        runs.display = not runs.display
        self.redraw()

    def action_move(self, x: int, y: int) -> None:
        """Choose a neighbor; of an open chart move the cursor."""
        if self.opened and x:
            cursor = (1.0 if x < 0 else 0.0) if self.cursor is None else self.cursor
            self.cursor = min(max(cursor + 0.02 * x, 0.0), 1.0)
        elif self.chosen + x + y * self.grid[0] >= 0:
            self.chosen += x + y * self.grid[0]
            self.window = self.cursor = None
        self.redraw()

    def action_page(self, by: int) -> None:
        """Turn pages."""
        self.action_move(0, by * self.grid[1])

    def action_zoom(self, share: float) -> None:
        """Show twice `share` of the open chart's window, around the cursor; 0: the whole."""
        names, cursor = self.chart_names(), self.cursor
        if not self.opened or not names:
            return
        full = self.whole_extent(self.view.shown, names[self.chosen])
        low, high = self.window or full
        middle, half = (
            low + (0.5 if cursor is None else cursor) * (high - low),
            (high - low) * share,
        )
        window = Window(max(middle - half, full.low), min(middle + half, full.high))
        if not share:
            self.window = self.cursor = None
        elif half >= 1e-9 * max(abs(full.high), 1.0):
            self.window = None if window == full else window
            if cursor is not None:
                self.cursor = (middle - window.low) / (window.high - window.low)
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """Choose the clicked chart; open it with the second click."""
        plots = list(self.query(Plot))
        if isinstance(event.widget, Plot) and not self.opened:
            size = self.grid[0] * self.grid[1]
            clicked = self.chosen // size * size + plots.index(event.widget)
            self.opened, self.chosen = clicked == self.chosen, clicked
            self.redraw()


def describe_curve(run: WatchedRun, curve: Curve, kind: str, cursor: float | None) -> Text:
    """Return a run's value at a cursor, or its last, and its range."""
    point = -1 if cursor is None else int(np.abs(curve.x - cursor).argmin())
    note = Text("● ", style=curve.color).append(fit(run.name, 20), "default")
    note.append(f"  {kind} {label_place(float(curve.x[point]), kind)}  ", "bright_black")
    note.append(f"{plain(float(curve.y[point]))}  ", "bold default")
    extremes = plain(float(curve.y.min())), plain(float(curve.y.max()))
    return note.append("least {}  greatest {}".format(*extremes), "default")


def draw_numbers(run: WatchedRun | None, names: Sequence[str]) -> Table:
    """Newest values of a run by group, each with its course in three bars."""
    table = Table.grid(expand=True, padding=(0, 1, 0, 0))
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(style="green", no_wrap=True)
    if run is None:
        return table
    names = [name for name in names if name in run.metrics]
    widest = max((len(plain(run.last(name))) for name in names), default=0)
    for title, members in group(names):
        table.add_row(Text(title, style="bold"))
        for name in members:
            value = plain(run.last(name))
            short = Text(" " + cut_middle(SHORT.get(name) or flat(name), 24 - widest))
            table.add_row(short, value, spark(np.array(run.metrics[name].values), 3))
    return table


def list_events(run: WatchedRun | None) -> list[str]:
    """Return the last lines of the log that report no step: the timed ones, if it has times."""
    lines = [line for line in run.log if line.strip() and not is_step(line)] if run else []
    timed = [line for line in lines if TIME.match(line)]
    return [flat(line) for line in (timed or lines)[-MAX_EVENTS:]]


def style_event(line: str) -> Text:
    """Return a message of the log; warnings stand out."""
    return Text(line, style="yellow" if is_warning(line) else "", no_wrap=True, overflow="ellipsis")
