"""Screen 1: numbers, charts, hardware and events; a chart on the whole screen."""

import re
from collections.abc import Sequence

import numpy as np
from rich.text import Text

from jaxtrain.runs.console import format_number
from jaxtrain.runs.dashboard.chart import Curve, Window, chart, label_place, spark
from jaxtrain.runs.dashboard.names import group, label, order_charts
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.hardware import draw_hardware, one_line
from jaxtrain.runs.dashboard.status import is_step, is_warning
from jaxtrain.runs.dashboard.text import beside, box, cut_left, fit, flat
from jaxtrain.runs.dashboard.view import SMOOTH, X_AXES, ClickTarget, DashboardView, Frame
from jaxtrain.runs.plot import smooth

NORMAL, WIDE, TALL = 100, 160, 30
"""Columns from which numbers stand beside the charts, and charts in three columns; rows of the body
from which hardware and events have panels."""
TIME = re.compile(r"\d\d:\d\d:\d\d ")
NUMBERS, CHART_ROWS, PANEL_ROWS = 34, 8, 8


def draw(look: DashboardView, width: int, height: int) -> Frame:
    """The screen below the head."""
    names = chart_names(look)
    if look.choice.open and names:
        return draw_open(look, names[look.select("metrics", len(names))], width, height)
    tall, normal = height >= TALL, width >= NORMAL
    below = PANEL_ROWS if tall else min(2, max(height - 6, 0))
    numbers_width = NUMBERS if normal else 0
    area, spots = draw_charts(look, names, width - numbers_width, height - below, numbers_width)
    if numbers_width:
        area = beside(draw_numbers(look, numbers_width, height - below), area)
    if tall:
        half = max(width * 42 // 100, 40)
        area += beside(draw_hardware(look, half, below), draw_events(look, width - half, below))
    elif below:
        event = next(reversed(events(look.first)), "") if look.first else ""
        lines = [one_line(look), Text(" " + event, style="yellow" if is_warning(event) else "")]
        area += [fit(line, width) for line in lines[:below]]
    return Frame(area, spots)


def chart_names(look: DashboardView) -> list[str]:
    """Metrics of the shown runs that fit the filter, in the order of their charts."""
    runs, pattern = look.shown, look.pattern("metrics")
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    kind = str(runs[0].key("task.kind") or "") if runs else ""
    matching = [name for name in names if pattern is None or pattern.search(name)]
    return order_charts(matching, kind)


def draw_charts(
    look: DashboardView, names: Sequence[str], width: int, height: int, x_offset: int
) -> tuple[list[Text], list[ClickTarget]]:
    """Draw one page of charts; `x_offset` is the column where they begin."""
    if not names:
        notice = "no metric has this name" if look.pattern("metrics") else "no step was logged yet"
        return box(["", f"  {notice}"], width, height), []
    by_width = 1 if width < 60 else 3 if width >= WIDE - NUMBERS else 2
    columns = min(look.choice.columns or by_width, max(width // 24, 1), len(names))
    rows = min(max(height // CHART_ROWS, 1), -(-len(names) // columns))
    look.grid = (columns, rows)
    chosen, page_size = look.select("metrics", len(names)), columns * rows
    first = chosen // page_size * page_size
    pages, lines, spots = -(-len(names) // page_size), [], []
    for row in range(rows):
        tall = height * (row + 1) // rows - height * row // rows
        parts, x = [], 0
        for column in range(columns):
            wide = width * (column + 1) // columns - width * column // columns
            index = first + row * columns + column
            if index < len(names):
                last_one = index == min(first + page_size, len(names)) - 1
                page = f"page {first // page_size + 1}/{pages}" if pages > 1 and last_one else ""
                drawn = draw_chart(look, names[index], wide, tall, index == chosen, page)
                spots.append(
                    ClickTarget(
                        x_offset + x,
                        len(lines),
                        x_offset + x + wide,
                        len(lines) + tall,
                        "select",
                        index,
                    )
                )
            else:
                drawn = [fit("", wide) for _ in range(tall)]
            parts.append(drawn)
            x += wide
        lines += beside(*parts)
    return lines, spots


def draw_chart(
    look: DashboardView, name: str, width: int, height: int, chosen: bool, note: str = ""
) -> list[Text]:
    """Draw one metric of all visible runs in a frame, with its newest value at the bottom."""
    choice, runs = look.choice, look.shown
    state = tuple((str(run.path), run.points(name), look.color(run)) for run in runs)
    state += tuple(len(run.steps) for run in runs)  # all charts reach to the newest line
    options = (choice.log_y, choice.smooth, choice.x)

    def make() -> list[Text]:
        curves = [curve for run in runs if (curve := read_curve(look, run, name))]
        last = next((v for run in runs if (v := run.last(name)) is not None), None)
        window = whole_extent(look) if curves else None
        inside = chart(curves, width - 2, height - 2, choice.log_y, X_AXES[choice.x], window)
        title = cut_left(name, width - 6)
        footer = "  ".join(filter(None, [note, plain(last)]))
        return box(inside, width, height, title, footer, "cyan" if chosen else "bright_black")

    return look.remember(("chart", name, width, height, chosen, note, state, options), make)


def whole_extent(look: DashboardView) -> Window | None:
    """The part of the x axis that all lines of the shown runs cover."""
    kind = X_AXES[look.choice.x]
    places = [along for run in look.shown if len(along := run.along(kind))]
    if not places:
        return None
    return Window(min(min(a[0], a[-1]) for a in places), max(max(a[0], a[-1]) for a in places))


def read_curve(look: DashboardView, run: WatchedRun, name: str) -> Curve | None:
    """A metric of a run as it is drawn; None where the run has none of it."""
    if name not in run.metrics:
        return None
    x, y = run.curve(name, X_AXES[look.choice.x])
    share = SMOOTH[look.choice.smooth]
    return Curve(x, np.array(smooth(y.tolist(), share)) if share else y, look.color(run))


def plain(value: float | None) -> str:
    """A value in as few characters as tell it; no -0."""
    if value is None:
        return ""
    return format_number(value + 0.0) if value else "0"


def draw_numbers(look: DashboardView, width: int, height: int) -> list[Text]:
    """Newest values of the chosen run by group, with their course."""
    run, inner, lines = look.first, width - 2, []
    if run is None:
        return box([], width, height, "numbers")
    names = [name for name in chart_names(look) if name in run.metrics]
    for title, members in group(names):
        lines.append(Text(title, style="bold"))
        for name in members:
            value = plain(run.last(name))
            points = run.points(name)
            course = look.remember(
                ("spark", str(run.path), name, points), lambda name=name: course_of(run, name)
            )
            space = inner - len(value) - 5
            line = fit(" " + cut_left(label(flat(name)), space - 1), space)
            lines.append(line.append(f" {value} ", "cyan").append(course, "green"))
    if len(lines) > height - 2:
        cut = len(lines) - height + 3
        lines = [*lines[: height - 3], Text(f" … {cut} more in the charts", style="bright_black")]
    title = f"numbers of {run.name}" if len(look.runs) > 1 else "numbers"
    return box(lines, width, height, title)


def course_of(run: WatchedRun, name: str) -> str:
    """Three bars: beginning, middle and end of a metric."""
    return spark(run.curve(name)[1], 3)


def events(run: WatchedRun | None) -> list[str]:
    """First lines of the messages in the log that are no step's."""
    if run is None:
        return []
    lines = [line for line in run.log if line.strip() and not is_step(line)]
    timed = [line for line in lines if TIME.match(line)]  # older logs tell no times
    return [flat(line) for line in timed or lines]


def draw_events(look: DashboardView, width: int, height: int) -> list[Text]:
    """Newest events, the last one at the bottom."""
    run = look.first
    key = ("events", str(run.path) if run else "", run.version if run else 0, width, height)

    def make() -> list[Text]:
        newest = events(run)[-(height - 2) :]
        lines = [Text(line, style="yellow" if is_warning(line) else "") for line in newest]
        return box(lines, width, height, "events")

    return look.remember(key, make)


def draw_open(look: DashboardView, name: str, width: int, height: int) -> Frame:
    """Draw one chart on the whole screen, with the values of all runs at the cursor."""
    choice, runs = look.choice, [run for run in look.shown if name in run.metrics]
    pairs = [(run, curve) for run in runs if (curve := read_curve(look, run, name))]
    window, kind = choice.window, X_AXES[choice.x]
    low, high = extent([curve for _, curve in pairs], window)
    cursor = None if choice.cursor is None else low + choice.cursor * (high - low)
    notes: list[Text] = []
    for run, curve in pairs:
        line = Text("● ", style=look.color(run)).append(fit(run.name, min(28, width // 3)).plain)
        point = len(curve.x) - 1
        if cursor is not None:
            point = int(np.abs(curve.x - cursor).argmin())
        line.append(f"  {kind} {label_place(float(curve.x[point]), kind)}  ", "bright_black")
        line.append(f"{plain(float(curve.y[point]))}  ", "bold")
        line.append(f"least {plain(float(curve.y.min()))}  greatest {plain(float(curve.y.max()))}")
        notes.append(fit(line, width))
    notes = notes[: max(height - 6, 0)]
    inside = chart(
        [curve for _, curve in pairs],
        *(width - 2, height - 2 - len(notes)),
        log=choice.log_y,
        x=kind,
        window=Window(low, high),
        cursor=cursor,
    )
    return Frame([*box(inside, width, height - len(notes), name, "", "cyan"), *notes], [])


def extent(curves: Sequence[Curve], window: Window | None) -> Window:
    """The part of the x axis that is shown."""
    if window is not None:
        return window
    full = [curve.x for curve in curves if len(curve.x)]
    if not full:
        return Window(0.0, 1.0)
    return Window(min(float(x.min()) for x in full), max(float(x.max()) for x in full))
