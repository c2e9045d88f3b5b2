"""Output of tokenization: samples with loss weights, drops with reasons, and both as trees.

Beside its samples a row has notes, which are counted: examples that were dropped, and columns and
keys that nothing has read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.data.packing.tree import Forest, Node, PlacedImages, Tree, TreeGroup

TOO_MANY_PATCHES = "too many patches of images for a row (data.image_patches)"


@dataclass(frozen=True)
class Sample:
    """Tokenized example."""

    tokens: np.ndarray
    """int32 [n] token ids."""
    weights: np.ndarray
    """float32 [n] loss weight of each token; 0 is context, 1 an ordinary trained token."""
    origin: str = ""
    """File and row, for messages: "train.jsonl row 17"."""
    controls: int = 0
    """Control tokens that its texts spell: see control_tokens.py."""
    images: PlacedImages | None = None
    """Images that stand in it."""


@dataclass(frozen=True)
class RowNote:
    """Fact about a row that is counted under its reason, never silent."""

    reason: str
    """Short and countable: "too long", "column 'source'", ..."""
    origin: str = ""
    """File and row, for messages."""


class Dropped(RowNote):
    """Example that does not train, with the reason."""


class Unread(RowNote):
    """Column or key of a row that holds something and that nothing reads; `reason` names it."""


def weigh_ends(
    tokens: np.ndarray, weights: np.ndarray, ends: Iterable[int], mode: str, last: bool = True
) -> None:
    """Change the weights float32 [n] of tokens that end turns, as data.datasets[].train_on_eot
    says.

    ends: ids of these tokens. last: these tokens hold the last turn of the conversation.
    """
    places = np.flatnonzero(np.isin(tokens, [*ends]))
    weights[places] = float(mode == "all")
    if mode == "last" and last:
        weights[places[-1:]] = 1.0


def to_tree(sample: Sample, component: str = "nll") -> Tree:
    """Build the one-branch tree of a sample, with its weights as those of `component`."""
    weights = {component: sample.weights}
    node = Node(-1, np.asarray(sample.tokens, np.int32), weights, images=sample.images)
    return Tree((node,), origin=sample.origin, controls=sample.controls)


def to_trees(
    items: Sequence[Sample | Tree | Forest | TreeGroup | RowNote],
    row_tokens: int,
    component: str = "nll",
    row_patches: int | None = None,
) -> list[Tree | Forest | TreeGroup | RowNote]:
    """Convert the output of a row tokenizer to trees (or groups).

    Trees that cannot train are dropped here: those of more than `row_tokens` tokens, or whose
    images have more than `row_patches` patches, fit no row, and nothing predicts a trained first
    token.
    """
    checked: list[Tree | Forest | TreeGroup | RowNote] = []
    for item in items:
        if isinstance(item, Sample):
            item = to_tree(item, component) if len(item.tokens) else Dropped("empty", item.origin)
        trees: tuple[Tree | Forest, ...] = ()
        if isinstance(item, TreeGroup):
            trees = item.trees
        elif isinstance(item, Tree | Forest):
            trees = (item,)
        if trees and any(tree.num_tokens > row_tokens for tree in trees):
            item = Dropped("too long for a row", trees[0].origin)
        elif row_patches is not None and any(tree.num_patches > row_patches for tree in trees):
            item = Dropped(TOO_MANY_PATCHES, next(tree.origin for tree in trees))
        elif trees and not any(map(trains, trees)):
            item = Dropped("no trained token", trees[0].origin)
        checked.append(item)
    return checked


def note_unread(names: Iterable[str], origin: str) -> list[Unread]:
    """Return a note for each column and key that was not read."""
    return [Unread(name, origin) for name in names]


def select_turns(
    messages: Sequence[Mapping[str, Any]],
    mode: str,
    first: int = 0,
    roles: Sequence[str] = ("assistant",),
) -> list[int]:
    """Return the indices of the messages that train under `train_on`; a message whose own flag is
    false never does.

    mode "all" selects the messages whose flag is false, in which nothing trains. first: messages
    before it are context, except under "per_message". roles: whose turns "assistant" and "last"
    mean.
    """
    flags = [message.get("train") for message in messages]
    if mode == "all":
        return [index for index, flag in enumerate(flags) if flag is False]
    if mode == "per_message":
        return [index for index, flag in enumerate(flags) if flag is True]
    turns = [i for i in range(first, len(messages)) if messages[i]["role"] in roles]
    turns = turns[-1:] if mode == "last" else turns
    return [index for index in turns if flags[index] is not False]


def trains(tree: Tree | Forest) -> bool:
    """Return True if any token with a predictor carries weight."""
    if isinstance(tree, Forest):
        return any(map(trains, tree.trees))
    for index, node in enumerate(tree.nodes):
        for values in node.weights.values():
            if np.any(values[1:] if index == 0 else values):
                return True
    return False
