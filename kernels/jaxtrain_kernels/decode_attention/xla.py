"""Decode attention in plain XLA: products and sums in one pass each, grouped heads.

Not matmuls: for those XLA would lay out keys by heads, and carry a transposed copy of the whole
cache through the sampler's loop on GPUs, or transpose each layer on CPUs.
"""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def decode_attention(q, k, v, layer, until, since, *, scale, softcap):
    """See `jaxtrain_kernels.decode_attention`. Unwritten slots must hold finite numbers."""
    B, N, H = q.shape
    S, K = k.shape[2:4]
    compute = accumulator(k.dtype)
    k_BSK1H, v_BSK1H = (
        jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :, None].astype(compute)
        for x in (k, v)
    )
    q_B1KGH = q.reshape(B, 1, K, N // K, H).astype(k.dtype).astype(compute)
    score_BSKG = (q_B1KGH * k_BSK1H).sum(-1) * scale
    if softcap is not None:
        score_BSKG = softcap * jnp.tanh(score_BSKG / softcap)
    slot_1S = jnp.arange(S, dtype=jnp.int32)[None]
    seen_BS = slot_1S < until[:, None]
    if since is not None:
        seen_BS &= since[:, None] <= slot_1S
    seen_BS11 = seen_BS[:, :, None, None]
    # A finite stand-in for -inf: a row that sees nothing has weights of 0, not NaN.
    score_BSKG = jnp.where(seen_BS11, score_BSKG, jnp.finfo(compute).min)
    weight_BSKG = jnp.exp(score_BSKG - score_BSKG.max(1, keepdims=True))
    weight_BSKG = jnp.where(seen_BS11, weight_BSKG, 0.0)
    total_BKG1 = weight_BSKG.sum(1)[..., None]
    out_BKGH = (weight_BSKG[..., None] * v_BSK1H).sum(1)
    out_BKGH = out_BKGH / jnp.where(total_BKG1 == 0, 1.0, total_BKG1)
    return out_BKGH.reshape(B, N, H).astype(q.dtype)
