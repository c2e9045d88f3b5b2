"""LoRA of several adapters in one pass: every row of a batch is corrected by its adapter's factors.

    slot j holds A_j [in, R], B_j [R, out] and s_j        a row of slot j: y + s_j (x A_j) B_j
                                                          a row of slot 0: y

Slots count from 1. All of them are multiplied side by side, and what is not of a row's slot is set
to 0 between the two products: two matmuls, whichever slots the rows have. A rank below R is padded
with zeros, so that all ranks share a program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class AdapterSlot(NamedTuple):
    """An adapter that rows are drawn with."""

    index: int
    """Of its slot; 0: no adapter."""
    number: int
    """Counts loaded adapters: one that takes the slot later has another number."""


NO_ADAPTER = AdapterSlot(0, 0)


class SlottedLoRA(nnx.Module):
    """a [in, S, R], b [S, R, out] and scale [S] of S slots, for the slot `adapter` of a Linear."""

    def __init__(self, a: jax.Array, b: jax.Array, scale: jax.Array):
        # Every device holds all: fused kernels, which these stand beside, are not split either.
        self.a = nnx.Param(a, axes=(None, None, None))
        self.b = nnx.Param(b, axes=(None, None, None))
        self.scale = nnx.Param(scale, axes=(None,))
        self.index: jax.Array | None = nnx.data(None)
        """int32 [], [B] or [B, T]: slots of tokens; None: 0. Set by `choose_adapters`."""

    def __call__(self, x: jax.Array, y: jax.Array, kernel: jax.Array | None) -> jax.Array:
        """Return the corrected y [B, T, out] of x [B, T, in]; in y's dtype."""
        if self.index is None:
            return y
        a, b, scale_S = (x[...].astype(y.dtype) for x in (self.a, self.b, self.scale))
        S, R, num_out = b.shape
        index = self.index.reshape(*self.index.shape, *[1] * (x.ndim - self.index.ndim))
        chosen_BTS = index == jnp.arange(1, S + 1)
        low_BTSR = (x @ a.reshape(-1, S * R)).reshape(*x.shape[:-1], S, R) * scale_S[:, None]
        low_BTSR = jnp.where(chosen_BTS[..., None], low_BTSR, 0)
        return y + low_BTSR.reshape(*x.shape[:-1], S * R) @ b.reshape(S * R, num_out)


def choose_adapters(model: nnx.Module, index: jax.Array) -> None:
    """Set the slots of the rows that a model reads next, in place; int32 [] or [B]. No effect on a
    model without slots. Call it inside of jit, where the model is that of a trace."""
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, SlottedLoRA):
            node.index = index
