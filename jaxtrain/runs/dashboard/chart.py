"""Curves as braille characters, two by four dots a cell; and the widget that shows them.

A column of dots spans the least and the greatest value of the polyline within it, so that no peak
is lost however many points there are.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text
from textual.widget import Widget
from typing_extensions import override

from jaxtrain.runs.console import format_count, format_time
from jaxtrain.runs.dashboard.text import cut_middle, flat

BRAILLE = 0x2800
"""The empty braille character; each dot is a bit of it."""
DOT_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bit of the dot in row and column of a cell."""
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_white")
"""Of the first, second, ... run; they go round."""
TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600)
"""Seconds between marks of a time axis; longer ones are multiples of half a day."""
BARS = "▁▂▃▄▅▆▇█"


class Curve(NamedTuple):
    """Line of one run in a chart."""

    x: np.ndarray
    """[points], float64."""
    y: np.ndarray
    """[points], float64, finite."""
    color: str = COLORS[0]


class Window(NamedTuple):
    """The part of the x axis that is shown."""

    low: float
    high: float


class Plot(Widget):
    """Chart with its title above and its newest value below."""

    _key: Hashable = None
    _options: Mapping[str, Any] = {}
    curves: Sequence[Curve] = ()
    """Lines that are drawn; set whenever `show` returned True."""

    def show(self, title: str, footer: str, state: Hashable, **options: Any) -> bool:
        """Draw again and return True, unless all that the picture depends on is as before."""
        key = (title, footer, state, *options.values())
        if key == self._key:
            return False
        self._key, self._options, self.curves = key, options, ()
        self.border_title = Text(cut_middle(flat(title), 200))
        self.border_subtitle = Text(footer)
        self.refresh()
        return True

    @override
    def render(self) -> Text:
        return Text("\n").join(chart(self.curves, *self.size, **self._options))


def chart(
    curves: Sequence[Curve],
    width: int,
    height: int,
    log: bool = False,
    x: str = "step",
    window: Window | None = None,
    cursor: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> list[Text]:
    """`height` lines of `width` cells: curves in their colors, y labels left, x labels below.

    log: a logarithmic y axis, without values that are not positive. x: "step", "time" (seconds) or
    "tokens", for the labels. cursor: a place of the x axis to be marked. marks: (place, sign)
    of events, which stand between the labels below.
    """
    curves = [clean(curve, log, window) for curve in curves]
    curves = [curve for curve in curves if len(curve.x)]
    rows = height - 1
    if rows < 1 or width < 8 or not curves:
        notice = "no value yet"[:width].center(width)
        lines = [notice if row == height // 2 else " " * width for row in range(height)]
        return [Text(line, style="bright_black") for line in lines]
    low, high = find_range([curve.y for curve in curves], log)
    ticks = [t for t in pick_ticks(low, high, max(2, rows // 2), log) if low <= t <= high]
    labels = [label_ticks([10**t])[0] for t in ticks] if log else label_ticks(ticks)
    margin = min(max(map(len, labels), default=0), width - 6)
    columns = width - margin - 1
    x_min, x_max = window or (
        min(float(curve.x[0]) for curve in curves),
        max(float(curve.x[-1]) for curve in curves),
    )
    cells, colors = np.zeros((rows, columns), np.int64), np.full((rows, columns), -1)
    for number, curve in enumerate(curves):
        packed = pack_dots(draw_dots(curve, x_min, x_max, low, high, 2 * columns, 4 * rows))
        cells |= packed
        colors[packed > 0] = number
    marked = None
    if cursor is not None and x_min <= cursor <= x_max and x_max > x_min:
        marked = round((cursor - x_min) / (x_max - x_min) * (columns - 1))
    places = {
        rows - 1 - min(int((tick - low) / (high - low) * rows), rows - 1): label[:margin]
        for tick, label in reversed(list(zip(ticks, labels, strict=True)))
    }
    lines = []
    for row in range(rows):
        edge = places.get(row, "").rjust(margin) + ("┤" if row in places else "│")
        line = Text(edge, style="bright_black")
        shown = [chr(BRAILLE + cell) if cell else " " for cell in cells[row].tolist()]
        if marked is not None and shown[marked] == " ":
            shown[marked] = "│"
        for number, part in groupby(zip(colors[row].tolist(), shown, strict=True), lambda p: p[0]):
            style = curves[number].color if number >= 0 else ""
            line.append("".join(character for _, character in part), style)
        if marked is not None:
            line.stylize("on grey23", margin + 1 + marked, margin + 2 + marked)
        lines.append(line)
    below = label_x(x_min, x_max, margin + 1, columns, x)
    return [*lines, put_marks(below, marks, Window(x_min, x_max), margin + 1)]


def clean(curve: Curve, log: bool = False, window: Window | None = None) -> Curve:
    """Return the curve sorted by x without undrawable values; y is log10 on a log axis."""
    x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    if log:
        keep &= y > 0
    if window is not None:
        keep &= (x >= window.low) & (x <= window.high)
    order = np.argsort(x[keep], kind="stable")
    x, y = x[keep][order], y[keep][order]
    return Curve(x, np.log10(y) if log else y, curve.color)


def find_range(values: Sequence[np.ndarray], log: bool = False) -> tuple[float, float]:
    """Least and greatest value, a little apart if they are the same."""
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        apart = 0.3 if log else abs(low) * 0.05 or 1.0
        return low - apart, high + apart
    return low, high


def pick_ticks(low: float, high: float, most: int, log: bool = False) -> list[float]:
    """At most about `most` round numbers in a range: 1, 2, 2.5 or 5 times a power of ten; for a log
    axis (whose range is of log10) powers of ten, with 2 and 5 times them in a short range."""
    if log and high - low < 1:
        return [math.log10(t) for t in pick_ticks(10**low, 10**high, most) if t > 0]
    ticks: list[float] = []
    for parts in (2 * most, 1.5 * most, most):  # as many as there is space for
        step = (high - low) / parts
        step = max(1, math.ceil(step)) if log else round_step(step)
        first = math.ceil(low / step)
        ticks = [(first + i) * step for i in range(max(math.floor(high / step) - first + 1, 0))]
        if len(ticks) <= most + 1:
            break
    return ticks


def round_step(step: float, integral: bool = False) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is no smaller."""
    power = 10.0 ** math.floor(math.log10(max(step, 1.0 if integral else 1e-300)))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    return next(
        (s for s in steps if s >= step * (1 - 1e-9) and not (integral and s % 1)), steps[-1]
    )


def label_ticks(ticks: Sequence[float]) -> list[str]:
    """Ticks as text, all with the decimals that distinguish them."""
    largest = max(map(abs, ticks), default=0.0)
    form = "e" if largest >= 1e6 or 0 < largest < 1e-3 else "f"
    labels: list[str] = []
    for digits in range(10):
        labels = [f"{0.0 if abs(t) < 1e-9 * largest else t:,.{digits}{form}}" for t in ticks]
        errors = [abs(float(s.replace(",", "")) - t) for s, t in zip(labels, ticks, strict=True)]
        if max(errors, default=0.0) <= 1e-6 * largest:
            break
    return [label.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e") for label in labels]


def draw_dots(
    curve: Curve, x_min: float, x_max: float, low: float, high: float, columns: int, rows: int
) -> np.ndarray:
    """Return the dots that a sorted curve covers: bool [rows, columns], the first row on top."""
    share = (curve.x - x_min) / (x_max - x_min) if x_max > x_min else np.ones(len(curve.x))
    position = np.clip(share, 0, 1) * (columns - 1)
    height = np.clip((curve.y - low) / (high - low), 0, 1) * (rows - 1)
    column = np.rint(position).astype(np.int64)
    edges = np.interp(np.arange(columns + 1) - 0.5, position, height)
    bottom, top = np.minimum(edges[:-1], edges[1:]), np.maximum(edges[:-1], edges[1:])
    np.minimum.at(bottom, column, height)
    np.maximum.at(top, column, height)
    level = np.arange(rows)[::-1, None]
    dots = (level >= np.rint(bottom)) & (level <= np.rint(top))
    dots[:, : column[0]] = dots[:, column[-1] + 1 :] = False
    return dots


def pack_dots(dots: np.ndarray) -> np.ndarray:
    """Dots [4 rows, 2 columns] as bits of cells [rows, columns]."""
    rows, columns = dots.shape
    parts = dots.reshape(rows // 4, 4, columns // 2, 2).astype(np.int64)
    return np.einsum("rycx,yx->rc", parts, DOT_BITS)


def label_x(x_min: float, x_max: float, margin: int, columns: int, kind: str) -> Text:
    """The line below a chart: round numbers under their places, the last place always."""
    line, span = [" "] * (margin + columns), x_max - x_min
    ticks: list[float] = []
    if span > 0:
        step = span / max(2, columns // 10)
        if kind == "time":
            step = next((s for s in TIME_STEPS if s >= step), 43200 * math.ceil(step / 43200))
        else:
            step = round_step(step, integral=True)
        ticks = [t * step for t in range(math.ceil(x_min / step), math.floor(x_max / step) + 1)]
    free = len(line)
    for tick in [x_max, *reversed(ticks)]:
        label = label_place(tick, kind)
        end = margin + round((tick - x_min) / span * (columns - 1) if span else columns - 1) + 1
        end = end if tick == x_max else min(end + len(label) // 2, len(line))
        if end - len(label) >= margin - 1 and end <= free:
            line[end - len(label) : end] = label
            free = end - len(label) - 1
    return Text("".join(line), style="bright_black")


def put_marks(
    labels: Text, marks: Sequence[tuple[float, str]], window: Window, margin: int
) -> Text:
    """Put signs under their places, or close beside a label there; a later one covers an earlier
    one."""
    line, span = list(labels.plain), window.high - window.low
    free = {column for column in range(margin, len(line)) if line[column] == " "}
    for x, sign in marks:
        column = margin + round((x - window.low) / span * (len(line) - margin - 1)) if span else -1
        near = sorted(free & set(range(column - 2, column + 3)), key=lambda p: (abs(p - column), p))
        if near:
            line[near[0]] = sign
    return Text("".join(line), style="bright_black")


def label_place(x: float, kind: str) -> str:
    """A place of the x axis as text: 1,200; 0:05:12; 1.2M."""
    if kind == "time":
        return format_time(x)
    if kind == "tokens" and x >= 1e4:
        return format_count(x)
    return f"{x:,.0f}" if abs(x) < 1e9 else f"{x:.3g}"


def spark(values: np.ndarray, width: int) -> str:
    """The course of a metric in `width` characters: means of equal parts."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not len(values) or width < 1:
        return " " * max(width, 0)
    parts = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
    apart = np.ptp(parts)
    if apart <= 1e-12 * max(float(np.abs(parts).max()), 1e-300):
        return (BARS[0] * len(parts)).rjust(width)
    levels = np.minimum((parts - parts.min()) / apart * 8, 7).astype(int)
    return "".join(BARS[level] for level in levels).rjust(width)
