"""Embed: token ids to vectors; the same table is the head of a tied model."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtrain.distributed.sharding import constrain, count_ways, split_axes
from jaxtrain.layers.linear import LayerInit


class Embed(nnx.Module):
    """embedding [V, D]; `table()` is the output projection, too; rows are tokens.

    A slot, for jaxtrain.adapters: `adapter` is None, or a module that replaces some rows by its
    own, by `look_up(x, tokens)` in vectors and by `place(table)` in the table.
    """

    def __init__(self, num_embeddings: int, num_features: int, *, init: LayerInit):
        shape = (num_embeddings, num_features)
        table_VD = init.normal(shape)
        self.embedding = nnx.Param(table_VD, axes=("vocab", "embed"))
        self.dtype = jnp.dtype(init.dtype)
        self.adapter: Any = nnx.data(None)

    def table(self) -> jax.Array:
        """[V, D] as the head multiplies by it."""
        table_VD = self.embedding[...]
        return table_VD if self.adapter is None else self.adapter.place(table_VD)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = look_up(self.embedding[...], tokens_BT, self.dtype)
        if self.adapter is not None:
            x_BTD = self.adapter.look_up(x_BTD, tokens_BT)
        return constrain(x_BTD, "rows", "sequence", "features")


BIAS_COLUMNS = 64
"""Features of a biased head besides D: kernels on GPUs take multiples of this."""


class BiasedHead(Embed):
    """An output projection with a bias [V], which is one more feature of `table()`, followed by
    zeros; hidden states have a 1 there."""

    def __init__(self, num_embeddings: int, num_features: int, *, init: LayerInit):
        super().__init__(num_embeddings, num_features, init=init)
        self.bias = nnx.Param(jnp.zeros(num_embeddings, init.param_dtype), axes=("vocab",))

    def table(self) -> jax.Array:
        """[V, D + BIAS_COLUMNS] as the head multiplies by it."""
        table_VD = super().table()
        bias_V1 = self.bias[...].astype(table_VD.dtype)[:, None]
        bias_VC = jnp.pad(bias_V1, ((0, 0), (0, BIAS_COLUMNS - 1)))
        return jnp.concatenate([table_VD, bias_VC], axis=1)


def pad_for_bias(hidden: jax.Array) -> jax.Array:
    """Return [..., D + BIAS_COLUMNS]: hidden states as a `BiasedHead` multiplies them."""
    shape = (*hidden.shape[:-1], BIAS_COLUMNS)
    unit = jnp.broadcast_to(jnp.eye(1, BIAS_COLUMNS, dtype=hidden.dtype), shape)
    return jnp.concatenate([hidden, unit], axis=-1)


class SeenImages(NamedTuple):
    """Parts of the images of a batch that the text reads."""

    slot: jax.Array
    """int32 [B, T]: the feature at a token; -1: none."""
    features: jax.Array
    """[B, F, D], in the place of embeddings."""
    deep: tuple[jax.Array, ...]
    """[B, F, D] for each layer that adds some."""
    rope: jax.Array | None
    """int32 [B, T, 3] positions of families that rotate by time, row and column."""
    since: jax.Array | None = None
    """int32 [B, T] of families with layers of the mask IMAGES: the first token of each token's
    image; of text the token itself."""


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Return c tanh(logits / c), which lies in [-c, c]; None: the logits unchanged."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def begin_images(slot_BT: jax.Array, since_BP: jax.Array, merge: int) -> jax.Array:
    """int32 [B, T]: the first token of each token's image; of text the token itself. slot: the
    feature at a token, -1: text; since: the first patch of a patch's image, of which merge * merge
    make a feature."""
    patch_BT = jnp.maximum(slot_BT, 0) * merge**2
    first_BT = jnp.take_along_axis(since_BP, patch_BT, axis=1) // merge**2
    index_T = jnp.arange(slot_BT.shape[1], dtype=jnp.int32)
    return index_T - jnp.where(slot_BT < 0, 0, slot_BT - first_BT)


def take_features(slot_BT: jax.Array, features_BFD: jax.Array) -> jax.Array:
    """Return [B, T, D]: the feature of its slot at every token that has one, 0 at the others, whose
    slot is -1."""
    # They read beyond the features, which drops their gradients: else all would be added to one
    # feature, one after the other.
    index_BT = jnp.where(slot_BT < 0, features_BFD.shape[1], slot_BT)
    features_BFD = constrain(features_BFD, "rows", None, None)
    features_BTD = jnp.take_along_axis(
        features_BFD, index_BT[..., None], axis=1, mode="fill", fill_value=0
    )
    return constrain(features_BTD, "rows", "sequence", "features")


def look_up(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """table_VD[tokens_BT] in `dtype`, each device with the part of the table that it holds.

    Devices that share rows of tokens exchange ids, look up their features (or their words) of all
    these rows, and exchange the results: less to send than the table, and its gradient is made
    where it stays. The partitioner, left alone, replicates the activations of the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return table_VD[tokens_BT].astype(dtype)
    words, features = split_axes(("vocab", "embed"), table_VD.shape, mesh)
    rows, length = split_axes(("rows", "length"), tokens_BT.shape, mesh)
    if not set(features) <= {*rows, *length}:  # fewer tokens than devices: decoding
        return table_VD[tokens_BT].astype(dtype)
    dims = {axis: 0 if axis in rows else 1 for axis in features}
    local_T = tokens_BT.shape[1] // count_ways(length, mesh)
    scatter = words and local_T % count_ways(words, mesh) == 0

    def local(table_VD, tokens_BT):
        for axis in features:
            tokens_BT = jax.lax.all_gather(tokens_BT, axis, axis=dims[axis], tiled=True)
        if words:
            first = jax.lax.axis_index(words) * table_VD.shape[0]
            tokens_BT = tokens_BT - first
            local_BT = (tokens_BT >= 0) & (tokens_BT < table_VD.shape[0])
            x_BTD = jnp.where(local_BT[:, :, None], table_VD[jnp.where(local_BT, tokens_BT, 0)], 0)
        else:
            x_BTD = table_VD[tokens_BT]
        x_BTD = x_BTD.astype(dtype)
        for axis in reversed(features):
            x_BTD = jax.lax.all_to_all(x_BTD, axis, dims[axis], 2, tiled=True)
        if scatter:
            return jax.lax.psum_scatter(x_BTD, words, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x_BTD, words) if words else x_BTD

    return jax.shard_map(
        local,
        in_specs=(PartitionSpec(words or None, features or None), PartitionSpec(rows, length)),
        out_specs=PartitionSpec(rows, (*length, *words) if scatter else length),
        check_vma=False,
    )(table_VD, tokens_BT)
