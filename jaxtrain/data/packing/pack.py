"""Trees into rows: depth-first layout, first-fit-decreasing, and the arrays of a Batch.

    tree:   trunk ─┬─ a          row (T = 9):  trunk trunk  a  a  b  b  b   .  .
                   └─ b          prev          -1    0      1  2  1  4  5  -1 -1
                                 until          7    7      4  4  7  7  7   8  9
                                 positions      0    1      2  3  2  3  4   0  0

In depth-first preorder every subtree is one contiguous run, so a single number per key (`until`)
describes the queries that see it. The weights of each tree are divided by its own K.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from jaxtrain.batch import IMAGE_SLOT, Batch, Images
from jaxtrain.data.packing.tree import Forest, PlacedImages, Tree, Weights, join_images

Normalize = Literal["token", "tree", "branch"]


@dataclass(frozen=True, eq=False)
class PackedTree:
    """A tree, or a forest, in depth-first preorder; all arrays [N], indices from its own start."""

    tokens: np.ndarray
    positions: np.ndarray
    """Depth along the branch."""
    prev: np.ndarray
    """Index of the token that predicts this one; -1 at the root."""
    until: np.ndarray
    """End of the subtree: this token is visible to queries index <= q < until."""
    owner: np.ndarray
    """Branch of the token; for a shared token the first one."""
    node: np.ndarray
    """Index of the token's node, numbered through all trees of a forest."""
    weights: Weights
    """float64; 0 on the first token of a tree, which nothing predicts."""
    streams: dict[str, np.ndarray]
    num_branches: int
    since: np.ndarray | None = None
    """First query that sees this token; None: the token itself."""
    images: PlacedImages | None = None


class ImagePacker(Protocol):
    """Maker of the patches of rows with images: data/images/patches.py."""

    @property
    def row_patches(self) -> int | None:
        """Patches of a row at most; None: any number."""
        ...

    def bucket(self, rows: Sequence[PlacedImages | None]) -> int:
        """Return the patches P to which the longest of some rows is padded; 0 without images."""
        ...

    def pack(self, rows: Sequence[PlacedImages | None], num_patches: int) -> Images:
        """Read the images of B rows; arrays [B, P, ...]."""
        ...


@dataclass(frozen=True)
class Fields:
    """Weights and streams of every batch of a run, so that all batches have one structure and one
    compiled program, whatever their rows contain."""

    components: tuple[str, ...] = ("nll",)
    """Loss components that have weights."""
    streams: Mapping[str, Any] = field(default_factory=dict)
    """Dtype of each stream by name; np.dtype((np.float32, (8,))) is a vector of 8 for each token.
    """
    since: bool = False
    """True if tokens of some trees see later ones."""
    dtype: Any = np.float32
    """Dtype of the weights."""
    images: ImagePacker | None = None
    """What makes the patches of images; None: rows hold text alone."""


NLL = Fields()
"""Log-likelihood alone: weights and nothing else."""


def lay_out(tree: Tree | Forest, normalize: Normalize = "token") -> PackedTree:
    """Lay out a tree, or a forest tree by tree; `normalize` divides the weights of each tree.

    "token": by K, so that a tree counts as its average branch (weight g/K). "tree": by the sum of
    its weights, so that each tree counts as one. "branch": by 1, so that each branch counts as one
    (weight g), which is per-branch training.
    """
    if isinstance(tree, Forest):
        return _join([lay_out(part, normalize) for part in tree.trees])
    if len(tree.nodes) == 1:
        packed = _lay_out_chain(tree)
    else:
        packed = _lay_out_nodes(tree)
    for name, values in packed.weights.items():
        values[0] = 0.0
        if normalize == "token":
            values /= packed.num_branches
        elif normalize == "tree":
            total = values.sum()
            if total:
                packed.weights[name] = values / total
    return packed


def _lay_out_chain(tree: Tree) -> PackedTree:
    node = tree.nodes[0]
    n = len(node.tokens)
    index = np.arange(n, dtype=np.int32)
    zeros = np.zeros(n, np.int32)
    return PackedTree(
        tokens=node.tokens,
        positions=index,
        prev=index - 1,
        until=np.full(n, n, np.int32),
        owner=zeros,
        node=zeros,
        weights={name: np.array(values, np.float64) for name, values in node.weights.items()},
        streams=dict(node.streams),
        num_branches=tree.num_branches,
        since=node.since,
        images=node.images,
    )


def _lay_out_nodes(tree: Tree) -> PackedTree:
    order = tree.preorder()
    lengths = np.array([len(node.tokens) for node in tree.nodes])
    starts = np.zeros(len(order), np.int64)
    starts[order[1:]] = np.cumsum(lengths[order])[:-1]
    stops = starts + lengths
    subtree_stops = stops.copy()
    first_branch = np.full(len(order), tree.num_branches)
    np.minimum.at(first_branch, list(tree.ends), np.arange(tree.num_branches))
    for index in range(len(order) - 1, 0, -1):
        parent = tree.nodes[index].parent
        subtree_stops[parent] = max(subtree_stops[parent], subtree_stops[index])
        first_branch[parent] = min(first_branch[parent], first_branch[index])

    node = np.repeat(order, lengths[order]).astype(np.int32)
    index = np.arange(len(node), dtype=np.int32)
    prev = index - 1
    for child in order[1:]:
        prev[starts[child]] = stops[tree.nodes[child].parent] - 1
    nodes = [tree.nodes[i] for i in order]
    since = None
    if any(n.since is not None for n in nodes):
        since = index.copy()
        for i, n in zip(order, nodes, strict=True):
            if n.since is not None:
                since[starts[i] : stops[i]] = starts[i] + n.since
    return PackedTree(
        tokens=np.concatenate([n.tokens for n in nodes]),
        positions=(index - starts[node] + np.array(tree.depths)[node]).astype(np.int32),
        prev=prev,
        until=subtree_stops[node].astype(np.int32),
        owner=first_branch[node].astype(np.int32),
        node=node,
        weights={
            name: np.concatenate([np.asarray(n.weights[name], np.float64) for n in nodes])
            for name in nodes[0].weights
        },
        streams={
            name: np.concatenate([n.streams[name] for n in nodes]) for name in nodes[0].streams
        },
        num_branches=tree.num_branches,
        since=since,
        images=join_images([(n.images, len(n.tokens)) for n in nodes]),
    )


def _join(parts: Sequence[PackedTree]) -> PackedTree:
    """Concatenate packed trees into one."""
    lengths = [len(part.tokens) for part in parts]
    start = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths).astype(np.int32)
    branches = np.cumsum([0, *(part.num_branches for part in parts)])
    nodes = np.cumsum([0, *(int(part.node.max()) + 1 for part in parts)])

    def behind(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    def moved(name: str, by: np.ndarray) -> np.ndarray:
        return behind(name) + np.repeat(by[:-1], lengths).astype(np.int32)

    prev, since = behind("prev"), None
    if any(part.since is not None for part in parts):
        first_queries = [
            np.arange(n, dtype=np.int32) if p.since is None else p.since
            for p, n in zip(parts, lengths, strict=True)
        ]
        since = np.concatenate(first_queries) + start
    named = {name for part in parts for name in part.streams}
    return PackedTree(
        tokens=behind("tokens"),
        positions=behind("positions"),
        prev=np.where(prev >= 0, prev + start, -1),
        until=behind("until") + start,
        owner=moved("owner", branches),
        node=moved("node", nodes),
        weights={
            name: np.concatenate([part.weights[name] for part in parts])
            for name in parts[0].weights
        },
        streams={name: np.concatenate([part.streams[name] for part in parts]) for name in named},
        num_branches=int(branches[-1]),
        since=since,
        images=join_images([(p.images, n) for p, n in zip(parts, lengths, strict=True)]),
    )


def fit_rows(
    lengths: Sequence[int],
    row_tokens: int,
    opened: Sequence[int] = (),
    patches: tuple[Sequence[int], int] | None = None,
) -> list[list[int]]:
    """Assign lengths to rows, first fit decreasing: indices of `lengths` by row, ties in order.

    `opened` are in the first row already and stay there. Every length is at most `row_tokens`.
    (Johnson 1973: at most 11/9 of the optimal number of rows, plus one.) patches: those of each
    tree, and of a row, which must fit as well.
    """
    counts, row_patches = patches if patches is not None else ([0] * len(lengths), 0)
    sizes = np.stack([np.asarray(lengths, np.int64), np.asarray(counts, np.int64)], axis=1)
    full = np.array([row_tokens, row_patches])
    rows: list[list[int]] = []
    room = np.zeros((len(sizes) + 1, 2), np.int64)
    if len(opened):
        rows.append(list(opened))
        room[0] = full - sizes[list(opened)].sum(0)
    already = set(opened)
    for index in np.argsort(-sizes[:, 0], kind="stable").tolist():
        if index in already:
            continue
        size = sizes[index]
        assert size[0] <= row_tokens, f"a tree of {size[0]} tokens in a row of {row_tokens}"
        assert size[1] <= row_patches, f"a tree of {size[1]} patches in a row of {row_patches}"
        fits = np.all(room[: len(rows)] >= size, axis=1)
        row = int(np.argmax(fits)) if len(rows) else 0
        if not len(rows) or not fits[row]:
            row = len(rows)
            rows.append([])
            room[row] = full
        rows[row].append(index)
        room[row] -= size
    return rows


def build_batch(
    rows: Sequence[Sequence[PackedTree]],
    row_tokens: int,
    fields: Fields = NLL,
    num_patches: int | None = None,
) -> Batch:
    """Build a batch [B, T] of `rows`, each a list of packed trees that fit; a row may be empty.

    num_patches: P, where other microsteps of the step have more images than these rows.

    Padding: token 0, prev -1, until index + 1, owner -1, weights and streams 0. A component or
    stream that a tree lacks is 0 on its tokens.
    """
    shape = (len(rows), row_tokens)
    index = np.arange(row_tokens, dtype=np.int32)
    owner = np.full(shape, -1, np.int32)
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        prev=np.full(shape, -1, np.int32),
        until=np.broadcast_to(index + 1, shape).copy(),
        weights={name: np.zeros(shape, fields.dtype) for name in fields.components},
        since=np.broadcast_to(index, shape).copy() if fields.since else None,
        owner=owner,
        streams={name: np.zeros(shape, dtype) for name, dtype in fields.streams.items()},
    )
    for b, row in enumerate(rows):
        start = branch = 0
        for tree in row:
            stop = start + len(tree.tokens)
            assert stop <= row_tokens, f"row {b} holds more than {row_tokens} tokens"
            span = (b, slice(start, stop))
            batch.tokens[span] = tree.tokens
            batch.positions[span] = tree.positions
            np.add(tree.prev, start, out=batch.prev[span], where=tree.prev >= 0)
            batch.until[span] = tree.until + start
            owner[span] = tree.owner + branch
            if tree.since is not None:
                assert batch.since is not None, (
                    "a tree with since in batches without (Fields.since)"
                )
                batch.since[span] = tree.since + start
            for name, values in tree.weights.items():
                batch.weights[name][span] = values
            for name in batch.streams.keys() & tree.streams.keys():
                np.copyto(batch.streams[name][span], tree.streams[name], casting="same_kind")
            start, branch = stop, branch + tree.num_branches
    if fields.images is not None:
        return _add_images(batch, rows, fields.images, num_patches)
    pictured = any(tree.images is not None for row in rows for tree in row)
    assert not pictured, "a tree with images in batches without (Fields.images)"
    return batch


def _add_images(
    batch: Batch, rows: Sequence[Sequence[PackedTree]], packer: ImagePacker, num_patches: int | None
) -> Batch:
    """Add the stream of slots, and patches if any row has images."""
    placed = join_row_images(rows, batch.tokens.shape[1])
    slots = np.full(batch.tokens.shape, -1, np.int32)
    for b, row in enumerate(placed):
        if row is not None:
            slots[b] = row.slot
    if num_patches is None:
        num_patches = packer.bucket(placed)
    images = packer.pack(placed, num_patches) if num_patches else None
    return batch._replace(images=images, streams={**batch.streams, IMAGE_SLOT: slots})


def join_row_images(
    rows: Sequence[Sequence[PackedTree]], row_tokens: int | None = None
) -> list[PlacedImages | None]:
    """Join the images of each row's trees."""
    return [
        join_images([(tree.images, len(tree.tokens)) for tree in row], row_tokens) for row in rows
    ]


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Stack A batches [B, T] of one shape and structure to [A, B, T]; denominators become [A].

    Raises ValueError if the denominators differ, because they are those of the whole step.
    """
    first = batches[0]
    for batch in batches:
        if batch.denoms != first.denoms:
            raise ValueError(
                f"microsteps of one step have one denominator: {first.denoms}, {batch.denoms}"
            )
    return Batch(*(_stack(values) for values in zip(*batches, strict=True)))


def _stack(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        assert all(value.keys() == first.keys() for value in values), "microsteps differ in fields"
        return {name: _stack([value[name] for value in values]) for name in first}
    if first is None:
        assert all(value is None for value in values), "microsteps differ in fields"
        return None
    if isinstance(first, Images):
        return Images(*(_stack(arrays) for arrays in zip(*values, strict=True)))
    return np.stack(values)


SCORING_ROW, MIN_SCORING_ROW = 2048, 128
"""Tokens of rows that several short texts share in scoring, and of the shortest row."""
BARE = Fields(components=())
"""No weights and no streams."""


def pack_for_scoring(
    packed: Sequence[PackedTree],
    *,
    rows: int,
    share_rows: bool,
    row_tokens: int = SCORING_ROW,
    fields: Fields = BARE,
) -> Iterator[tuple[Batch, list[tuple[int, int, int]]]]:
    """Pack texts or trees into batches [1, rows, T], by default without weights.

    Yields (batch, [(index of a tree, row, its first token)]). share_rows False: one tree per row,
    for models that do not support several. T is at least `row_tokens` if the trees fill such rows,
    and a power of two, so that few programs are compiled.
    """
    lengths = [len(tree.tokens) for tree in packed]
    needed = max(lengths, default=0)
    if share_rows:
        needed = max(needed, min(row_tokens, -(-sum(lengths) // rows)))
    length = MIN_SCORING_ROW
    while length < needed:
        length *= 2
    if share_rows:
        members = fit_rows(lengths, length)
    else:
        members = [[index] for index in np.argsort(lengths)[::-1].tolist()]
    for first in range(0, len(members), rows):
        batch_rows = members[first : first + rows]
        trees = [[packed[index] for index in row] for row in batch_rows]
        trees += [[]] * (rows - len(trees))
        spans = [
            (index, number, int(start))
            for number, row in enumerate(batch_rows)
            for index, start in zip(
                row, np.cumsum([0, *(lengths[index] for index in row)]), strict=False
            )
        ]
        yield stack_batches([build_batch(trees, length, fields)]), spans
