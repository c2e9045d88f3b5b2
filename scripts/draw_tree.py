"""Draw a packed tree and its mask: docs/images/tree_mask.png.

python scripts/draw_tree.py [OUTPUT]

A small caterpillar of two turns is packed as training packs it; everything drawn is read from the
arrays of that batch.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from jaxtrain.data.packing.pack import PackedTree, lay_out
from jaxtrain.data.packing.tree import Tree, build_tree

OUTPUT = Path("docs/images/tree_mask.png")

NODES = [
    # parent, tokens, trained, role, place in the drawing (column, row)
    (-1, 3, False, "user 1", (0, 0.0)),
    (0, 3, True, "think 1", (1, -0.62)),
    (0, 2, True, "answer 1", (1, 0.62)),
    (2, 2, False, "user 2", (2, 0.62)),
    (3, 3, True, "think 2", (3, 0.0)),
    (3, 2, True, "answer 2", (3, 1.24)),
]
COLORS = {"user": "#777777", "think": "#c9730a", "answer": "#22699f"}
SHADES = {"user 2": 0.25, "think 2": 0.3, "answer 2": 0.3}
"""How much lighter the second node of a role is."""


def make_tree() -> Tree:
    """The caterpillar; token ids do not matter here."""
    return build_tree(
        (parent, np.arange(count), np.full(count, float(trained)), role)
        for parent, count, trained, role, _ in NODES
    )


def color_of(role: str) -> tuple[float, float, float]:
    shade = SHADES.get(role, 0.0)
    return tuple(1 - (1 - part) * (1 - shade) for part in to_rgb(COLORS[role.split()[0]]))


def draw_nodes(axes, tree: Tree, packed: PackedTree) -> None:
    """Boxes with role, slots of the row, and weight; an edge from each parent."""
    width, height = 0.78, 0.62
    k = tree.num_branches
    for index, (parent, _, trained, role, (column, row)) in enumerate(NODES):
        slots = np.flatnonzero(packed.node == index)
        box = FancyBboxPatch(
            (column - width / 2, -row - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=color_of(role),
            edgecolor="none",
        )
        axes.add_patch(box)
        weight = f"weight {tree.branch_counts[index]}/{k}" if trained else "context"
        axes.text(column, -row + 0.15, role, ha="center", va="center", weight="bold", color="white")
        span = f"slots {slots[0]}–{slots[-1]}, until {packed.until[slots[0]]}"
        axes.text(column, -row - 0.03, span, ha="center", va="center", fontsize=7.5, color="white")
        axes.text(
            column, -row - 0.19, weight, ha="center", va="center", fontsize=7.5, color="white"
        )
        if parent >= 0:
            remaining, top = NODES[parent][4]
            axes.plot(
                [remaining + width / 2, column - width / 2],
                [-top, -row],
                color="0.4",
                lw=1.4,
                zorder=0,
            )
    for end, label in zip(tree.ends, ("branch 1", "branch 2", "branch 3"), strict=True):
        column, row = NODES[end][4]
        axes.text(column + width / 2 + 0.06, -row, label, va="center", fontsize=8.5, color="0.25")
    axes.set_xlim(-0.5, 4.0)
    axes.set_ylim(-1.72, 1.05)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_mask(axes, tree: Tree, packed: PackedTree) -> None:
    """Draw the attention mask, a cell colored by the key's node; `until` as the foot of each
    column."""
    n = len(packed.tokens)
    roles = [tree.nodes[i].role for i in packed.node]
    row = np.arange(n)
    seen = (row[None] <= row[:, None]) & (row[:, None] < packed.until[None])
    cells = np.ones((n, n, 3))
    for key in range(n):
        cells[seen[:, key], key] = color_of(roles[key])
    axes.imshow(cells, extent=(0, n, n, 0))
    for line in range(n + 1):
        axes.axhline(line, color="0.88", lw=0.5)
        axes.axvline(line, color="0.88", lw=0.5)
    edges = np.flatnonzero(np.diff(packed.node, prepend=-1, append=-1))
    for edge in edges:
        axes.axhline(edge, color="0.45", lw=0.9)
        axes.axvline(edge, color="0.45", lw=0.9)
    axes.add_patch(Rectangle((0, 0), n, n, fill=False, color="0.45", lw=1.2))
    middles = (edges[:-1] + edges[1:]) / 2
    names = [roles[edge] for edge in edges[:-1]]
    axes.set_xticks(middles, names, rotation=40, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.set_yticks(middles, names)
    axes.tick_params(length=0, labelsize=8.5)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, name in zip(labels, names, strict=True):
            label.set_color(color_of(name))
            label.set_weight("bold")
    for t in range(n):
        axes.text(t + 0.5, n + 0.5, packed.positions[t], ha="center", va="center", fontsize=7.5)
        axes.text(t + 0.5, n + 1.3, packed.prev[t], ha="center", va="center", fontsize=7.5)
        axes.text(t + 0.5, n + 2.1, packed.until[t], ha="center", va="center", fontsize=7.5)
    for y, name in ((0.5, "positions"), (1.3, "prev"), (2.1, "until")):
        axes.text(-0.3, n + y, name, ha="right", va="center", fontsize=8.5)
    axes.set_xlim(0, n)
    axes.set_ylim(n + 2.6, 0)
    axes.spines[:].set_visible(False)
    axes.set_ylabel("query", fontsize=9)
    axes.set_xlabel("key", fontsize=9)
    axes.xaxis.set_label_position("top")


def draw(output: Path) -> None:
    """Write the PNG."""
    tree = make_tree()
    packed = lay_out(tree)
    figure = Figure(figsize=(13, 5.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    first, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    draw_nodes(first, tree, packed)
    draw_mask(right, tree, packed)
    branches = sum(tree.branch_lengths())
    first.set_title(
        f"Three branches: {branches} tokens apart, {tree.num_tokens} in one packed row",
        loc="left",
        pad=14,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT)
    draw(parser.parse_args().output)
