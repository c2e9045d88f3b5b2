"""A dropless mixture-of-experts feed-forward layer out of the grouped ops."""

import jax

from jaxtrain_kernels.dispatch import dispatch
from jaxtrain_kernels.grouped_matmul import mosaic_gpu, reference, triton_gpu, xla
from jaxtrain_kernels.grouped_matmul.ffn import (
    ACTIVATIONS,
    NO_ADAPTERS,
    NO_BIASES,
    Activation,
    Adapters,
    Biases,
    add_down_bias,
)
from jaxtrain_kernels.grouped_matmul.routing import BLOCK, route

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.moe_ffn,
    "triton": triton_gpu.moe_ffn,
    "xla": xla.moe_ffn,
    "reference": reference.moe_ffn,
}


def moe_ffn(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    adapters: Adapters = NO_ADAPTERS,
    biases: Biases = NO_BIASES,
    activation: Activation = "silu",
    freeze_experts: bool = False,
    block: int | None = None,
    capacity: int | None = None,
    impl: str = "auto",
) -> jax.Array:
    """sum over k of gates[t, k] * (act(x W_gate) * (x W_up)) W_down; [T, D] in x's dtype.

    x [T, D]; experts int32 [T, k] (all of a token's differ or not: both are right; a number
    outside [0, E) adds nothing: an expert of another device); gates [T, k]; w_gate and w_up
    [E, D, F]; w_down [E, F, D]; each in any float dtype, cast to x's, or frozen and packed: a
    pytree with `shape` and `unpack(dtype)`, unpacked in both passes and never kept. w_gate None:
    experts are act(x W_up) W_down, without a gate. biases are added behind each matrix, that of
    down before a gate counts it. Every token reaches all its experts, so a
    token's result does not depend on its neighbors. Deterministic.
    Gradients to x, gates, adapters, biases and, unless `freeze_experts`, the three matrices.
    `block` is the rows that one expert's segment is padded to: smaller wastes less, and the Hopper
    kernels want 128; None chooses. `capacity`: choices inside of [0, E) are at most so many, and
    buffers hold no more; None: all may be. Raises ValueError for shapes that do not fit or an
    unknown activation, NotImplementedError if `impl` declines.
    """
    (T, D), (E, _, F) = x.shape, w_up.shape
    gate_shape = w_up.shape if w_gate is None else w_gate.shape
    # Checked here once, so that every backend raises the same message.
    shapes = (gate_shape, w_up.shape, w_down.shape, experts.shape, gates.shape)
    expected = ((E, D, F), (E, D, F), (E, F, D), (T, *experts.shape[1:]), experts.shape)
    if shapes != expected or experts.ndim != 2:
        raise ValueError(
            f"moe_ffn: x {x.shape}, w_gate, w_up, w_down, experts, gates {shapes}; want [T, D],"
            " [E, D, F], [E, D, F], [E, F, D], [T, k], [T, k]"
        )
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        raise ValueError(f"moe_ffn: activation {activation!r}; allowed: {sorted(ACTIVATIONS)}")
    freeze_experts = freeze_experts or hasattr(w_up, "unpack")
    if freeze_experts:
        w_gate, w_up, w_down = jax.lax.stop_gradient((w_gate, w_up, w_down))
    capacity = min(experts.size, capacity or experts.size)
    if block is None:
        block = choose_block(x, capacity, w_up, impl)
    shapes = dispatch(
        "moe_ffn",
        impl,
        BACKENDS,
        x,
        gates,
        w_gate,
        w_up,
        w_down,
        route(experts, E, block, capacity),
        adapters=adapters,
        biases=biases,
        activation=activation,
        freeze_experts=freeze_experts,
    )
    return shapes if biases.down is None else add_down_bias(shapes, experts, gates, biases.down)


def choose_block(x, choices: int, w_up, impl: str) -> int:
    """128 where the Hopper kernels will take the call; else about the mean rows of an expert."""
    if impl in ("auto", "mosaic_gpu"):
        try:
            mosaic_gpu.check(x.dtype, BLOCK, *w_up.shape[1:])
            return BLOCK
        except NotImplementedError:
            pass
    mean = max(choices // w_up.shape[0], 1)
    least = triton_gpu.BLOCKS[0] if impl == "triton" else 8
    return min(BLOCK, max(least, 1 << (mean - 1).bit_length()))
