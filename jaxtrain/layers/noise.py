"""What training draws for the tokens of a pass: masks of dropout, noise on embeddings.

A number is a hash of words, not a state that is passed on:

    seed, step, row of the step -> word of the row -> of the token -> of the layer -> of the module
                                                                       -> of each feature

So a mask is the same on every mesh and however the rows of a step are split into microsteps, in the
backward pass that computes it again, and in a run that went on from a checkpoint. Rows are packed:
a token's mask goes by its place in the row, and a token that several branches share has one.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain

GOLDEN = 0x9E3779B1
EMBEDDING = 0x3C6EF372
"""The module that noise on embeddings is drawn for."""


class RowNoise(NamedTuple):
    """What a model is given to be run as in training."""

    words_B: jax.Array
    """uint32: the word of each row."""
    alpha: float = 0.0
    """NEFTune's; 0 leaves embeddings as they are."""


class Noisy(nnx.Module):
    """A module that draws: the stack gives it the words [B, T] of its layer, in training alone."""

    words: Any

    def __init__(self):
        self.words = nnx.data(None)


def give_words(module: nnx.Module, words_BT: jax.Array) -> None:
    """The words of a layer to all in it that draw, in place."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, Noisy):
            node.words = words_BT


def row_words(seed: int, step: jax.Array, rows: jax.Array) -> jax.Array:
    """uint32, of the shape of `rows`, the numbers of rows within a step."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    draw = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), dtype=jnp.uint32))
    return draw(rows.reshape(-1)).reshape(rows.shape)


def token_words(words_B: jax.Array, length: int) -> jax.Array:
    """uint32 [B, T]: the word of every token of rows of T tokens."""
    places_T = jnp.arange(length, dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    return constrain(mix(words_B[:, None] ^ places_T[None]), "rows", "sequence")


def mix(words: jax.Array, salt: jax.Array | int = 0) -> jax.Array:
    """Other words that tell nothing of these: MurmurHash3's finalizer (Appleby, public domain)."""
    words = words ^ jnp.asarray(salt, jnp.uint32)
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def features_of(words_BT: jax.Array, salt: int, count: int) -> jax.Array:
    """uint32 [B, T, count]: a word for every feature of a module."""
    own_BT1 = mix(words_BT, salt)[..., None]
    places = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    return mix(own_BT1 + places[None, None])


def drop_out(x_BTF: jax.Array, words_BT: jax.Array, salt: int, rate: float) -> jax.Array:
    """x with a share `rate` of its numbers at 0 and the others divided by 1 - rate, as torch's
    Dropout in training."""
    kept = features_of(words_BT, salt, x_BTF.shape[-1]) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x_BTF * jnp.asarray(1 / (1 - rate), x_BTF.dtype), 0)


def shake(
    x_BTD: jax.Array,
    words_BT: jax.Array,
    positions_BT: jax.Array,
    until_BT: jax.Array,
    alpha: float,
) -> jax.Array:
    """Embeddings with uniform noise in +-alpha / sqrt(L D) (NEFTune: Jain et al. 2023,
    arXiv:2310.05914); L: tokens of the longest text through a token, without padding."""
    bits = features_of(words_BT, EMBEDDING, x_BTD.shape[-1])
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1
    length_BT = longest(positions_BT, until_BT).astype(jnp.float32)
    reach_BT = alpha * jax.lax.rsqrt(length_BT * x_BTD.shape[-1])
    return x_BTD + (unit * reach_BT[..., None]).astype(x_BTD.dtype)


def longest(positions_BT: jax.Array, until_BT: jax.Array) -> jax.Array:
    """int32 [B, T]: tokens of the longest branch of those that go through each token; 1 of padding.

    The highest position among a token's descendants, which stand from it up to `until`: the
    maximum over two spans of a power of two that cover them.
    """
    B, T = positions_BT.shape
    here_T = jnp.arange(T)[None]
    count_BT = jnp.maximum(until_BT - here_T, 1)
    level_BT = 31 - jax.lax.clz(count_BT.astype(jnp.int32))
    spans = [positions_BT]
    while (half := 2 ** (len(spans) - 1)) < T:
        shifted = jnp.pad(spans[-1][:, half:], ((0, 0), (0, half)))
        spans.append(jnp.maximum(spans[-1], shifted))
    all_KBT = jnp.stack(spans)
    row_B1 = jnp.arange(B)[:, None]
    last_BT = here_T + count_BT - jnp.left_shift(1, level_BT)
    return jnp.maximum(all_KBT[level_BT, row_B1, here_T], all_KBT[level_BT, row_B1, last_BT]) + 1
