"""cuDNN's fused attention as jax binds it: the only module that imports jax's private names for it.

`jax.nn.dot_product_attention` does not take packed documents and keeps one softmax statistic per
(document, head, row length); the two calls here are what it is made of.
"""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.mosaic import require_hopper

try:
    from jax._src.cudnn import fused_attention_stablehlo as fused
    from jax._src.lib import cuda_versions
except ImportError:  # another jax: `require_cudnn` declines
    fused = cuda_versions = None

OLDEST = 91000  # cuDNN 9.10, the oldest that packed documents were run with


def require_cudnn() -> None:
    """Raise NotImplementedError with the reason unless packed attention can run here."""
    require_hopper()  # the same jax and devices, and local arrays
    if fused is None or cuda_versions is None:
        raise NotImplementedError("this jax has no cuDNN attention")
    version = cuda_versions.cudnn_get_version()
    if version < OLDEST:
        raise NotImplementedError(f"needs cuDNN {OLDEST}, found {version}")


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention inside each of G documents: output as q, and lse float32 [G, N, T].

    q [B, T, N, H], k and v [B, T, K, H]; document g is the tokens starts[g] + range(lengths[g]) of
    the B * T, at most T of them; starts and lengths int32 [G], G a multiple of B. Tokens outside of
    all documents and statistics behind a document's end are left undefined.
    """
    operands = _operands(q, k, starts, lengths)
    out, lse = fused._dot_product_attention_fwd_p.bind(
        q, k, v, *operands, **_settings(scale, window), is_training=True
    )
    return out, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ, dK, dV; arguments as `forward`, its results, and d_out."""
    operands = _operands(q, k, starts, lengths)
    return tuple(
        fused._dot_product_attention_bwd_p.bind(
            q, k, v, *operands, lse, out, d_out, **_settings(scale, window)
        )
    )


def _operands(q, k, starts, lengths):
    """Bias, both sides' lengths and offsets (in elements, one more for the end), page tables."""
    B, T, N, H = q.shape
    unused = jnp.zeros(0, q.dtype)
    lengths = lengths.reshape(B, -1)
    end = jnp.full((B,), B * T, jnp.int32)
    offsets = jnp.concatenate([starts, end]).reshape(B, -1)
    assert B * T * N * H < 2**31, "cuDNN counts elements in int32"
    return unused, lengths, lengths, offsets * (N * H), offsets * (k.shape[2] * H), unused, unused


def _settings(scale, window):
    return {
        "scale": float(scale),
        # cuDNN requires a seed; without dropout it has no effect.
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": fused.MaskType.PADDING_CAUSAL,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
