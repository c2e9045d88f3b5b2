"""The feature network of EBFT: a frozen role, and features of token sequences by it.

    sequences of a group ──merge──> trees ──pack──> [A, B, T] ──Scorer.features──> [A, B, S, F]
      (prompt once, an answer a branch)   streams: which tokens count in which feature

Several devices compute a round's features together, each on rows of its own, as they train.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config, ModelConfig
from jaxtrain.core.architecture import find_tokenizer
from jaxtrain.core.bundle import ModelBundle, build_auxiliary_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import POOLING
from jaxtrain.data.packing.pack import Fields, PackedTree, fit_rows, lay_out
from jaxtrain.data.packing.prefixes import FlatSequence
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Tree
from jaxtrain.errors import UserError
from jaxtrain.huggingface.tokenizer import compare_vocabularies
from jaxtrain.methods.ebft.config import FeatureConfig
from jaxtrain.methods.ebft.feature_matching import Pooling, pooling_weights
from jaxtrain.methods.rl.batch_builder import grow

FEATURES = "features"
"""The role."""
CACHED_BYTES = 2**28
"""Of features of ground truths that are kept."""


def feature_role(features: FeatureConfig, config: Config, bundle: ModelBundle) -> Role:
    """The network of task.features; UserError for one that reads other tokens than the policy, is
    too short for its rows, or lacks a named layer."""
    full = () if bundle.adapter is None else bundle.adapter.full
    network = features.network
    if network == "bare" and full:
        raise UserError(
            f'task.features.network "bare": the adapter of adapter.path trains {", ".join(full)} in'
            ' full, which stays when the adapter is off; set it to "start"'
        )
    if network == "auto":
        network = "start" if bundle.adapter is None or full else "bare"
    if network == "bare":
        role = Role(bundle, "bare", in_loss=False)
    elif network == "start":
        role = Role(bundle, "start", in_loss=False, dtype="bfloat16")
    else:
        role = Role(_open_beside(network, config, bundle), "own", in_loss=False)
    try:
        features.find_layers(role.bundle.architecture.num_hidden_layers)
    except ValueError as error:
        raise UserError(str(error)) from None
    return role


def _open_beside(path: str, config: Config, bundle: ModelBundle) -> ModelBundle:
    """Another model's folder on the policy's mesh."""
    dtype = config.model.compute_dtype
    model = ModelConfig(
        path=path,
        param_dtype=dtype,
        compute_dtype=dtype,
        attention=config.model.attention,
        scan_layers=config.model.scan_layers,
    )
    key = "task.features.network"
    difference = compare_vocabularies(bundle.tokenizer, find_tokenizer(model))
    if difference is not None:
        raise UserError(
            f"{key} reads other tokens than the policy, whose tokens it is shown: {difference};"
            " choose a model of the policy's own family"
        )
    beside = build_auxiliary_bundle(model, bundle, key)
    if config.data.sequence_len > beside.architecture.longest:
        raise UserError(
            f"data.sequence_len {config.data.sequence_len} is longer than the feature network's"
            f" {beside.architecture.longest_said}; lower the first"
        )
    return beside


class FeatureSequence(NamedTuple):
    """A token sequence that needs a feature."""

    tokens: np.ndarray
    """int32 [n], the prompt first."""
    prompt: int
    """Tokens of the prompt."""


class FeatureRequest(NamedTuple):
    """Features to be computed: a batch, and where in its result each sequence's stands."""

    batch: Batch
    places: list[tuple[int, int, int]]
    """(microstep, row, number in the row) by sequence."""


def build_feature_request(
    groups: Sequence[Sequence[FeatureSequence]], method: Pooling, shape: StepShape, *, share: bool
) -> FeatureRequest:
    """Return a batch of the sequences of some groups, in order.

    share: compute the common beginning of a group's sequences once; else each is a row of its own.
    Longer sequences are cut to a row.
    """
    trees: list[Tree] = []
    members: list[list[tuple[int, FeatureSequence]]] = []
    number = 0
    for group in groups:
        numbered = [
            (number + member, sequence._replace(tokens=sequence.tokens[: shape.row_tokens]))
            for member, sequence in enumerate(group)
        ]
        number += len(group)
        for together in _partition(numbered):
            branches = [FlatSequence(sequence.tokens, {}) for _, sequence in together]
            grown = grow(branches, shape.row_tokens, share)
            taken = 0
            for tree in grown:
                trees.append(tree)
                members.append(together[taken : taken + tree.num_branches])
                taken += tree.num_branches
    sizes = [tree.num_tokens for tree in trees]
    rows = fit_rows(sizes, shape.row_tokens) if share else [[i] for i in range(len(trees))]
    most = max(sum(trees[i].num_branches for i in row) for row in rows)
    width = 1 << (most - 1).bit_length()  # few different programs
    P = len(pooling_weights(method, 1))
    places: list[tuple[int, int, int]] = [(-1, -1, -1)] * number
    packed = []
    for index, row in enumerate(rows):
        packed_row, first = [], 0
        for i in row:
            for k, (owner, _) in enumerate(members[i]):
                places[owner] = (index // shape.rows, index % shape.rows, first + k)
            sequences = [sequence for _, sequence in members[i]]
            packed_row.append(_weigh(trees[i], sequences, method, first, width, P))
            first += trees[i].num_branches
        packed.append(packed_row)
    fields = Fields((), {POOLING: np.dtype((np.float32, (width * P,)))})
    return FeatureRequest(replace(shape, fields=fields).build(packed), places)


def _partition(
    numbered: Sequence[tuple[int, FeatureSequence]],
) -> list[list[tuple[int, FeatureSequence]]]:
    """Group the sequences by their first token: a tree has one root."""
    by_tree: dict[int, list[tuple[int, FeatureSequence]]] = {}
    for number, sequence in numbered:
        by_tree.setdefault(int(sequence.tokens[0]), []).append((number, sequence))
    return list(by_tree.values())


def _weigh(
    tree: Tree,
    sequences: Sequence[FeatureSequence],
    method: Pooling,
    first: int,
    width: int,
    P: int,
) -> PackedTree:
    """The tree laid out, with what each token counts in the features first, first + 1, ... of the
    `width` of its row."""
    packed = lay_out(tree, "branch")
    weights_TN = np.zeros((len(packed.tokens), width, P), np.float32)
    for index, (end, sequence) in enumerate(zip(tree.ends, sequences, strict=True)):
        path, node = [], end
        while node >= 0:
            path.append(node)
            node = tree.nodes[node].parent
        on_path = np.flatnonzero(np.isin(packed.node, path))  # in preorder: root first
        counts_PT = pooling_weights(method, len(on_path), sequence.prompt)
        weights_TN[on_path, first + index] = counts_PT.T
    return replace(packed, streams={POOLING: weights_TN.reshape(len(packed.tokens), -1)})


class FeatureCache:
    """Features of ground truths, which a frozen network need not compute twice; those that were
    used last, within CACHED_BYTES."""

    def __init__(self, most: int = CACHED_BYTES):
        self.most, self.bytes = most, 0
        self._found: OrderedDict[bytes, np.ndarray] = OrderedDict()

    @staticmethod
    def key(sequence: FeatureSequence) -> bytes:
        """Return a key that is equal for equal tokens and prompt."""
        return hashlib.blake2b(
            sequence.tokens.tobytes() + b"%d" % sequence.prompt, digest_size=16
        ).digest()

    def get(self, key: bytes) -> np.ndarray | None:
        """Return the feature, or None."""
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def put(self, key: bytes, feature: np.ndarray) -> None:
        """Keep a feature; the oldest ones go."""
        if key not in self._found:
            self._found[key] = feature
            self.bytes += feature.nbytes
        while self.bytes > self.most and len(self._found) > 1:
            self.bytes -= self._found.popitem(last=False)[1].nbytes
