"""Drawing tokens from logits: temperature, truncation, and the log-prob of what was drawn.

Shapes: B rows, V vocab. Every row has numbers of its own, so requests of all kinds share a batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.rollout.types import Sampling


class Draw(NamedTuple):
    """The numbers of a Sampling for each row [B]: changing them compiles nothing."""

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray


class Kind(NamedTuple):
    """What the rows of a batch need at most; each value compiles a program."""

    random: bool
    """Whether any row has a temperature above 0."""
    truncate: bool
    """Whether any row cuts its distribution."""


def read_draws(samplings: list[Sampling]) -> Draw:
    """The numbers of a Sampling for each row."""
    return Draw(
        np.array([one.temperature for one in samplings], np.float32),
        np.array([one.top_k for one in samplings], np.int32),
        np.array([one.top_p for one in samplings], np.float32),
        np.array([one.min_p for one in samplings], np.float32),
    )


def find_kind(samplings: list[Sampling]) -> Kind:
    """What these rows need."""
    return Kind(
        any(one.temperature > 0 for one in samplings),
        any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in samplings),
    )


def sample(
    logits_BV: jax.Array, keys: jax.Array, draw: Draw, kind: Kind
) -> tuple[jax.Array, jax.Array]:
    """(token int32 [B], log-prob float32 [B] before truncation) from float logits [B, V].

    A row of temperature 0 takes the most probable token, and its log-prob is that of the
    distribution at temperature 1.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if not kind.random:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    else:
        greedy_B = draw.temperature == 0
        logits_BV = logits_BV / jnp.where(greedy_B, 1.0, draw.temperature)[:, None]
        kept_BV = cut(logits_BV, draw) if kind.truncate else logits_BV
        drawn_B = jax.vmap(jax.random.categorical)(keys, kept_BV)
        best_B = jnp.argmax(logits_BV, axis=-1)
        token_B = jnp.where(greedy_B, best_B, drawn_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def cut(logits_BV: jax.Array, draw: Draw) -> jax.Array:
    """logits with the tokens that top_k, top_p or min_p exclude at -inf; see `types.Sampling`.

    All three are thresholds on the sorted logits, so tokens exactly as probable as the last one
    kept are kept, too.
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
