"""The definition of Mamba's recurrence: one token after the other, every state kept."""

import jax
import jax.numpy as jnp


def selective_scan(x, dt, A, B, C, until, prev=None, *, state):
    """Implement `jaxtrain_kernels.selective_scan`. Holds [rows, T + 1, S, F]: for tests and tiny
    inputs."""
    rows, T, _ = x.shape
    token_T, row = jnp.arange(T, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    # Place 0 is what stands before the row, place t + 1 the state behind token t.
    slot = jnp.broadcast_to(token_T, (rows, T)) if prev is None else prev + 1
    states = jnp.zeros((rows, T + 1, *A.shape), state.dtype).at[:, 0].set(state)

    def step(states, token):
        t, slot, x_rF, dt_rF, B_rS, C_rS, used_r = token
        x_rF, B_rS, C_rS = (part.astype(state.dtype) for part in (x_rF, B_rS, C_rS))
        before = states[row, slot]
        H = jnp.exp(A[None] * dt_rF[:, None]) * before + B_rS[..., None] * (dt_rF * x_rF)[:, None]
        y_rF = (C_rS[..., None] * H).sum(1)
        H = jnp.where(used_r[:, None, None], H, before)
        return states.at[:, t + 1].set(H), jnp.where(used_r[:, None], y_rF, 0.0)

    by_token = (part.swapaxes(0, 1) for part in (slot, x, dt, B, C, until > token_T[None]))
    states, y_TrF = jax.lax.scan(step, states, (token_T, *by_token))
    return y_TrF.swapaxes(0, 1).astype(x.dtype), states[:, T] if prev is None else None
