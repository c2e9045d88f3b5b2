"""Blocks that go on from inside of packed documents, and the forest of both; on the host.

    document     d0 d1 d2 d3 d4 d5 d6 d7      anchors 3 and 5, blocks of 2 tokens, 2 samples
    forest       d0 d1 d2 [a a][b b] d3 d4 [c c][e e] d5 d6 d7
                       └── two branches  └── two more            d2 predicts d3 and the first a, b

A block stands for the document's tokens from its anchor on: their positions, their branch up to the
anchor. In preorder the branches of a token stand before the rest of the document, so that one
interval a key (`until`) still says who sees it, and `prev` who predicts whom.

Shapes: M microsteps, B rows, T packed tokens, A blocks of a row, N samples of each, G tokens of
each, U tokens of a row of the forest.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.batch import Batch

CE, RL = "nll", "rl"
"""Loss components: likelihood of the documents' tokens; policy gradient of the blocks'. In a row of
data the weights of RL say which tokens are the answer, behind which blocks begin."""
MULTIPLE = 64
"""Rows of the forest are as long as a multiple of this."""


@dataclass(frozen=True)
class BlockStrides:
    """Positions at which blocks begin, and their number."""

    stride: int
    """Tokens from one anchor to the next."""
    context: int
    """Least tokens of a document before its first anchor."""
    length: int
    """G."""
    samples: int
    """N."""
    prefix: int = 0
    """Tokens of an answer that its first anchor leaves out."""
    trained_only: bool = False
    """Whether a block stands for tokens of answers alone; else also for what comes between them."""

    def find(self, answer: np.ndarray) -> np.ndarray:
        """int64 anchors, ascending, in a document with the weights `answer` [n]. A document whose
        second token is part of the answer has no prompt: its blocks begin behind the context."""
        n = len(answer)
        trained = np.flatnonzero(answer[1:] > 0) + 1
        first = trained[0] if len(trained) else n
        start = self.context if first <= 1 else max(first + self.prefix, self.context)
        anchors = np.arange(start, n - self.length + 1, self.stride)
        if self.trained_only and len(anchors):
            complete = (answer[anchors[:, None] + np.arange(self.length)] > 0).all(1)
            anchors = anchors[complete]
        return anchors

    def most(self, row_tokens: int) -> int:
        """A: most blocks of a row of T tokens, however many documents it holds; at least 1."""
        least = self.context + self.length
        per_text = (row_tokens - least) // self.stride + 1 if row_tokens >= least else 0
        return max(per_text, row_tokens // least, 1)

    def grown(self, row_tokens: int) -> int:
        """U of rows of T tokens."""
        total = row_tokens + self.most(row_tokens) * self.samples * self.length
        return -(-total // MULTIPLE) * MULTIPLE


class BlockPositions(NamedTuple):
    """Positions of the blocks of rows; int32 arrays [M, B, ...] or [B, ...]."""

    predictor: Any
    """[A] index in the row of the token before the anchor, ascending; T: no block."""
    start: Any
    """[A] index in the forest of the first sample's first token, of sample n G * n later; U: no
    block."""
    column: Any
    """[T] index in the forest of each of the row's tokens; U: padding."""
    truth: Any
    """[A * G] index in the forest of the tokens that a block stands for; 0: no block."""


def lay_blocks(batch: Batch, strides: BlockStrides) -> tuple[Batch, BlockPositions]:
    """Lay out documents [M, B, T] and their blocks as a forest [M, B, U], whose block tokens are
    still 0; also returns the positions.

    Weights: CE those of the documents, RL 1 on every token of a block.
    """
    lead, T = batch.tokens.shape[:-1], batch.tokens.shape[-1]
    A, U = strides.most(T), strides.grown(T)
    flat = [np.asarray(x).reshape(-1, T) for x in (batch.tokens, batch.positions, batch.prev)]
    tokens, positions, prev = flat
    until, owner = np.asarray(batch.until).reshape(-1, T), np.asarray(batch.owner).reshape(-1, T)
    answer, nll = (np.asarray(batch.weights[name]).reshape(-1, T) for name in (RL, CE))
    rows, index = len(tokens), np.arange(U, dtype=np.int32)
    spots = BlockPositions(
        np.full((rows, A), T, np.int32),
        np.full((rows, A), U, np.int32),
        np.full((rows, T), U, np.int32),
        np.zeros((rows, A, strides.length), np.int32),
    )
    owners = np.full((rows, U), -1, np.int32)
    forest = Batch(
        tokens=np.zeros((rows, U), np.int32),
        positions=np.zeros((rows, U), np.int32),
        prev=np.full((rows, U), -1, np.int32),
        until=np.broadcast_to(index + 1, (rows, U)).copy(),
        weights={name: np.zeros((rows, U), nll.dtype) for name in (CE, RL)},
    )
    for row in range(rows):
        before = find_predictors(prev[row], until[row], answer[row], strides)
        count = len(before)
        real = (prev[row] >= 0) | (until[row] > np.arange(T) + 1)
        size = strides.samples * strides.length
        column = np.arange(T) + size * np.searchsorted(before, np.arange(T))
        real_columns = column[real]
        forest.tokens[row, real_columns] = tokens[row, real]
        forest.positions[row, real_columns] = positions[row, real]
        forest.prev[row, real_columns] = np.where(
            prev[row] >= 0, column[np.maximum(prev[row], 0)], -1
        )[real]
        # The last token of a document has no branches: the subtree ends right behind it.
        forest.until[row, real_columns] = (column[until[row] - 1] + 1)[real]
        owners[row, real_columns] = owner[row, real]
        forest.weights[CE][row, real_columns] = nll[row, real]
        spots.column[row, real] = real_columns
        if not count:
            continue
        start = column[before] + 1
        spots.predictor[row, :count], spots.start[row, :count] = before, start
        step = np.arange(strides.length)
        spots.truth[row, :count] = column[before[:, None] + 1 + step]
        branch = start[:, None] + strides.length * np.arange(strides.samples)
        columns = branch[:, :, None] + step
        forest.positions[row, columns] = (positions[row, before] + 1)[:, None, None] + step
        forest.prev[row, columns] = np.where(step > 0, columns - 1, column[before][:, None, None])
        forest.until[row, columns] = (branch + strides.length)[:, :, None]
        numbers = owner[row].max() + 1 + np.arange(branch.size).reshape(branch.shape)
        owners[row, columns] = numbers[:, :, None]
        forest.weights[RL][row, columns] = 1.0

    def shaped(x: np.ndarray) -> np.ndarray:
        return x.reshape(*lead, -1)

    named = {name: shaped(x) for name, x in forest.weights.items()}
    arrays = [shaped(getattr(forest, n)) for n in ("tokens", "positions", "prev", "until")]
    return (
        Batch(*arrays, weights=named, owner=shaped(owners)),
        BlockPositions(*map(shaped, spots)),
    )


def find_predictors(
    prev_T: np.ndarray, until_T: np.ndarray, answer_T: np.ndarray, strides: BlockStrides
) -> np.ndarray:
    """int64 indices of the tokens before the anchors of a row's documents, ascending."""
    roots = np.flatnonzero((prev_T < 0) & (until_T > np.arange(len(prev_T)) + 1))
    predictors = [root + strides.find(answer_T[root : until_T[root]]) - 1 for root in roots]
    return np.concatenate([np.zeros(0, np.int64), *predictors])


def count_documents(batch: Batch, spots: BlockPositions) -> tuple[int, int, int]:
    """(blocks, documents, documents without a block) of a batch of documents [M, B, T]."""
    T = batch.tokens.shape[-1]
    prev, until = (np.asarray(x).reshape(-1, T) for x in (batch.prev, batch.until))
    rows, roots = np.nonzero((prev < 0) & (until > np.arange(T) + 1))
    predictor = np.asarray(spots.predictor).reshape(len(prev), -1)
    first = np.array(
        [np.searchsorted(predictor[r], root) for r, root in zip(rows, roots, strict=True)]
    )
    without = sum(
        anchor >= predictor.shape[1] or predictor[r, anchor] >= until[r, root]
        for r, root, anchor in zip(rows, roots, first, strict=True)
    )
    return int((predictor < T).sum()), len(roots), int(without)
