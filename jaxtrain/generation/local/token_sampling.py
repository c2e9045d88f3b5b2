"""Sampling of tokens from logits: temperature, truncation, and log-probs.

Shapes: B rows, V vocab, in K classes of W tokens. Every row has its own parameters, so that
requests of all kinds share a batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.generation.engine import Sampling

WITHIN = 128
"""Tokens of a class: those whose ids differ by multiples of the number of classes, so that sharding
the vocabulary shards every class, and no class has to be moved."""


class DrawParameters(NamedTuple):
    """Sampling parameters of each row [B]; changing them compiles nothing."""

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray


class DrawKind(NamedTuple):
    """Union of what the rows of a batch need; each value compiles a program."""

    random: bool
    """True if any row has a temperature above 0."""
    truncate: bool
    """True if any row truncates its distribution."""


def read_draws(samplings: list[Sampling]) -> DrawParameters:
    """Return the sampling parameters of each row."""
    return DrawParameters(
        np.array([sampling.temperature for sampling in samplings], np.float32),
        np.array([sampling.top_k for sampling in samplings], np.int32),
        np.array([sampling.top_p for sampling in samplings], np.float32),
        np.array([sampling.min_p for sampling in samplings], np.float32),
    )


def find_kind(samplings: list[Sampling]) -> DrawKind:
    """Return what these rows need."""
    return DrawKind(
        any(sampling.temperature > 0 for sampling in samplings),
        any(
            sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 for sampling in samplings
        ),
    )


def sample(
    logits_BV: jax.Array,
    keys: jax.Array,
    draw: DrawParameters,
    kind: DrawKind,
    allowed_BW: jax.Array | None = None,
    never: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return (token int32 [B], log-prob float32 [B] before truncation) from float logits [B, V].

    A row of temperature 0 takes the most probable token, with its log-prob at temperature 1.
    allowed_BW: bits of the tokens that may be drawn, uint32; the log-prob is then over these alone.
    never: tokens that are not drawn, and not part of the log-prob's softmax.
    """
    logits_BV = exclude(logits_BV.astype(jnp.float32), never)
    if allowed_BW is not None:
        logits_BV = jnp.where(read_bits(allowed_BW, logits_BV.shape[1]), logits_BV, -jnp.inf)
    if not kind.random:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        lse_B = jax.nn.logsumexp(logits_BV, axis=-1)
    else:
        greedy_B = draw.temperature == 0
        logits_BV = logits_BV / jnp.where(greedy_B, 1.0, draw.temperature)[:, None]
        kept_BV = cut(logits_BV, draw) if kind.truncate else logits_BV
        best_B, drawn_B, lse_B = draw_by_class(keys, kept_BV)
        token_B = jnp.where(greedy_B, best_B, drawn_B)
        if kind.truncate:
            lse_B = jax.nn.logsumexp(logits_BV, axis=-1)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - lse_B


def exclude(logits_BV: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    """Return logits with some tokens at -inf."""
    return logits_BV.at[:, np.array(tokens)].set(-jnp.inf) if tokens else logits_BV


def read_bits(bits_BW: jax.Array, V: int) -> jax.Array:
    """Return bool [B, V] of uint32 [B, W]: bit v % 32 of word v // 32."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    lowest_bit = jnp.uint32(1)
    return (
        ((bits_BW[:, :, None] >> shifts) & lowest_bit).astype(bool).reshape(len(bits_BW), -1)[:, :V]
    )


def draw_by_class(keys: jax.Array, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (the first most probable token, one drawn from the softmax, log-sum-exp), each [B].

    A class of tokens is drawn by its share, then a token of it: the same distribution with V/W + W
    random numbers instead of V. These were most of the cost of drawing on a GPU.
    """
    V = logits_BV.shape[1]
    K = -(-V // WITHIN)
    padded_BV = jnp.pad(logits_BV, ((0, 0), (0, K * WITHIN - V)), constant_values=-jnp.inf)
    logits_BWK = padded_BV.reshape(-1, WITHIN, K)
    # Barriers: XLA would go through the logits again for what is a maximum or a sum of these.
    top_BK, place_BK = jax.lax.optimization_barrier(
        (logits_BWK.max(1), jnp.argmax(logits_BWK, axis=1).astype(jnp.int32))
    )
    top_B1 = top_BK.max(1, keepdims=True)
    # Of equally probable tokens the first, as argmax has it.
    token_BK = place_BK * K + jnp.arange(K, dtype=jnp.int32)
    best_B = jnp.where(top_BK == top_B1, token_BK, V - 1).min(1)
    total_BK = jax.lax.optimization_barrier(jnp.exp(logits_BWK - top_B1[:, None]).sum(1))
    class_key, token_key = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    class_B = jax.vmap(jax.random.categorical)(class_key, jnp.log(total_BK)).astype(jnp.int32)
    logits_BW = jnp.take_along_axis(logits_BWK, class_B[:, None, None], axis=2)[..., 0]
    within_B = jax.vmap(jax.random.categorical)(token_key, logits_BW).astype(jnp.int32)
    lse_B = top_B1[:, 0] + jnp.log(total_BK.sum(1))
    return best_B, within_B * K + class_B, lse_B


def cut(logits_BV: jax.Array, draw: DrawParameters) -> jax.Array:
    """Return logits with the tokens that top_k, top_p or min_p exclude at -inf; see
    `engine.Sampling`.

    All three are thresholds on the sorted logits, so tokens exactly as probable as the last
    accepted one are kept, too.
    """
    V = logits_BV.shape[-1]
    top_k, top_p, min_p = (x[:, None] for x in (draw.top_k, draw.top_p, draw.min_p))
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    in_k = jnp.arange(V) < jnp.where(top_k > 0, top_k, V)
    probs_BV = jax.nn.softmax(jnp.where(in_k, sorted_BV, -jnp.inf), axis=-1)
    # A token stays while those before it have not reached top_p: never fewer than one.
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    keep_BV = in_k & ((before_BV < top_p) | (top_p >= 1))
    last_B1 = jnp.min(jnp.where(keep_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    least_B1 = sorted_BV[:, :1] + jnp.log(min_p)
    return jnp.where(logits_BV >= jnp.maximum(last_B1, least_B1), logits_BV, -jnp.inf)
