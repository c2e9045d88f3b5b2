"""A first look at tree data, before any weight is read, and the whole of it for `preprocess`."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.packing.tree import Tree, TreeGroup
from jaxtrain.data.packing.workload import describe_tree, describe_workload
from jaxtrain.data.sample import Dropped
from jaxtrain.data.sources.readers import STREAM_ROWS, MixturePart, is_stream
from jaxtrain.errors import UserError

NUM_ROWS = 16
"""Rows that a probe looks at."""


@dataclass(frozen=True)
class TreeProbe:
    """What the first rows became; str() of it is one line."""

    path: str
    num_rows: int | None
    """None for a stream."""
    samples: tuple[Tree, ...]
    """Trees, branches or samples of the rows looked at, depending on the mode."""
    dropped: dict[str, int]
    left_out: str = ""
    """What the selection left out, in words."""

    def __str__(self) -> str:
        size = "a stream" if self.num_rows is None else f"{self.num_rows:,} rows"
        branches = [tree.num_branches for tree in self.samples]
        return (
            f"{self.path}: {size}, the first {len(branches)} trees have"
            f" {sum(branches) / len(branches):.1f} branches on average"
            + (f"; the selection left out {self.left_out}" if self.left_out else "")
        )


def probe_trees(part: MixturePart) -> TreeProbe:
    """Build the trees of up to 16 rows; UserError when none of them trains, with the reasons."""
    trees, dropped, example = [], Counter(), {}
    for items in itertools.islice(_results(part), NUM_ROWS):
        for item in items:
            if isinstance(item, Dropped):
                dropped[item.reason] += 1
                example.setdefault(item.reason, item.origin)
            else:
                trees += item.trees if isinstance(item, TreeGroup) else [item]
    if not trees:
        reasons = "\n".join(
            f"  {count} x {reason} (first: {example[reason]})"
            for reason, count in dropped.most_common(5)
        )
        raise UserError(f"{part.name}: none of the rows looked at gives a tree:\n{reasons}")
    num_rows = None if is_stream(part.rows) else len(part.rows)
    left_out = ", ".join(f"{number:,} rows {why}" for why, number in part.left_out.items())
    return TreeProbe(part.name, num_rows, tuple(trees), dict(dropped), left_out)


def describe_part(part: MixturePart, tokenizer: Any, num_samples: int = 1) -> str:
    """Outlines of the first trees, the workload of all, and what was dropped and why."""
    began, trees, lines = time.monotonic(), [], []
    dropped: Counter[str] = Counter()
    num_rows = 0
    limit = STREAM_ROWS if is_stream(part.rows) else None
    for items in itertools.islice(_results(part), limit):
        num_rows += 1
        for item in items:
            if isinstance(item, Dropped):
                dropped[item.reason] += 1
                continue
            for tree in item.trees if isinstance(item, TreeGroup) else [item]:
                trees.append(tree)
                if len(trees) <= num_samples:
                    lines += [describe_tree(tree, tokenizer.decode), ""]
    speed = num_rows / max(time.monotonic() - began, 1e-9)
    lines.append(f"{part.name}: {num_rows:,} rows ({speed:,.0f} rows/s)")
    if trees:
        lines.append(describe_workload(trees))
    lines += [f"left out by the selection: {why}: {n:,}" for why, n in part.left_out.items()]
    lines += [f"dropped: {reason}: {count:,}" for reason, count in dropped.most_common()]
    return "\n".join(lines)


def _results(part: MixturePart) -> Iterator[Sequence]:
    rows = part.rows if is_stream(part.rows) else map(part.rows.__getitem__, range(len(part.rows)))
    for index, row in enumerate(rows):
        origin = f"{part.name} row {index}" if is_stream(part.rows) else part.origin(index)
        yield part.tokenize(row, origin)
