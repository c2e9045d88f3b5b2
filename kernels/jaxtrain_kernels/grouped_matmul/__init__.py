"""Rows times the matrix of their expert, dropless: no expert has a capacity."""

import jax

from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.grouped_matmul import mosaic_gpu, reference, triton_gpu, xla
from jaxtrain_kernels.grouped_matmul.routing import Segments

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
    "triton": triton_gpu.grouped_matmul,
    "xla": xla.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    x: jax.Array, w: jax.Array, segments: Segments, *, freeze_w: bool = False, impl: str = "auto"
) -> jax.Array:
    """x[p] @ w[expert of p] for every row p; [P, F] in x's dtype, summed in float32.

    x [P, D] in the order of `segments` (see `routing.route`): each expert's rows lie together, and
    fill up with zero rows to whole blocks; w [E, D, F], cast to x's dtype. Rows of blocks that no
    expert uses give 0 and get no gradient. Gradients flow to x and, unless `freeze_w`, to w.
    Raises ValueError for shapes that do not fit, NotImplementedError if `impl` declines.
    """
    P, D = x.shape
    E, blocks = segments.starts.shape[0], segments.group.shape[0]
    if w.ndim != 3 or w.shape[:2] != (E, D) or P % blocks:
        raise ValueError(
            f"grouped_matmul: x {x.shape}, w {w.shape} for {E} experts and {blocks} blocks of rows;"
            " want [P, D] with P a multiple of the blocks, and [E, D, F]"
        )
    if freeze_w:
        w = jax.lax.stop_gradient(w)
    return dispatch("grouped_matmul", impl, BACKENDS, x, w, segments, freeze_w=freeze_w)
