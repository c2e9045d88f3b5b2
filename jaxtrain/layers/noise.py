"""Random bits for the tokens of a training pass: dropout masks, noise on embeddings.

Bits are hashes of indices, not draws from a generator with a state:

    seed, step, row of the step -> bits of the row -> of the token -> of the layer -> of the module
                                                                       -> of each feature

So a mask is the same on every mesh, for every split of a step's rows into microsteps, in the
backward pass that recomputes it, and in a run resumed from a checkpoint. Rows are packed: a token's
mask depends on its index in the row, and a token shared by several branches has one mask.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.distributed.sharding import constrain

GOLDEN = 0x9E3779B1
"""2**32 / the golden ratio, odd: multiples of it are far apart, so that hashes of consecutive
indices differ in many bits."""
EMBEDDING = 0x3C6EF372
"""Salt of the noise on embeddings."""


class RowNoise(NamedTuple):
    """Noise of a training pass; a model without one runs as in evaluation."""

    rng_bits_B: jax.Array
    """uint32 [B]: random bits of each row."""
    alpha: float = 0.0
    """NEFTune's; 0 leaves embeddings as they are."""


class Noisy(nnx.Module):
    """A module that draws: the stack sets the bits [B, T] of its layer, in training only."""

    rng_bits: Any

    def __init__(self):
        self.rng_bits = nnx.data(None)


def set_rng_bits(module: nnx.Module, rng_bits_BT: jax.Array) -> None:
    """Set the bits of all modules of a layer that draw, in place."""
    for _, node in list(nnx.iter_graph(module)):
        if isinstance(node, Noisy):
            node.rng_bits = rng_bits_BT


def row_rng_bits(seed: int, step: jax.Array, rows: jax.Array) -> jax.Array:
    """Return uint32 bits for `rows`, indices of rows within a step, in their shape."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    draw = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), dtype=jnp.uint32))
    return draw(rows.reshape(-1)).reshape(rows.shape)


def token_rng_bits(rng_bits_B: jax.Array, length: int) -> jax.Array:
    """Return uint32 [B, T] bits of the tokens of rows of T tokens."""
    index_T = jnp.arange(length, dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    return constrain(hash_bits(rng_bits_B[:, None] ^ index_T[None]), "rows", "sequence")


def hash_bits(bits: jax.Array, salt: jax.Array | int = 0) -> jax.Array:
    """Hash uint32 bits by MurmurHash3's finalizer (Appleby, public domain)."""
    bits = bits ^ jnp.asarray(salt, jnp.uint32)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def feature_bits(rng_bits_BT: jax.Array, salt: int, count: int) -> jax.Array:
    """Return uint32 [B, T, count] bits of every feature of a module."""
    module_BT1 = hash_bits(rng_bits_BT, salt)[..., None]
    index = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(GOLDEN)
    return hash_bits(module_BT1 + index[None, None])


def drop_out(x_BTF: jax.Array, rng_bits_BT: jax.Array, salt: int, rate: float) -> jax.Array:
    """Set a share `rate` of x's numbers to 0 and divide the others by 1 - rate, as torch's Dropout
    in training."""
    threshold = jnp.uint32(round(rate * 2**32))
    mask_BTF = feature_bits(rng_bits_BT, salt, x_BTF.shape[-1]) >= threshold
    return jnp.where(mask_BTF, x_BTF * jnp.asarray(1 / (1 - rate), x_BTF.dtype), 0)


def add_embedding_noise(
    x_BTD: jax.Array,
    rng_bits_BT: jax.Array,
    positions_BT: jax.Array,
    until_BT: jax.Array,
    alpha: float,
) -> jax.Array:
    """Add uniform noise in +-alpha / sqrt(L D) to embeddings (NEFTune: Jain et al. 2023,
    arXiv:2310.05914); L: tokens of the longest text through a token, without padding."""
    bits = feature_bits(rng_bits_BT, EMBEDDING, x_BTD.shape[-1])
    # 24 bits, as many as float32 represents exactly: uniform in [-1, 1).
    unit = (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1
    length_BT = longest(positions_BT, until_BT).astype(jnp.float32)
    reach_BT = alpha * jax.lax.rsqrt(length_BT * x_BTD.shape[-1])
    return x_BTD + (unit * reach_BT[..., None]).astype(x_BTD.dtype)


def longest(positions_BT: jax.Array, until_BT: jax.Array) -> jax.Array:
    """Return int32 [B, T]: the length of the longest branch through each token; 1 for padding.

    That is the highest position among a token's descendants, the tokens from it up to `until`: a
    range maximum, computed as the maximum of two overlapping spans of a power of two (sparse
    table).
    """
    B, T = positions_BT.shape
    index_T = jnp.arange(T)[None]
    count_BT = jnp.maximum(until_BT - index_T, 1)
    level_BT = 31 - jax.lax.clz(count_BT.astype(jnp.int32))
    spans = [positions_BT]
    while (half := 2 ** (len(spans) - 1)) < T:
        shifted = jnp.pad(spans[-1][:, half:], ((0, 0), (0, half)))
        spans.append(jnp.maximum(spans[-1], shifted))
    all_KBT = jnp.stack(spans)
    row_B1 = jnp.arange(B)[:, None]
    last_BT = index_T + count_BT - jnp.left_shift(1, level_BT)
    first_max, last_max = (all_KBT[level_BT, row_B1, start] for start in (index_T, last_BT))
    return jnp.maximum(first_max, last_max) + 1
