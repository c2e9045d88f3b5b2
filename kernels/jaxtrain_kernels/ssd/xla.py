"""Mamba-2's recurrence in plain XLA: the walk of recurrence/walk.py with the chunks of chunk.py."""

import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator
from jaxtrain_kernels.recurrence.walk import ChunkRule, run
from jaxtrain_kernels.ssd.chunk import enter, gradients, leave, outputs, prepare

RULE = ChunkRule(prepare, enter, outputs, leave, gradients)


def ssd(x, dt, A, B, C, until, prev=None, *, state=None, chunk=64, lanes=None):
    """Implement `jaxtrain_kernels.ssd`; `chunk` and `lanes` override the schedule."""
    rows, T, N, P = x.shape
    G, S = B.shape[2:]
    if state is None:
        state = jnp.zeros((rows, N, S, P), accumulator(x.dtype))
    log_decay = A[None, None] * dt
    if T == 1 and prev is None:
        return _one_token(x, dt, log_decay, B, C, until, state)
    by_group = (rows, T, G, N // G)
    numbers = (x_part.reshape(*by_group, 1) for x_part in (dt, log_decay))
    inputs = (C, B, x.reshape(*by_group, P), *numbers)
    y, last = run(RULE, inputs, state.reshape(rows, *by_group[2:], S, P), until, prev, chunk, lanes)
    return y.reshape(x.shape), last.reshape(rows, N, S, P) if prev is None else None


def _one_token(x, dt, log_decay, B, C, until, state):
    """The recurrence itself: the state is read and written once."""
    wide, repeats = state.dtype, x.shape[2] // B.shape[2]
    B_rNS, C_rNS = (jnp.repeat(x_part[:, 0], repeats, axis=1).astype(wide) for x_part in (B, C))
    brought = dt[:, 0, :, None] * x[:, 0].astype(wide)
    new = jnp.exp(log_decay[:, 0])[..., None, None] * state
    new += B_rNS[..., None] * brought[:, :, None]
    y_rNP = (new * C_rNS[..., None]).sum(2)
    used_r = until[:, 0] > 0
    y = jnp.where(used_r[:, None, None], y_rNP, 0.0).astype(x.dtype)
    return y[:, None], jnp.where(used_r[:, None, None, None], new, state)
