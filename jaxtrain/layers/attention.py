"""Attention: grouped-query self-attention over packed forests, with an optional KV cache.

Who sees whom is data, not code: a `Context` built from the Batch in training, from the cache in
decoding. The kernel sees local arrays only: sharded_attention.py.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtrain_kernels import Context

from jaxtrain.layers.linear import Dtype, Linear, multiply_together
from jaxtrain.layers.norm import RMSNorm
from jaxtrain.layers.rope import Angles, rotate
from jaxtrain.layers.sharded_attention import LayerCache, attend, attend_cached
from jaxtrain.parallel.rules import constrain


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
        context: Context,
        *,
        window: int | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        q_BTNH, k_BSKH, v_BSKH = (
            self._heads(y_BTF) for y_BTF in multiply_together(x_BTD, self.q, self.k, self.v)
        )
        if self.q_norm is not None:
            q_BTNH, k_BSKH = self.q_norm(q_BTNH), self.k_norm(k_BSKH)
        q_BTNH, k_BSKH = rotate(q_BTNH, angles), rotate(k_BSKH, angles)
        see = {"window": window, "softcap": self.softcap}
        if cache is not None:
            cache = _write(cache, k_BSKH, v_BSKH)
        if cache is not None and q_BTNH.shape[1] == 1:
            out_BTNH = attend_cached(q_BTNH, cache, **see)
        else:
            if cache is not None:
                k_BSKH, v_BSKH = cache.k[cache.layer], cache.v[cache.layer]
            out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, context, impl=self.impl, **see)
        y_BTD = self.out(out_BTNH.reshape(*x_BTD.shape[:2], -1))
        return constrain(y_BTD, "rows", "sequence", "features"), cache

    def _heads(self, x_BTF: jax.Array) -> jax.Array:
        x_BTNH = x_BTF.reshape(*x_BTF.shape[:2], -1, self.head_dim)
        return constrain(x_BTNH, "rows", "length", "act_heads", None)


def _write(cache: LayerCache, k_BTKH: jax.Array, v_BTKH: jax.Array) -> LayerCache:
    """The T new tokens of each row at its `start`; slots beyond S are left out."""
    B, T = k_BTKH.shape[:2]
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    slots_BT = cache.start[:, None] + jnp.arange(T, dtype=jnp.int32)

    def put(all_LBSKH, new_BTKH):
        new_BTKH = new_BTKH.astype(all_LBSKH.dtype)
        return all_LBSKH.at[cache.layer, rows_B1, slots_BT].set(
            new_BTKH, mode="drop", unique_indices=True
        )

    return cache._replace(k=put(cache.k, k_BTKH), v=put(cache.v, v_BTKH))
