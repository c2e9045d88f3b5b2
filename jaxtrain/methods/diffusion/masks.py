"""Masked tokens of packed documents and the weights of their predictions, drawn on the host.

    document       p p A B C D E     p: context, A to E: trained
    t = 0.6        p p A _ C _ _     each trained token masked with probability p(t), its weight 1/p

Every document has its own t. For held-out documents the number of masked tokens is drawn instead, l
of n, with weight n / l: the same bound (Ou et al. 2024, arXiv:2406.03736) with less variance.

Shapes: A microsteps, B rows, T packed tokens, N trained tokens of all rows, M documents.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.errors import UserError

WEIGHTS = "nll"
"""Weights of the trained tokens; after masking, of the masked tokens."""
TARGET = "target"
"""Stream int32: the tokens before masking."""
RATIO = "mask_ratio"
"""Stream float32: on masked tokens the probability p of their document, elsewhere 0."""
Schedule = Literal["linear", "cosine", "quadratic"]


@dataclass(frozen=True)
class Noise:
    """Masking options; methods/diffusion/config.py documents them."""

    mask_id: int
    schedule: Schedule = "linear"
    low: float = 1e-3
    """Smallest p."""
    high: float = 1.0
    """Largest p."""
    stratified: bool = True
    weighted: bool = True
    """True: the weight of a prediction is 1 / p."""
    normalize: Literal["document", "token"] = "document"
    component: str = "masked"
    """Component of the loss; its denominator is that of the whole step."""

    def ratio(self, t: np.ndarray) -> np.ndarray:
        """Return p of documents at times t in [0, 1]."""
        match self.schedule:
            case "linear":
                share = t
            case "cosine":
                share = np.cos(np.pi / 2 * (1.0 - t))
            case "quadratic":
                share = t**2
        return self.low + (self.high - self.low) * share


class TrainedDocuments(NamedTuple):
    """Trained tokens of a batch, by document."""

    positions: np.ndarray
    """int64 [N] index of each trained token in the flat batch."""
    owner: np.ndarray
    """int64 [N] document of each trained token, from 0 in the order of rows."""
    weight: np.ndarray
    """float64 [N]."""
    length: np.ndarray
    """int64 [M] trained tokens of each document."""


class MaskedBatch(NamedTuple):
    """Masked batch with metrics."""

    batch: Batch
    metrics: dict[str, float]


def find_documents(batch: Batch) -> TrainedDocuments:
    """Return the trained tokens of a host batch whose documents share no prefixes."""
    T = batch.tokens.shape[-1]
    index = np.arange(T)
    alone = (batch.prev < 0) | (batch.prev == index - 1)
    assert alone.all(), "documents with a shared prefix cannot have bidirectional attention"
    weight = np.asarray(batch.weights[WEIGHTS], np.float64).ravel()
    trained = np.flatnonzero(weight)
    root = (np.arange(weight.size) - batch.positions.ravel())[trained]
    _, owner, length = np.unique(root, return_inverse=True, return_counts=True)
    return TrainedDocuments(trained, owner.reshape(-1), weight[trained], length)


def mask(batch: Batch, noise: Noise, seed: list[int]) -> MaskedBatch:
    """Mask a batch [A, B, T] for training. The draw depends only on the seed and the order of the
    documents, not on their split into microsteps."""
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
    """Mask a held-out batch `draws` times, seeded by its tokens, so that evaluations are equal. The
    numbers of masked tokens of a document are spread evenly between one and all."""
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
    """Replace the chosen trained tokens [N] by the mask token; set their ratios p and weights."""
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
