"""Notes of a mixture of experts on its router's choices, for balance losses and metrics."""

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.layers.router import ExpertChoice


def note_choice(
    choice: ExpertChoice, context: Context, experts_BTK: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Return statistics of the router's own choice, also for replayed experts: sums over the tokens
    of each row that are not padding, in at least float32.

    "expert_load" [B, E]: tokens that went to each expert. "expert_probs" [B, E]: the router's
    probabilities. "router_entropy" [B]: entropies of these, in nats. "router_z" [B]: squares of the
    logits' logsumexp. "sequence_balance" [B]: DeepSeek's sequence-wise loss of each document or
    tree, E sum_e f_e P_e / k, times its tokens (arXiv:2412.19437, eq. 17-20).
    "routed" int32 [B, T, k]: where each token went. With experts given: "given" [B], how many
    tokens had any; "given_same" [B], the share of them that the router would have chosen, summed.
    """
    probs_BTE, real_BT = choice.probs, context.real()
    every_E = jnp.arange(probs_BTE.shape[-1], dtype=jnp.int32)
    chosen_BTE = (choice.routed[..., None] == every_E).any(-2)
    entropy_BT = -jnp.sum(jax.scipy.special.xlogy(probs_BTE, probs_BTE), -1)
    real = real_BT.astype(probs_BTE.dtype)
    k, E = choice.experts.shape[-1], probs_BTE.shape[-1]
    share_BTE = share_of_documents(chosen_BTE & real_BT[..., None], context)
    replayed = {} if experts_BTK is None else note_replayed(choice.routed, experts_BTK, real)
    weighed_BT = jnp.sum(jax.lax.stop_gradient(share_BTE) * probs_BTE, -1)
    return {
        "expert_load": jnp.sum(chosen_BTE * real[..., None], 1),
        "expert_probs": jnp.sum(probs_BTE * real[..., None], 1),
        "router_entropy": jnp.sum(jax.lax.stop_gradient(entropy_BT) * real, 1),
        "router_z": jnp.sum(jnp.square(choice.lse) * real, 1),
        "sequence_balance": E / k * jnp.sum(weighed_BT * real, 1),
        "routed": choice.experts,
        **replayed,
    }


def note_replayed(routed_BTK: jax.Array, replayed_BTK: jax.Array, real_BT: jax.Array) -> dict:
    """Return how far replayed experts agree with the router's own choice."""
    has_replay_BT = (replayed_BTK >= 0).all(-1) * real_BT
    same_BT = (
        (routed_BTK[..., None] == replayed_BTK[..., None, :]).any(-1).mean(-1, dtype=real_BT.dtype)
    )
    return {"given": jnp.sum(has_replay_BT, 1), "given_same": jnp.sum(same_BT * has_replay_BT, 1)}


def share_of_documents(chosen_BTE: jax.Array, context: Context) -> jax.Array:
    """float32 [B, T, E]: of the document that each token belongs to, the share of its tokens that
    went to each expert. A tree is one document; without `prev` a row is."""
    B, T, _ = chosen_BTE.shape
    before_BTE = jnp.cumsum(chosen_BTE.astype(jnp.int32), 1) - chosen_BTE
    index_T = jnp.arange(T, dtype=jnp.int32)
    if context.prev is None:
        start_BT = jnp.zeros((B, T), jnp.int32)
        end_BT = jnp.full((B, T), T, jnp.int32)
    else:
        start_BT = jax.lax.cummax(jnp.where(context.prev < 0, index_T, 0), axis=1)
        end_BT = jnp.take_along_axis(context.until, start_BT, 1)
    ends_BTE = jnp.pad(before_BTE, ((0, 0), (0, 1), (0, 0)))
    ends_BTE = ends_BTE.at[:, T].set(before_BTE[:, -1] + chosen_BTE[:, -1])
    count_BTE = jnp.take_along_axis(ends_BTE, end_BT[..., None], 1)
    count_BTE -= jnp.take_along_axis(ends_BTE, start_BT[..., None], 1)
    return count_BTE / (end_BT - start_BT)[..., None].astype(jnp.float32)
