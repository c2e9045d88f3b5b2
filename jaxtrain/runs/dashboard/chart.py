"""Curves as braille characters: two by four dots a cell.

A column of dots shows the least and the greatest value that fall into it, so that no peak is lost
however many points there are; neighboring columns are joined.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from jaxtrain.runs.console import format_time

FULL = 0x2800
"""The empty braille character; each dot is a bit of it."""
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bit of the dot in row and column of a cell."""
COLORS = ("cyan", "yellow", "magenta", "green", "red", "blue", "bright_white")
"""Of the first, second, ... run; they go round."""


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


def chart(
    curves: Sequence[Curve],
    width: int,
    height: int,
    log: bool = False,
    x: str = "step",
    window: Window | None = None,
    cursor: float | None = None,
) -> list[Text]:
    """`height` lines of `width` cells: curves in their colors, y labels left, x labels below.

    log: a logarithmic y axis, without values that are not positive. x: "step", "time" (seconds) or
    "tokens", for the labels. cursor: a place of the x axis to be marked.
    """
    curves = [clean(curve, log, window) for curve in curves]
    curves = [curve for curve in curves if len(curve.x)]
    rows = height - 1
    if rows < 1 or width < 8 or not curves:
        middle, notice = height // 2, "no value yet"[: max(width, 0)]
        lines = [notice.center(width) if row == middle else " " * width for row in range(height)]
        return [Text(line, style="bright_black") for line in lines]
    low, high = find_range([curve.y for curve in curves], log)
    ticks = [t for t in pick_ticks(low, high, max(2, rows // 2), log) if low <= t <= high]
    labels = [label_ticks([10**t])[0] for t in ticks] if log else label_ticks(ticks)
    margin = min(max(map(len, labels), default=0), max(width - 6, 0))
    columns = width - margin - 1
    x_min = min(float(curve.x.min()) for curve in curves)
    x_max = max(float(curve.x.max()) for curve in curves)
    if window is not None:
        x_min, x_max = window
    cells = np.zeros((rows, columns), dtype=np.int64)
    colors = np.full((rows, columns), -1)
    for number, curve in enumerate(curves):
        drawn = draw_dots(curve, x_min, x_max, low, high, 2 * columns, 4 * rows)
        packed = pack_dots(drawn)
        cells |= packed
        colors[packed > 0] = number
    marked = None
    if cursor is not None and x_max > x_min and x_min <= cursor <= x_max:
        marked = round((cursor - x_min) / (x_max - x_min) * (columns - 1))
    places = {
        rows - 1 - min(int((t - low) / (high - low) * rows), rows - 1): i
        for i, t in reversed(list(enumerate(ticks)))
    }
    lines = []
    for row in range(rows):
        label = labels[places[row]][:margin] if row in places else ""
        line = Text(label.rjust(margin) + ("┤" if row in places else "│"), style="bright_black")
        for column in range(columns):
            empty = "│" if column == marked else " "
            shown = chr(FULL + int(cells[row, column])) if cells[row, column] else empty
            number = int(colors[row, column])
            style = curves[number].color if number >= 0 else ""
            line.append(shown, f"{style} on grey23".strip() if column == marked else style)
        lines.append(line)
    return [*lines, label_x(x_min, x_max, margin + 1, columns, x)]


def clean(curve: Curve, log: bool = False, window: Window | None = None) -> Curve:
    """Return the curve sorted by x without undrawable values; y is log10 on a log axis."""
    x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    if log:
        keep &= y > 0
    if window is not None:
        keep &= (x >= window.low) & (x <= window.high)
    x, y = x[keep], y[keep]
    if len(x) and (np.diff(x) < 0).any():
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
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
    if log and high - low >= 1:
        every = max(1, math.ceil((high - low) / most))
        return [float(t) for t in range(math.ceil(low), math.floor(high) + 1, every)]
    if log:
        ticks = pick_ticks(10**low, 10**high, most)
        return [math.log10(t) for t in ticks if t > 0]
    ticks: list[float] = []
    for parts in (2 * most, 1.5 * most, most):  # as many as there is space for
        step = round_step((high - low) / max(parts, 1))
        first = math.ceil(low / step)
        ticks = [(first + i) * step for i in range(max(math.floor(high / step) - first + 1, 0))]
        if len(ticks) <= most + 1:
            break
    return ticks


def round_step(step: float, integral: bool = False) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is no smaller."""
    if integral and step <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(max(step, 1e-300)))
    for factor in (1, 2, 2.5, 5, 10):
        if factor * power >= step * (1 - 1e-9) and not (integral and factor * power % 1):
            return factor * power
    return 10 * power


def label_ticks(ticks: Sequence[float]) -> list[str]:
    """Ticks as text, all with the decimals that tell them apart."""
    if not ticks:
        return []
    largest = max(map(abs, ticks))
    apart = min((abs(b - a) for a, b in zip(ticks, ticks[1:], strict=False)), default=largest)
    apart = apart or largest or 1.0
    if largest >= 1e6 or (largest and largest < 1e-3):
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(apart) + 1e-9))
        shown = [f"{t:.{min(digits + 1, 8)}e}" for t in ticks]
        return [_short_exponent(label) for label in shown]
    decimals = next((d for d in range(9) if _fits(apart, d) and _fits(ticks[0], d)), 8)
    return [f"{t:,.{decimals}f}" if abs(t) > 1e-12 else "0" for t in ticks]


def _fits(value: float, decimals: int) -> bool:
    return abs(value - round(value, decimals)) <= 1e-6 * abs(value) or abs(value) < 1e-12


def _short_exponent(text: str) -> str:
    """1.50e+09 -> 1.5e9"""
    digits, _, exponent = text.partition("e")
    if float(digits) == 0:
        return "0"
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}e{int(exponent)}"


def draw_dots(
    curve: Curve, x_min: float, x_max: float, low: float, high: float, columns: int, rows: int
) -> np.ndarray:
    """Which dots a curve covers: bool [rows, columns], the first row on top."""
    dots = np.zeros((rows, columns), dtype=bool)
    share = (curve.x - x_min) / (x_max - x_min) if x_max > x_min else np.ones(len(curve.x))
    column = np.clip(np.rint(share * (columns - 1)), 0, columns - 1).astype(np.int64)
    height = np.clip((curve.y - low) / (high - low), 0, 1) * (rows - 1)
    starts = np.flatnonzero(np.r_[True, np.diff(column) > 0])
    ends = np.r_[starts[1:], len(column)] - 1
    lowest = np.minimum.reduceat(height, starts)
    highest = np.maximum.reduceat(height, starts)
    last: tuple[int, float] | None = None
    for i, dot_column in enumerate(column[starts].tolist()):
        bottom, top = float(lowest[i]), float(highest[i])
        if last is not None:
            before, value = last
            first = float(height[starts[i]])
            passed = value
            for between in range(
                before + 1, dot_column
            ):  # a straight line over columns without points
                interpolated = value + (first - value) * (between - before) / (dot_column - before)
                _fill(dots, between, passed, interpolated)
                passed = interpolated
            # From where the line stands to the first point, as half of the way into this column.
            bottom, top = min(bottom, (passed + first) / 2), max(top, (passed + first) / 2)
            if dot_column == before + 1:
                _fill(dots, before, value, (passed + first) / 2)
        _fill(dots, dot_column, bottom, top)
        last = (dot_column, float(height[ends[i]]))
    return dots


def _fill(dots: np.ndarray, column: int, a: float, b: float) -> None:
    rows = len(dots)
    low, high = round(min(a, b)), round(max(a, b))
    dots[rows - 1 - high : rows - low, column] = True


def pack_dots(dots: np.ndarray) -> np.ndarray:
    """Dots [4 rows, 2 columns] as bits of cells [rows, columns]."""
    rows, columns = dots.shape[0] // 4, dots.shape[1] // 2
    blocks = dots.reshape(rows, 4, columns, 2).transpose(0, 2, 1, 3)
    return (blocks * DOTS).sum(axis=(2, 3))


def label_x(x_min: float, x_max: float, margin: int, columns: int, kind: str) -> Text:
    """The line below a chart: round numbers under their places, the last place always."""
    line = [" "] * (margin + columns)
    if x_max <= x_min:
        ticks = [x_max]
    else:
        most = max(2, columns // 10)
        step = (
            time_step((x_max - x_min) / most)
            if kind == "time"
            else round_step((x_max - x_min) / most, integral=kind != "time")
        )
        ticks = [t * step for t in range(math.ceil(x_min / step), math.floor(x_max / step) + 1)]
    free = len(line)
    for tick in [x_max, *reversed(ticks)]:
        label = label_place(tick, kind)
        share = (tick - x_min) / (x_max - x_min) if x_max > x_min else 1.0
        end = margin + round(share * (columns - 1)) + 1
        end = end if tick == x_max else min(end + len(label) // 2, len(line))
        if end - len(label) >= margin - 1 and end <= free:
            line[end - len(label) : end] = label
            free = end - len(label) - 1
    return Text("".join(line), style="bright_black")


def label_place(x: float, kind: str) -> str:
    """A place of the x axis as text: 1,200; 0:05:12; 1.2M."""
    if kind == "time":
        return format_time(x)
    if kind == "tokens" and x >= 1e4:
        for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if x >= size:
                return f"{x / size:.4g}{unit}"
    return f"{x:,.0f}" if abs(x) < 1e9 else f"{x:.3g}"


def time_step(seconds: float) -> float:
    """A round time that is no shorter."""
    round_ones = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600)
    return next((s for s in round_ones if s >= seconds), 43200 * math.ceil(seconds / 43200))


BARS = "▁▂▃▄▅▆▇█"


def spark(values: np.ndarray, width: int) -> str:
    """The course of a metric in `width` characters: means of equal parts."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not len(values) or width < 1:
        return " " * max(width, 0)
    parts = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    low, high = min(parts), max(parts)
    apart = high - low
    level = [
        0 if apart <= 1e-12 * max(abs(high), abs(low), 1e-300) else (p - low) / apart for p in parts
    ]
    return "".join(BARS[min(int(share * 8), 7)] for share in level).rjust(width)
