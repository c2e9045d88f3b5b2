"""The look of the drawn pictures of docs/: transparent, readable on white and on black."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

BLUE, ORANGE, GREEN, RED, GRAY = "#3d85c6", "#d17a1c", "#4f9a4f", "#c4544f", "#8a8a8a"
TEXT = "#7b7b7b"
"""A gray with a contrast of more than 4 to both backgrounds of the site."""

PIXELS = 72
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxtrain",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "figure.facecolor": "none",
    "savefig.transparent": True,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "lines.linewidth": 2,
}
matplotlib.rcParams.update(STYLE)


def open_figure(width: float = 5.6, height: float = 3.0) -> Figure:
    """Return an empty figure; narrow, so that its letters can be read on a telephone."""
    return Figure(figsize=(width, height), layout="constrained")


def write_svg(figure: Figure, path: Path) -> None:
    """Write the same bytes for the same drawing: no date, no random ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def draw_bars(
    axes: Axes,
    names: Sequence[str],
    values: Sequence[float],
    form: str,
    colors: Sequence[str] | str = BLUE,
) -> None:
    """Draw horizontal bars from the top down, each with its value behind it; no axis."""
    places = range(len(names))
    bars = axes.barh(places, values, color=colors, height=0.68)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.25)
    axes.bar_label(bars, [form.format(value) for value in values], padding=4)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw_box(axes: Axes, center: tuple[float, float], text: str, color: str, **size) -> None:
    """Draw a rounded box with white text; `size` has width and height."""
    width, height = size.get("width", 0.8), size.get("height", 0.6)
    box = FancyBboxPatch(
        (center[0] - width / 2, center[1] - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=color,
        edgecolor="none",
    )
    axes.add_patch(box)
    axes.text(
        *center,
        text,
        ha="center",
        va="center",
        color="white",
        fontsize=size.get("fontsize", 11),
    )
