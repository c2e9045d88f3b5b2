"""The definition of Mamba-2's recurrence: one token after the other, every state kept."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def ssd(x, dt, A, B, C, until, prev=None, *, state=None):
    """Implement `jaxtrain_kernels.ssd`. Holds [rows, T + 1, N, S, P]: for tests and tiny inputs."""
    rows, T, N, P = x.shape
    G, S = B.shape[2:]
    wide = accumulator(x.dtype)
    token_T, row = jnp.arange(T, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    # Place 0 is what stands before the row, place t + 1 the state behind token t.
    slot = jnp.broadcast_to(token_T, (rows, T)) if prev is None else prev + 1
    states = jnp.zeros((rows, T + 1, N, S, P), wide)
    if state is not None:
        states = states.at[:, 0].set(state)

    def step(states, token):
        t, slot, x_rNP, dt_rN, B_rGS, C_rGS, used_r = token
        before = states[row, slot]
        B_rNS, C_rNS = (
            jnp.repeat(x_part, N // G, axis=1).astype(wide) for x_part in (B_rGS, C_rGS)
        )
        H = jnp.exp(A[None] * dt_rN)[..., None, None] * before
        H += jnp.einsum("rNS,rNP->rNSP", B_rNS, dt_rN[..., None] * x_rNP.astype(wide))
        y_rNP = jnp.einsum("rNSP,rNS->rNP", H, C_rNS)
        H = jnp.where(used_r[:, None, None, None], H, before)
        return states.at[:, t + 1].set(H), jnp.where(used_r[:, None, None], y_rNP, 0.0)

    by_token = (x_part.swapaxes(0, 1) for x_part in (slot, x, dt, B, C, until > token_T[None]))
    states, y_TrNP = jax.lax.scan(step, states, (token_T, *by_token))
    y = y_TrNP.swapaxes(0, 1).astype(x.dtype)
    return y, states[:, T] if prev is None else None
