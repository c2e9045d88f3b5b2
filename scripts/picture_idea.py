"""Pictures of the idea: eight tokens as a tree, a row and a mask; the shapes that methods have.

All arrays are those that training packs.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from picture_style import BLUE, GRAY, GREEN, ORANGE, RED, TEXT, draw_bars, draw_box, open_figure

from jaxtrain.data.packing.pack import PackedTree, lay_out
from jaxtrain.data.packing.tree import Tree, build_tree

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NODES = [(-1, ["2", "+", "2", "="]), (0, ["4", "."]), (0, ["5", "."])]
"""(parent, words) of the eight tokens."""
COLORS = [GRAY, BLUE, ORANGE]


class Example(NamedTuple):
    """The eight tokens."""

    tree: Tree
    packed: PackedTree
    words: list[str]

    def color(self, slot: int) -> str:
        return COLORS[self.packed.node[slot]]


def make_example() -> Example:
    """Build the tree of NODES as training does."""
    tree = build_tree(
        (parent, np.arange(len(words)), np.full(len(words), float(parent >= 0)), "")
        for parent, words in NODES
    )
    packed = lay_out(tree)
    words = {index: iter(words) for index, (_, words) in enumerate(NODES)}
    return Example(tree, packed, [next(words[index]) for index in packed.node])


def hide_axes(axes: Axes, width: float, height: tuple[float, float]) -> None:
    axes.set_xlim(-0.6, width)
    axes.set_ylim(*height)
    axes.axis("off")


def draw_tree_of_eight() -> Figure:
    """A prompt of four tokens and two answers of two."""
    example = make_example()
    figure = open_figure(5.6, 1.9)
    axes = figure.subplots()
    heights = {0: 0.0, 1: 0.55, 2: -0.55}
    places = {}
    for slot, word in enumerate(example.words):
        node = int(example.packed.node[slot])
        places[slot] = (float(example.packed.positions[slot]), heights[node])
        draw_box(axes, places[slot], word, example.color(slot))
    for slot, previous in enumerate(example.packed.prev):
        if previous >= 0:
            (x0, y0), (x1, y1) = places[int(previous)], places[slot]
            axes.plot([x0 + 0.4, x1 - 0.4], [y0, y1], color=TEXT, lw=1.3, zorder=0)
    axes.text(5.55, 0.55, "answer a", va="center")
    axes.text(5.55, -0.55, "answer b", va="center")
    axes.text(1.5, 0.55, "prompt", ha="center", va="center")
    hide_axes(axes, 6.6, (-1, 1))
    return figure


def draw_row_of_eight() -> Figure:
    """The row with its three arrays, and an arrow from each token to the one that predicts it."""
    example = make_example()
    packed, count = example.packed, len(example.words)
    figure = open_figure(5.6, 2.9)
    axes = figure.subplots()
    for slot, word in enumerate(example.words):
        draw_box(axes, (slot, 0), word, example.color(slot))
        axes.text(slot, 0.55, str(slot), ha="center", va="center", fontsize=9)
        previous = int(packed.prev[slot])
        if previous >= 0:
            jump = slot - previous > 1
            axes.annotate(
                "",
                (slot, -0.33),
                (previous, -0.33),
                arrowprops={
                    "arrowstyle": "->",
                    "color": RED if jump else TEXT,
                    "connectionstyle": f"arc3,rad={0.42 if jump else 0.5}",
                },
            )
    rows = (("prev", packed.prev), ("until", packed.until), ("position", packed.positions))
    for line, (name, values) in enumerate(rows):
        height = -1.75 - 0.5 * line
        axes.text(-0.7, height, name, ha="right", va="center")
        for slot in range(count):
            axes.text(slot, height, str(int(values[slot])), ha="center", va="center")
    axes.text(-0.7, 0.55, "slot", ha="right", va="center", fontsize=9)
    axes.text(-0.7, 0, "token", ha="right", va="center")
    hide_axes(axes, count - 0.4, (-3.1, 0.8))
    axes.set_xlim(-2.1, count - 0.4)
    return figure


def draw_mask_of_eight() -> Figure:
    """Which token sees which: query q sees key k where k <= q < until[k]."""
    example = make_example()
    packed, count = example.packed, len(example.words)
    figure = open_figure(3.9, 3.9)
    axes = figure.subplots()
    for query in range(count):
        for key in range(count):
            visible = key <= query < packed.until[key]
            face = example.color(key) if visible else "none"
            axes.add_patch(Rectangle((key, query), 1, 1, facecolor=face, edgecolor=TEXT, lw=0.5))
    axes.set_xlim(0, count)
    axes.set_ylim(count, 0)
    axes.set_aspect("equal")
    middles = np.arange(count) + 0.5
    axes.set_xticks(middles, example.words)
    axes.set_yticks(middles, example.words)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="key: what is seen", ylabel="query: who looks")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_copies() -> Figure:
    """The tree beside the flat copies of its branches, with counted tokens."""
    example = make_example()
    figure = open_figure(5.6, 2.6)
    first, second = figure.subplots(2, 1, height_ratios=(1, 2))
    for slot, word in enumerate(example.words):
        draw_box(first, (slot, 0), word, example.color(slot))
    first.set_title(f"one packed row: {example.tree.num_tokens} tokens computed")
    lengths = example.tree.branch_lengths()
    for line, leaf in enumerate((1, 2)):
        words = [word for _, words in (NODES[0], NODES[leaf]) for word in words]
        for position, word in enumerate(words):
            repeated = line > 0 and position < len(NODES[0][1])
            color = RED if repeated else COLORS[0 if position < len(NODES[0][1]) else leaf]
            draw_box(second, (position, -0.75 * line), word, color)
    second.text(6.0, -0.75, "red: computed again", va="center", fontsize=10)
    second.set_title(f"two flat copies: {sum(lengths)} tokens computed")
    hide_axes(first, 9, (-0.4, 0.4))
    hide_axes(second, 9, (-1.15, 0.4))
    return figure


SHAPES = {
    "documents": [(-1, 3, GRAY), (-1, 2, GRAY)],
    "pair": [(-1, 3, GRAY), (0, 2, GREEN), (0, 2, RED)],
    "group of four": [(-1, 2, GRAY), (0, 3, BLUE), (0, 2, BLUE), (0, 3, BLUE), (0, 1, BLUE)],
    "agent, thoughts hidden later": [
        (-1, 2, GRAY),
        (0, 2, ORANGE),
        (0, 1, BLUE),
        (2, 1, GRAY),
        (3, 2, ORANGE),
        (3, 1, BLUE),
    ],
}
"""Nodes as (parent, tokens, color)."""


def draw_shapes() -> Figure:
    """The shapes of rows that methods train on, each with its tokens counted."""
    figure = open_figure(5.6, 4.4)
    grid = figure.subplots(2, 2).flat
    for axes, (name, nodes) in zip(grid, SHAPES.items(), strict=True):
        _draw_shape(axes, name, nodes)
    return figure


def _draw_shape(axes: Axes, name: str, nodes: list[tuple[int, int, str]]) -> None:
    starts, heights, lines = {}, {}, 0
    for index, (parent, count, color) in enumerate(nodes):
        start = 0.0 if parent < 0 else starts[parent] + nodes[parent][1] + 0.5
        siblings = [i for i, node in enumerate(nodes) if node[0] == parent]
        if parent >= 0 and siblings[0] == index:
            height = heights[parent]
        else:
            height = -float(lines)
        lines += parent < 0 or siblings[0] != index
        starts[index], heights[index] = start, height
        for token in range(count):
            center = (start + token, height)
            draw_box(axes, center, "", color, width=0.85, height=0.6)
        if parent >= 0:
            end = starts[parent] + nodes[parent][1] - 0.55
            axes.plot([end, start - 0.45], [heights[parent], height], color=TEXT, lw=1.2, zorder=0)
    num_tokens = sum(count for _, count, _ in nodes)
    leaves = [i for i in range(len(nodes)) if all(node[0] != i for node in nodes)]
    flat = sum(_path_length(nodes, leaf) for leaf in leaves)
    axes.set_title(f"{name}\n{num_tokens} tokens, flat {flat}", fontsize=11)
    axes.set_xlim(-0.6, 9.5)
    axes.set_ylim(-3.5, 0.5)
    axes.axis("off")


def _path_length(nodes: list[tuple[int, int, str]], index: int) -> int:
    total = 0
    while index >= 0:
        total += nodes[index][1]
        index = nodes[index][0]
    return total


def draw_coinciding_losses() -> Figure:
    """Losses of the same trajectories as trees and branch by branch, and their difference."""
    results = json.loads((RESULTS / "tree_curves_cpu.json").read_text())
    tree, flat = (np.array(results["losses"][mode]) for mode in ("tree", "grouped"))
    steps = np.arange(1, len(tree) + 1)
    figure = open_figure(5.6, 3.6)
    first, second = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    first.plot(steps, flat, color=ORANGE, lw=5, alpha=0.5, label="branch by branch")
    first.plot(steps, tree, color=BLUE, lw=1.6, label="as trees")
    first.set_title("training loss")
    first.legend()
    second.plot(steps, np.abs(tree - flat) / flat, color=GRAY)
    second.set(title="difference, relative", xlabel="step", yscale="log")
    return figure


def draw_cost() -> Figure:
    """Time and memory of one step on an agent's trajectory, from the benchmark's file."""
    results = json.loads((RESULTS / "tree_vs_flat_h200.json").read_text())
    rows = {row["mode"]: row for row in results["rows"]}
    modes = {"tree": "tree", "per_branch": "branches, packed", "grouped": "branch by branch"}
    figure = open_figure(5.6, 3.2)
    first, second = figure.subplots(2, 1)
    colors = [BLUE, ORANGE, ORANGE]
    draw_bars(first, list(modes.values()), [rows[m]["step_s"] for m in modes], "{:.2f} s", colors)
    draw_bars(
        second, list(modes.values()), [rows[m]["peak_gib"] for m in modes], "{:.1f} GiB", colors
    )
    first.set_title("one training step")
    second.set_title("peak memory")
    return figure


PICTURES = {
    "idea_tree": draw_tree_of_eight,
    "idea_row": draw_row_of_eight,
    "idea_mask": draw_mask_of_eight,
    "idea_copies": draw_copies,
    "idea_shapes": draw_shapes,
    "idea_losses": draw_coinciding_losses,
    "idea_cost": draw_cost,
}
