"""The gated delta rule of one token a row, as decoding asks it (Pallas, Triton; any NVIDIA GPU).

Such a step is as long as its state takes to be read and written (4 MiB a row and layer at 32 heads
of 128 dims). A program takes some columns of V of one head of one row, which need nothing of the
others: it reads its part of the state once, writes it back to where it was, and leaves the state of
a row without a token alone. XLA reads the state twice, for S^T k and for what follows from it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxtrain_kernels.gated_delta import xla
from jaxtrain_kernels.triton import plt, require_nvidia

DIMS = (64, 128, 256)
DTYPES = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes into which a call is split."""

    columns: int = 64
    """Of V, of a program: 32 KiB of state at 128 dims of K."""
    warps: int = 8


def gated_delta(q, k, v, g, beta, until, prev=None, *, state=None, chunks=None):
    """Implement `jaxtrain_kernels.gated_delta`; rows of one token that bring a state."""
    require_nvidia()
    if q.shape[1] != 1 or prev is not None or state is None:
        raise NotImplementedError("takes one token a row, and a state before it")
    if q.dtype not in DTYPES:
        raise NotImplementedError(f"takes bfloat16 or float32, got {q.dtype}")
    dims = (q.shape[-1], v.shape[-1])
    if not set(dims) <= set(DIMS):
        raise NotImplementedError(f"heads of {dims[0]} and {dims[1]} dims are not among {DIMS}")
    return _step(q, k, v, g, beta, until, state)


@jax.custom_vjp
def _step(*arguments):
    return run(Config(), *arguments)


def _forward(*arguments):
    return _step(*arguments), arguments


def _backward(arguments, cotangents):
    """By XLA: nobody trains through decoding."""
    *arrays, until, state = arguments
    _, pull = jax.vjp(lambda *a: xla.gated_delta(*a[:5], until, state=a[5]), *arrays, state)
    *grads, d_state = pull(cotangents)
    return *grads, None, d_state


_step.defvjp(_forward, _backward)


def run(config: Config, q, k, v, g, beta, until, state, *, interpret: bool = False):
    """`gated_delta` behind its checks."""
    B, _, H, K = q.shape
    N, V = v.shape[2:]
    columns = min(config.columns, V)
    of_key = pl.BlockSpec((None, None, None, K), lambda b, n, j: (b, 0, n // (N // H), 0))
    of_value = pl.BlockSpec((None, None, None, columns), lambda b, n, j: (b, 0, n, j))
    of_state = pl.BlockSpec((None, None, K, columns), lambda b, n, j: (b, n, 0, j))
    unblocked = pl.BlockSpec()
    out, state = pl.pallas_call(
        _kernel,
        grid=(B, N, V // columns),
        in_specs=[unblocked, unblocked, unblocked, of_key, of_key, of_value, of_state],
        out_specs=[of_value, of_state],
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        # The state is updated in place: a row without a token keeps it without a copy.
        input_output_aliases={6: 1},
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=interpret,
        name="gated_delta_decode",
    )(until, g, beta, q, k, v, state)
    return out, state


def _kernel(until_ref, g_ref, beta_ref, q_ref, k_ref, v_ref, state_ref, out_ref, after_ref):
    row, head = pl.program_id(0), pl.program_id(1)
    used = until_ref[row, 0] > 0

    @pl.when(used)
    def _():
        # The state is float32 and is read once: everything else is negligible.
        f32 = jnp.float32
        q, k, v = (ref[...].astype(f32) for ref in (q_ref, k_ref, v_ref))
        decayed = jnp.exp(g_ref[row, 0, head]) * state_ref[...]
        seen = (decayed * k[:, None]).sum(0)
        new = decayed + k[:, None] * (beta_ref[row, 0, head] * (v - seen))[None]
        after_ref[...] = new
        out_ref[...] = (new * q[:, None]).sum(0).astype(out_ref.dtype)

    @pl.when(~used)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)
