"""Attention: grouped-query self-attention over packed forests, with an optional KV cache.

Who sees whom is data, not code: a `Sight` built from the Batch in training, from the cache in
decoding. This file also owns the shard_map around the kernel, which sees local arrays only.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtrain_kernels import attention as attention_op

from jaxtrain.layers.linear import Dtype, Linear
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, rotate
from jaxtrain.parallel.rules import constrain, partition_spec


class Sight(NamedTuple):
    """Key s is visible to query t iff since[s] <= t < until[s]; windows compare positions."""

    until: jax.Array
    """int32 [B, S]."""
    since: jax.Array | None
    """int32 [B, S]; None means s itself (causal)."""
    positions: jax.Array
    """int32 [B, T] of the queries."""
    key_positions: jax.Array
    """int32 [B, S]."""

    def real(self) -> jax.Array:
        """bool [B, T] of a row that attends to itself: False in padding, which sees itself alone
        at position 0 (and so for a document of one token, which nothing can train on)."""
        alone = self.until == jnp.arange(1, self.until.shape[1] + 1, dtype=jnp.int32)
        same = self.until.shape == self.positions.shape
        return (self.positions > 0) | ~alone if same else jnp.ones(self.positions.shape, bool)


class LayerCache(NamedTuple):
    """Keys and values of all layers, and where this layer's T new ones go."""

    k: jax.Array
    """[L, B, S, K, H], and v the same."""
    v: jax.Array
    layer: jax.Array | int
    """Which layer."""
    start: jax.Array
    """int32 scalar: first slot of S to write."""


class Attention(nnx.Module):
    """[B, T, D] -> [B, T, D] with N query heads on K <= N key-value heads of H dims.

    With `qk_norm_eps`, RMSNorm over H on queries and keys before the rotation (Qwen3).
    """

    def __init__(
        self,
        num_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        softcap: float | None = None,
        impl: str = "auto",
        init_std: float = 0.02,
        param_dtype: Dtype = jnp.float32,
        dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            Linear, init_std=init_std, param_dtype=param_dtype, dtype=dtype, rngs=rngs
        )
        query_dim, kv_dim = num_heads * head_dim, num_kv_heads * head_dim
        self.q = linear(num_features, query_dim, axes=("embed", "heads"), use_bias=qkv_bias)
        self.k = linear(num_features, kv_dim, axes=("embed", "kv_heads"), use_bias=qkv_bias)
        self.v = linear(num_features, kv_dim, axes=("embed", "kv_heads"), use_bias=qkv_bias)
        self.out = linear(query_dim, num_features, axes=("heads", "embed"), use_bias=out_bias)
        norm = functools.partial(RMSNorm, head_dim, eps=qk_norm_eps, param_dtype=param_dtype)
        self.q_norm = norm() if qk_norm_eps is not None else None
        self.k_norm = norm() if qk_norm_eps is not None else None
        self.head_dim = head_dim
        self.softcap = softcap
        self.impl = impl

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        sight: Sight,
        *,
        window: int | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        q_BTNH, k_BSKH, v_BSKH = (
            self._heads(project(x_BTD)) for project in (self.q, self.k, self.v)
        )
        if self.q_norm is not None:
            q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
        q_BTNH, k_BSKH = rotate(q_BTNH, angles), rotate(k_BSKH, angles)
        impl = self.impl
        if cache is not None:
            cache = _write(cache, k_BSKH, v_BSKH)
            k_BSKH, v_BSKH = cache.k[cache.layer], cache.v[cache.layer]
            # One query a row: the dense mask is [B, 1, S], and the chunked kernels only cost.
            impl = "reference" if q_BTNH.shape[1] == 1 else impl
        out_BTNH = _attend(
            q_BTNH, k_BSKH, v_BSKH, sight, window=window, softcap=self.softcap, impl=impl
        )
        out_BTNH = checkpoint_name(out_BTNH, "attention_out")
        return self.out(out_BTNH.reshape(*x_BTD.shape[:2], -1)), cache

    def _heads(self, x_BTF: jax.Array) -> jax.Array:
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, self.head_dim)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)


def _write(cache: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
    at = (cache.layer, 0, cache.start, 0, 0)
    return cache._replace(
        k=jax.lax.dynamic_update_slice(cache.k, k_BTKH[None].astype(cache.k.dtype), at),
        v=jax.lax.dynamic_update_slice(cache.v, v_BTKH[None].astype(cache.v.dtype), at),
    )


def _attend(q_BTNH, k_BSKH, v_BSKH, sight: Sight, *, window, softcap, impl) -> jax.Array:
    """The kernel, each device on its rows, its heads and its stretch of queries.

    A device holds all keys of its rows: with a context axis XLA gathers them, and since visibility
    counts queries from the row's start, the intervals shift by the device's first query.
    """
    op = functools.partial(attention_op, window=window, softcap=softcap, impl=impl)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return op(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            sight.until,
            since=sight.since,
            positions=sight.positions,
            key_positions=sight.key_positions,
        )
    q_spec = partition_spec(("rows", "length", "act_heads", None), q_BTNH.shape, mesh)
    k_spec = partition_spec(("rows", None, "act_heads", None), k_BSKH.shape, mesh)
    if q_spec[2] != k_spec[2]:  # fewer kv heads than tensor shards: every device takes all heads
        q_spec, k_spec = PartitionSpec(*q_spec[:2]), PartitionSpec(*k_spec[:2])
    rows, length = q_spec[0], q_spec[1]
    since = sight.since
    if since is None:
        since = jnp.broadcast_to(jnp.arange(k_BSKH.shape[1], dtype=jnp.int32), sight.until.shape)

    def local(q_BTNH, k_BSKH, v_BSKH, until, since, positions, key_positions):
        if length is not None:
            first = jax.lax.axis_index(length) * q_BTNH.shape[1]
            until, since = until - first, since - first
        return op(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            until,
            since=since,
            positions=positions,
            key_positions=key_positions,
        )

    by_key, by_query = PartitionSpec(rows), PartitionSpec(rows, length)
    return jax.shard_map(
        local,
        in_specs=(q_spec, k_spec, k_spec, by_key, by_key, by_query, by_key),
        out_specs=q_spec,
        check_vma=False,
    )(q_BTNH, k_BSKH, v_BSKH, sight.until, since, sight.positions, sight.key_positions)
