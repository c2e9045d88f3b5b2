"""Which tokens of packed documents are masked, and what each guess counts; drawn on the host.

    document       p p A B C D E     p: context, A to E: trained
    t = 0.6        p p A _ C _ _     each trained token masked with probability p(t), its weight 1/p

Every document has its own t. Of held-out documents the number of masked tokens is drawn instead,
l of n, and weighs n / l: the same bound (Ou et al. 2024, arXiv:2406.03736) with less variance.

Shapes: A microsteps, B rows, T packed tokens, N trained tokens of all rows, M documents.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError

WEIGHTS = "nll"
"""Weights of the trained tokens; those of the masked ones once they are drawn."""
TARGET = "target"
"""Stream int32: the tokens as they were before any was masked."""
RATIO = "mask_ratio"
"""Stream float32: on masked tokens the probability p of their document, elsewhere 0."""
Schedule = Literal["linear", "cosine", "quadratic"]


@dataclass(frozen=True)
class Noise:
    """How documents are masked; methods/diffusion/config.py says what the numbers mean."""

    mask_id: int
    schedule: Schedule = "linear"
    low: float = 1e-3
    """Smallest p."""
    high: float = 1.0
    """Largest p."""
    stratified: bool = True
    weighted: bool = True
    """Whether a guess counts 1 / p."""
    normalize: Literal["document", "token"] = "document"
    component: str = "masked"
    """Of the loss; its denominator is that of the whole step."""

    def ratio(self, t: np.ndarray) -> np.ndarray:
        """p of documents at times t in [0, 1]."""
        match self.schedule:
            case "linear":
                share = t
            case "cosine":
                share = np.cos(np.pi / 2 * (1.0 - t))
            case "quadratic":
                share = t**2
        return self.low + (self.high - self.low) * share


class TrainedDocuments(NamedTuple):
    """The trained tokens of a batch, by document."""

    positions: np.ndarray
    """int64 [N] index of each trained token in the flat batch."""
    owner: np.ndarray
    """int64 [N] its document, from 0 in the order of the rows."""
    weight: np.ndarray
    """float64 [N]."""
    length: np.ndarray
    """int64 [M] trained tokens of each document."""


class MaskedBatch(NamedTuple):
    """A masked batch, and numbers about it."""

    batch: Batch
    metrics: dict[str, float]


def find_documents(batch: Batch) -> TrainedDocuments:
    """The trained tokens of a host batch of lone documents."""
    T = batch.tokens.shape[-1]
    index = np.arange(T)
    alone = (batch.prev < 0) | (batch.prev == index - 1)
    assert alone.all(), "documents that share a prefix have no direction to see both sides in"
    weight = np.asarray(batch.weights[WEIGHTS], np.float64).ravel()
    trained = np.flatnonzero(weight)
    root = (np.arange(weight.size) - batch.positions.ravel())[trained]
    _, owner, length = np.unique(root, return_inverse=True, return_counts=True)
    return TrainedDocuments(trained, owner.reshape(-1), weight[trained], length)


def mask(batch: Batch, noise: Noise, seed: list[int]) -> MaskedBatch:
    """A batch [A, B, T] to train on. The draw depends on the seed and the batch's documents in
    their order alone: not on how they are split over microsteps."""
    documents = find_documents(batch)
    rng = np.random.default_rng(seed)
    count = len(documents.length)
    t = rng.random(count)
    if noise.stratified and count:
        t = (rng.permutation(count) + t[0]) / count
    ratio = noise.ratio(t)[documents.owner]
    chosen = rng.random(batch.tokens.size)[documents.positions] < ratio
    factor = 1.0 / ratio if noise.weighted else np.ones_like(ratio)
    return fill_in(batch, documents, chosen, ratio, factor, noise)


def mask_held_out(batch: Batch, noise: Noise, seed: int, draws: int) -> list[Batch]:
    """A held-out batch masked `draws` times, by the seed and its own tokens: always alike. The
    numbers of masked tokens of each document lie evenly between one and all."""
    documents, noise = find_documents(batch), replace(noise, weighted=True)
    rng = np.random.default_rng([seed, zlib.crc32(batch.tokens.tobytes())])
    first = rng.random(len(documents.length))
    order = rng.permutation(draws)
    masked = []
    for draw in order:
        share = (draw + first) / draws
        num = 1 + np.minimum(np.floor(share * documents.length), documents.length - 1).astype(
            np.int64
        )
        key = rng.random(len(documents.positions))
        by_key = np.lexsort((key, documents.owner))
        rank = np.empty(len(key), np.int64)
        starts = np.cumsum(documents.length) - documents.length
        rank[by_key] = np.arange(len(key)) - starts[documents.owner[by_key]]
        ratio = (num / documents.length)[documents.owner]
        chosen = rank < num[documents.owner]
        masked.append(fill_in(batch, documents, chosen, ratio, 1.0 / ratio, noise).batch)
    return masked


def fill_in(
    batch: Batch,
    documents: TrainedDocuments,
    chosen: np.ndarray,
    ratio: np.ndarray,
    factor: np.ndarray,
    noise: Noise,
) -> MaskedBatch:
    """The batch with the mask token in the place of the chosen of its trained tokens [N], with
    their ratios p and the factors of their weights."""
    shape, dtype = batch.tokens.shape, batch.weights[WEIGHTS].dtype
    real = (batch.prev >= 0) | (batch.until > np.arange(shape[-1]) + 1)
    if (batch.tokens[real] == noise.mask_id).any():
        raise UserError(
            f"the data hold token {noise.mask_id}, which stands for what is masked; set"
            " task.mask_token_id or task.mask_token to one that no text holds"
        )
    total = np.bincount(documents.owner, documents.weight, len(documents.length))
    weight = documents.weight * factor * chosen
    if noise.normalize == "document":
        weight = weight / total[documents.owner]
        denom = float(len(documents.length))
    else:
        denom = float(total.sum() if noise.weighted else (documents.weight * chosen).sum())
    where = documents.positions[chosen]

    def lay(values: np.ndarray, dtype: Any) -> np.ndarray:
        flat = np.zeros(batch.tokens.size, dtype)
        flat[where] = values[chosen]
        return flat.reshape(shape)

    tokens = batch.tokens.copy()
    tokens.reshape(-1)[where] = noise.mask_id
    changed = batch._replace(
        tokens=tokens,
        since=(np.arange(shape[-1]) - batch.positions).astype(np.int32),
        weights={**batch.weights, WEIGHTS: lay(weight, dtype)},
        streams={
            **batch.streams,
            TARGET: batch.tokens.astype(np.int32),
            RATIO: lay(ratio, np.float32),
        },
        denoms={**batch.denoms, noise.component: np.full(shape[0], denom or 1.0, dtype)},
    )
    num_masked, num_documents = int(chosen.sum()), max(1, len(documents.length))
    metrics = {
        "num_masked_tokens": float(num_masked),
        "mask_ratio": num_masked / max(1, int(real.sum())),
        "importance_weight_avg": float(factor[chosen].mean()) if num_masked else 0.0,
        "answer_ratio": len(documents.positions) / max(1, int(real.sum())),
        "avg_answer_length": len(documents.positions) / num_documents,
    }
    return MaskedBatch(changed, metrics)
