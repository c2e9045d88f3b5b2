"""RMSNorm of queries and keys head by head and their rotation, out of the product they lie in."""

from collections.abc import Sequence

import jax

from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.rotate_heads import mosaic_gpu, reference, xla

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.rotate_heads,
    "xla": xla.rotate_heads,
    "reference": reference.rotate_heads,
}


def rotate_heads(
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    counts: Sequence[int],
    head_dim: int,
    scales: Sequence[jax.Array] | None = None,
    *,
    eps: float = 1e-6,
    impl: str = "auto",
) -> tuple[jax.Array, ...]:
    """Heads of H = `head_dim` numbers, normed and rotated, in arrays [B, T, n, H] of x's dtype.

    x [B, T, F] are the heads of a token side by side: as many as each of `counts` says, such as N
    of queries and K of keys, each an array of the result; those behind them, such as values, come
    out as they are in one more, if there are any. scales: [H] for each of `counts`, of an RMSNorm
    with `eps` before the rotation; None: there is none. cos, sin [B, T, R/2], float32 (float64 of
    float64 x), constants: dims i and i + R/2 of a head's first R <= H rotate as a pair.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    B, T, F = x.shape
    half = cos.shape[-1]
    if F % head_dim or sum(counts) * head_dim > F or not counts or min(counts) < 1:
        raise ValueError(
            f"rotate_heads: x {x.shape} does not hold heads of {head_dim} in {tuple(counts)}"
        )
    if cos.shape != (B, T, half) or sin.shape != cos.shape or 2 * half > head_dim:
        raise ValueError(
            f"rotate_heads: cos {cos.shape}, sin {sin.shape}; want twice [{B}, {T}, R/2] with R up"
            f" to {head_dim}"
        )
    if scales is not None and [scale.shape for scale in scales] != [(head_dim,)] * len(counts):
        raise ValueError(
            f"rotate_heads: scales {[scale.shape for scale in scales]}; want [{head_dim}] for each"
            f" of {tuple(counts)}"
        )
    cos, sin = jax.lax.stop_gradient((cos, sin))
    arguments = (x, cos, sin, tuple(counts), head_dim, scales)
    return dispatch("rotate_heads", impl, BACKENDS, *arguments, eps=eps)
