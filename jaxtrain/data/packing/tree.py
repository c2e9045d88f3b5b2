"""Prefix trees of tokens: the form of a training example in all methods.

A document is a tree of one node, a preference pair a trunk with two leaves, an agent episode a
trunk with a side leaf per hidden thought. A *branch* is a path from the root to an end node. The
model sees each branch as if it were alone, and computes each token once.

    system+user ─┬─ think 1                      K = 3 branches end at: think 1, think 2, answer 2
                 └─ answer 1, user ─┬─ think 2
                                    └─ answer 2

A token that several branches share carries the sum of their weights: with weight 1 on each branch
that is g, the number of branches through it (specification of tree training, prime-rl PR 2405).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Image:
    """A picture of a row, as the model sees it; two with the same key are the same."""

    key: str
    """SHA-256 of the file's bytes, in hex."""
    size: tuple[int, int] = field(compare=False)
    """Width and height in pixels, upright."""
    num_patches: int = field(compare=False)
    """Patches that the tower reads."""
    num_features: int = field(compare=False)
    """Tokens that stand for it."""
    source: Path | bytes = field(compare=False, repr=False)
    """The file, or what it holds."""
    origin: str = field(default="", compare=False)
    """Row and number of the image, for messages."""


@dataclass(frozen=True, eq=False)
class PlacedImages:
    """Images of a sequence of tokens, and which of their features each token stands for."""

    images: tuple[Image, ...]
    """Each once, whatever the number of its places."""
    slot: np.ndarray
    """int32 [n]: index into the features of `images`, one image behind the other; -1 for text."""

    @property
    def num_patches(self) -> int:
        """Patches of the images."""
        return sum(image.num_patches for image in self.images)

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [number of images + 1]: the first slot of each image, and their number."""
        return np.cumsum([0, *(image.num_features for image in self.images)])

    def cut(self, start: int, stop: int) -> "PlacedImages | None":
        """Return the images of the tokens from `start` to `stop`; None if there are none."""
        return join_images([(PlacedImages(self.images, self.slot[start:stop]), stop - start)])

    def distinguish(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens int64 [n] with a negative number, which no id is, in place of each that
        stands for an image: equal where image and feature are."""
        places = np.flatnonzero(self.slot >= 0)
        slots = self.slot[places]
        index = np.searchsorted(self.starts, slots, side="right") - 1
        # 44 bits of the hash, 16 of the feature's number.
        keys = np.array([int(image.key[:11], 16) for image in self.images], np.int64)
        numbers = np.asarray(tokens, np.int64).copy()
        numbers[places] = -1 - (keys[index] << 16 | (slots - self.starts[index]))
        return numbers


def join_images(
    parts: Sequence[tuple[PlacedImages | None, int]], length: int | None = None
) -> PlacedImages | None:
    """Join the images of consecutive runs of tokens, each with its number of tokens; images that
    stand in several have their slots in common. length: tokens of the result, more than the runs
    have. None if no token stands for an image."""
    if all(placed is None for placed, _ in parts):
        return None
    total = sum(count for _, count in parts) if length is None else length
    slot = np.full(total, -1, np.int32)
    begins: dict[Image, int] = {}
    end = offset = 0
    for placed, count in parts:
        for index, image in enumerate(placed.images if placed is not None else ()):
            assert placed is not None
            first, last = placed.starts[index : index + 2]
            places = np.flatnonzero((placed.slot >= first) & (placed.slot < last))
            if not len(places):
                continue
            if image not in begins:
                begins[image], end = end, end + image.num_features
            slot[offset + places] = placed.slot[places] - first + begins[image]
        offset += count
    return PlacedImages(tuple(begins), slot) if begins else None


@dataclass(frozen=True, eq=False)
class Node:
    """A run of tokens without a fork inside."""

    parent: int
    """Index of the parent node in the tree; -1 for the root."""
    tokens: np.ndarray
    """int32 [n] token ids, n >= 1."""
    weights: Weights
    """{component: float [n]} summed over the branches through this node; 0 is context."""
    streams: dict[str, np.ndarray] = field(default_factory=dict)
    """{name: [n, ...]} other per-token values of any dtype: advantages, old log-probs, targets."""
    role: str = ""
    """Label for previews: "user", "think", "response"."""
    since: np.ndarray | None = None
    """int32 [n] index in the node of the first token that sees each token; None is causal. All 0:
    the tokens of the node see each other, like the prompt of a prefix language model. i // k * k:
    blocks of k tokens see each other."""
    images: PlacedImages | None = None
    """Images that stand in the node, each whole."""

    def __post_init__(self) -> None:
        if len(self.tokens) == 0:
            raise ValueError("a node has no tokens")
        if self.images is not None and len(self.images.slot) != len(self.tokens):
            raise ValueError("images: one slot for each token")
        if self.since is not None:
            index = np.arange(len(self.tokens))
            if (
                self.since.shape != index.shape
                or not ((0 <= self.since) & (self.since <= index)).all()
            ):
                raise ValueError("since: one index for each token, from 0 to the token's own")
        for name, values in (*self.weights.items(), *self.streams.items()):
            if len(values) != len(self.tokens):
                raise ValueError(f"{name}: {len(values)} values for {len(self.tokens)} tokens")


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes in topological order: one root at index 0, every parent before its children."""

    nodes: tuple[Node, ...]
    ends: tuple[int, ...] = ()
    """Node at which each branch ends; empty: the leaves, ascending. Needed if a sequence ends
    inside another one or occurs twice."""
    origin: str = ""
    """File and row, for messages."""
    controls: int = 0
    """Control tokens that its texts spell: see control_tokens.py."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a tree needs at least one node")
        if self.nodes[0].parent != -1:
            raise ValueError(
                f"node 0 is the root, its parent must be -1, not {self.nodes[0].parent}"
            )
        for index, node in enumerate(self.nodes[1:], start=1):
            if not 0 <= node.parent < index:
                raise ValueError(f"node {index}: parent {node.parent} is not in 0..{index - 1}")
        leaves = self.leaves()
        if not self.ends:
            object.__setattr__(self, "ends", leaves)
        elif not set(leaves) <= set(self.ends) <= set(range(len(self.nodes))):
            raise ValueError(f"ends {self.ends} must be nodes and include every leaf {leaves}")

    def children(self, index: int) -> tuple[int, ...]:
        """Return the child nodes, ascending, which is also the order of the depth-first walk."""
        return self._children[index]

    def leaves(self) -> tuple[int, ...]:
        """Return the nodes without children, ascending."""
        return tuple(i for i, children in enumerate(self._children) if not children)

    def root_path(self, leaf: int) -> tuple[int, ...]:
        """Return the nodes from the root to the end of a branch; ValueError if none ends there."""
        if not 0 <= leaf < len(self.nodes):
            raise IndexError(f"node {leaf} is not in 0..{len(self.nodes) - 1}")
        if leaf not in self.ends:
            raise ValueError(f"no branch ends at node {leaf}; they end at {self.ends}")
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        return tuple(reversed(path))

    @property
    def num_branches(self) -> int:
        """K, the number of branches; at least 1."""
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the packed tree."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def flat_tokens(self) -> int:
        """Tokens of all branches separately."""
        return sum(self.branch_lengths()) if len(self.nodes) > 1 else self.num_tokens

    @property
    def num_patches(self) -> int:
        """Patches of its images."""
        return sum(image.num_patches for image in self.images)

    @cached_property
    def images(self) -> tuple[Image, ...]:
        """The images of all nodes, each once."""
        listed = (node.images.images for node in self.nodes if node.images is not None)
        return tuple(dict.fromkeys(itertools.chain.from_iterable(listed)))

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        children: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes[1:], start=1):
            children[node.parent].append(index)
        return tuple(map(tuple, children))

    @cached_property
    def branch_counts(self) -> tuple[int, ...]:
        """g of each node: number of branches through it."""
        counts = [0] * len(self.nodes)
        for end in self.ends:
            counts[end] += 1
        for index in range(len(self.nodes) - 1, 0, -1):
            counts[self.nodes[index].parent] += counts[index]
        return tuple(counts)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Position of each node's first token along its branch."""
        depths = [0]
        for node in self.nodes[1:]:
            depths.append(depths[node.parent] + len(self.nodes[node.parent].tokens))
        return tuple(depths)

    def branch_lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each branch, in the order of `ends`."""
        return tuple(self.depths[end] + len(self.nodes[end].tokens) for end in self.ends)

    def preorder(self) -> list[int]:
        """Return the node indices depth first, children in ascending order."""
        order, stack = [], [0]
        while stack:
            index = stack.pop()
            order.append(index)
            stack.extend(reversed(self._children[index]))
        return order


@dataclass(frozen=True, eq=False)
class TreeGroup:
    """Trees that belong to the same optimizer step: the branches of one tree."""

    trees: tuple[Tree, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all trees."""
        return sum(tree.num_tokens for tree in self.trees)

    @property
    def controls(self) -> int:
        """Control tokens that the texts spell; not a sum, as the trees are branches of one."""
        return max(tree.controls for tree in self.trees)


@dataclass(frozen=True, eq=False)
class Forest:
    """Consecutive trees of one row, because a stream of one points into another: the two answers of
    a pair with separate prompts. Packs like a single tree."""

    trees: tuple[Tree, ...]
    """At least one."""

    def __post_init__(self) -> None:
        if not self.trees:
            raise ValueError("a forest needs at least one tree")

    @property
    def num_tokens(self) -> int:
        """Tokens of all trees."""
        return sum(tree.num_tokens for tree in self.trees)

    @property
    def flat_tokens(self) -> int:
        """Tokens of all branches separately."""
        return sum(tree.flat_tokens for tree in self.trees)

    @property
    def num_patches(self) -> int:
        """Patches of its images."""
        return sum(image.num_patches for image in self.images)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of all trees, each once."""
        return tuple(dict.fromkeys(image for tree in self.trees for image in tree.images))

    @property
    def num_branches(self) -> int:
        """Number of branches of all trees."""
        return sum(tree.num_branches for tree in self.trees)

    @property
    def origin(self) -> str:
        """File and row, for messages."""
        return self.trees[0].origin

    @property
    def controls(self) -> int:
        """Control tokens that the texts spell; not a sum, as the trees come from one row."""
        return max(tree.controls for tree in self.trees)


def chain(tokens: np.ndarray, weights: Weights, *, role: str = "", origin: str = "") -> Tree:
    """Build the tree of one branch."""
    return Tree((Node(-1, tokens, weights, role=role),), origin=origin)


def build_tree(
    parts: Iterable[tuple[int, Sequence[int] | np.ndarray, Sequence[float] | np.ndarray, str]],
    *,
    component: str = "nll",
    origin: str = "",
) -> Tree:
    """Build a tree from (parent, tokens, weights of ONE branch, role), summed over branches.

    A mask [n] of bools is a weight of 1 on every branch, so that the token carries g.
    """
    bare = []
    for parent, tokens, weights, role in parts:
        token_array = np.asarray(tokens, np.int32)
        bare.append(
            Node(parent, token_array, {component: np.asarray(weights, np.float64)}, role=role)
        )
    tree = Tree(tuple(bare), origin=origin)
    nodes = tuple(
        Node(node.parent, node.tokens, {component: node.weights[component] * g}, role=node.role)
        for node, g in zip(tree.nodes, tree.branch_counts, strict=True)
    )
    return Tree(nodes, tree.ends, origin)
