"""The definition of the gated delta rule: one token after the other, every state kept."""

import jax
import jax.numpy as jnp

from jaxtrain_kernels.precision import accumulator


def gated_delta(q, k, v, g, beta, until, prev=None, *, state=None, chunks=None):
    """Implement `jaxtrain_kernels.gated_delta`. Holds [B, T + 1, N, K, V]: for tests and tiny
    inputs."""
    B, T, H, K = q.shape
    N, V = v.shape[2:]
    wide = accumulator(q.dtype)
    token_T = jnp.arange(T, dtype=jnp.int32)
    rows_B = jnp.arange(B, dtype=jnp.int32)
    # Place 0 is what stands before the row, place t + 1 the state behind token t.
    place_BT = jnp.broadcast_to(token_T, (B, T)) if prev is None else prev + 1
    states = jnp.zeros((B, T + 1, N, K, V), wide)
    if state is not None:
        states = states.at[:, 0].set(state)

    def step(states, token):
        t, place_B, q_BHK, k_BHK, v_BNV, g_BN, beta_BN, used_B = token
        before = states[rows_B, place_B]
        q_BNK, k_BNK = (jnp.repeat(x, N // H, axis=1).astype(wide) for x in (q_BHK, k_BHK))
        S = jnp.exp(g_BN)[..., None, None] * before
        seen_BNV = jnp.einsum("BNKV,BNK->BNV", S, k_BNK)
        delta_BNV = beta_BN[..., None] * (v_BNV.astype(wide) - seen_BNV)
        S = S + k_BNK[..., None] * delta_BNV[:, :, None]
        out_BNV = jnp.einsum("BNKV,BNK->BNV", S, q_BNK)
        S = jnp.where(used_B[:, None, None, None], S, before)
        return states.at[:, t + 1].set(S), jnp.where(used_B[:, None, None], out_BNV, 0.0)

    by_token = (x.swapaxes(0, 1) for x in (place_BT, q, k, v, g, beta, until > token_T[None]))
    states, out_TBNV = jax.lax.scan(step, states, (token_T, *by_token))
    out = out_TBNV.swapaxes(0, 1).astype(v.dtype)
    return out, states[:, T] if prev is None else None
