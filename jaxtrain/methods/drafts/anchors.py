"""Blocks of a draft in packed rows: where they begin and which tokens they guess, drawn on the
host.

    tokens    p p p A B C D E . .       p: context, A to E: trained, one document, blocks of 3
    anchor    . . . 1 . 1 . . . .       blocks  A [B C]  and  C [D E]
    next      1 2 3 4 5 6 7 -1          what follows; at a fork of a tree one child, drawn

A tree stands for its branches. A block that crosses a fork continues along one child, drawn by the
number of branches through each, and counts for all branches through its anchor: the expectation of
the weighted sum over a tree's tokens is the sum over its separate branches.

Shapes: A microsteps, B rows, T packed tokens, N blocks.
"""

import numpy as np

from jaxtrain.batch import ANCHOR, NEXT, Batch

WEIGHTS = "nll"
"""Weights of the tokens to guess. The recipe's, until `follow` divides them by the branches through
each token: times those through the anchor, a token's weight in a block."""


def count_branches(batch: Batch) -> np.ndarray:
    """Return int64 [..., T]: the branches of its tree through each token, that is the leaves under
    it."""
    length = batch.prev.shape[-1]
    prev = batch.prev.reshape(-1, length)
    rows, children = np.nonzero(prev >= 0)
    leaf = np.ones(prev.shape, np.int64)
    leaf[rows, prev[rows, children]] = 0
    before = np.zeros((len(prev), length + 1), np.int64)
    np.cumsum(leaf, axis=1, out=before[:, 1:])
    counts = np.take_along_axis(before, batch.until.reshape(-1, length), axis=1) - before[:, :-1]
    return counts.reshape(batch.prev.shape)


def draw_next(batch: Batch, branches: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the stream NEXT, int32 [..., T]; one of several children, by its branches."""
    length = batch.prev.shape[-1]
    prev, num_branches = batch.prev.reshape(-1, length), branches.reshape(-1, length)
    index = np.arange(length)
    next_index = np.full(prev.shape, -1, np.int32)
    # Nearly all tokens stand right behind the one before them on their branch.
    behind = np.zeros(prev.shape, bool)
    behind[:, :-1] = prev[:, 1:] == index[:-1]
    np.copyto(next_index, (index + 1).astype(np.int32), where=behind)
    rows, children = np.nonzero((prev >= 0) & (prev != index - 1))
    if len(rows):
        parents = prev[rows, children]
        first = np.unique(np.stack([rows, parents], 1), axis=0)
        first = first[behind[first[:, 0], first[:, 1]]]
        rows = np.concatenate([rows, first[:, 0]])
        parents = np.concatenate([parents, first[:, 1]])
        children = np.concatenate([children, first[:, 1] + 1])
        # The first of exponential clocks whose rates are the branches.
        clock = rng.exponential(size=len(rows)) / num_branches[rows, children]
        order = np.argsort(-clock, kind="stable")
        next_index[rows[order], parents[order]] = children[order]
    return next_index.reshape(batch.prev.shape)


def follow(batch: Batch, rng: np.random.Generator) -> tuple[Batch, np.ndarray]:
    """Return (the batch with the stream NEXT and weights by branch, `count_branches`)."""
    branches = count_branches(batch)
    weights = batch.weights[WEIGHTS]
    return batch._replace(
        weights={**batch.weights, WEIGHTS: (weights / branches).astype(weights.dtype)},
        streams={**batch.streams, NEXT: draw_next(batch, branches, rng)},
    ), branches


def draw_anchors(
    batch: Batch, branches: np.ndarray, num_anchors: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw the stream ANCHOR of a batch from `follow`: in each row `num_anchors` of the trained
    tokens whose next one trains, too, or all of them if there are fewer; without replacement."""
    length = batch.prev.shape[-1]
    weights = batch.weights[WEIGHTS].reshape(-1, length)
    after = batch.streams[NEXT].reshape(-1, length)
    guessed = np.take_along_axis(weights, np.maximum(after, 0), axis=1)
    fits = (weights > 0) & (after >= 0) & (guessed > 0)
    crowded = np.flatnonzero(fits.sum(1) > num_anchors)
    if len(crowded):
        keys = np.where(fits[crowded], rng.random((len(crowded), length)), 2.0)
        chosen = np.argpartition(keys, num_anchors - 1, axis=1)[:, :num_anchors]
        fits[crowded] = False
        fits[crowded[:, None], chosen] = True
    anchors = np.where(fits, branches.reshape(-1, length), 0).astype(np.int32)
    return anchors.reshape(batch.prev.shape)


def block_weights(batch: Batch, block_size: int) -> np.ndarray:
    """Return float64 [N, block_size]: the weight of each token of each block, without decay; that
    of the anchor in the first place."""
    length = batch.prev.shape[-1]
    anchor, after = (batch.streams[name].reshape(-1, length) for name in (ANCHOR, NEXT))
    weights = batch.weights[WEIGHTS].reshape(-1, length)
    rows, position = np.nonzero(anchor)
    token_weights = np.zeros((len(rows), block_size))
    share, valid = anchor[rows, position].astype(np.float64), np.ones(len(rows), bool)
    for slot in range(block_size):
        token_weights[:, slot] = np.where(valid, share * weights[rows, position], 0.0)
        position = after[rows, position]
        valid &= position >= 0
        position = np.maximum(position, 0)
    return token_weights


def decay_of(block_size: int, decay: float | None) -> np.ndarray:
    """Return float64 [block_size]: the factor of each slot's weight; 0 for the anchor, which is
    known."""
    slot = np.arange(block_size)
    factor = np.ones(block_size) if decay is None else np.exp(-np.maximum(slot - 1, 0) / decay)
    return np.where(slot > 0, factor, 0.0)


def lay_blocks(
    batch: Batch,
    rng: np.random.Generator,
    *,
    num_anchors: int,
    block_size: int,
    decay: float | None,
    component: str,
    by_block: bool = False,
) -> Batch:
    """Return a batch [A, B, T] with streams ANCHOR and NEXT, weights by branch, and the denominator
    of the loss's `component`: the sum of the weights of all guesses of the step, or with `by_block`
    of all blocks (of their anchors' weights)."""
    batch, branches = follow(batch, rng)
    anchors = draw_anchors(batch, branches, num_anchors, rng)
    batch = batch._replace(streams={**batch.streams, ANCHOR: anchors})
    weights = block_weights(batch, block_size)
    total = weights[:, 0].sum() if by_block else (weights * decay_of(block_size, decay)).sum()
    microsteps = batch.tokens.shape[0]
    dtype = batch.weights[WEIGHTS].dtype
    denom = np.full(microsteps, total if total > 0 else 1.0, dtype)
    return batch._replace(denoms={**batch.denoms, component: denom})
