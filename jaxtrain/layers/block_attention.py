"""BlockAttention: blocks of guesses that see earlier states of another model, and themselves.

    keys     c0 c1 c2 c3 c4 c5 | a0 a1 a2 | b0 b1 b2        block a begins at 3, block b at 5
    block a  x  x  x             x  x  x
    block b  x  x  x  x  x                   x  x  x

Keys and values of both kinds have the same projections. The states c are not tokens of the layer
and do not change from layer to layer. Every key is seen by one interval of queries, so this is the
attention of packed forests with more keys than queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.attention import Attention
from jaxtrain.layers.fused_linear import multiply_fused
from jaxtrain.layers.kv_cache import KV, is_ring, ring_context, write
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec
from jaxtrain.layers.rope import Angles
from jaxtrain.layers.sharded_attention import attend


class DraftContext(NamedTuple):
    """States that the blocks of all layers see besides themselves (`LayerInputs.side_context`)."""

    states: jax.Array
    """[B, T, D], shared by all layers."""
    angles: Angles
    """Rotations at their positions [B, T]."""


class BlockAttention(Attention):
    """[B, Q, D] of blocks in Q places -> [B, Q, D].

    In training `inputs.context` has the intervals of T + Q keys, the states of
    `inputs.side_context` first. A layer with a window is causal inside of a block; without one its
    places see each other both ways. In decoding the state holds keys and values of the states read
    so far (`read`); the block of a row sees them and is not added to them.
    """

    trials = "none"
    keeps_packed = False

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: KV | None = None
    ) -> tuple[jax.Array, KV | None]:
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        projected = multiply_fused(x_BTD, self.q, self.k, self.v)
        q_BQNH, k_BQKH, v_BQKH = (self._heads(y_BQF) for y_BQF in projected)
        q_BQNH = self._norm_and_rotate(q_BQNH, self.q_norm, inputs.angles)
        k_BQKH = self._norm_and_rotate(k_BQKH, self.k_norm, inputs.angles)
        window = inputs.spec.window
        if state is None:
            # States stand first: the intervals of `block_context` count keys in this order.
            k_BTKH, v_BTKH = self.project(inputs.side_context)
            context = inputs.context
            if window is not None:
                context = context._replace(since=causal(context.since, x_BTD.shape[1]))
        else:
            k_BTKH, v_BTKH = (x.astype(k_BQKH.dtype) for x in state)
            context = ring_context(state.k.shape[1], inputs.context.positions, inputs.decoding)
            if window is None:
                # A block without a window sees its own later places, which are queries before their
                # keys.
                context = context._replace(since=jnp.zeros_like(context.until))
        k_BSKH = jnp.concatenate([k_BTKH, k_BQKH], axis=1)
        v_BSKH = jnp.concatenate([v_BTKH, v_BQKH], axis=1)
        options = {"window": window, "softcap": self.softcap, "impl": self.impl}
        out_BQNH = attend(q_BQNH, k_BSKH, v_BSKH, context, **options)
        y_BQD = self.out(out_BQNH.reshape(*x_BTD.shape[:2], -1))
        return constrain(y_BQD, "rows", "sequence", "features"), state

    def fuse_kernels(self) -> None:
        """Keep kernels separate: keys and values of the states are projected without queries."""

    def project(self, draft_context: DraftContext) -> tuple[jax.Array, jax.Array]:
        """Project the states to keys and values [B, T, K, H]."""
        x_BTD = constrain(draft_context.states, "rows", "length", "features")
        k_BTKH, v_BTKH = (self._heads(y) for y in multiply_fused(x_BTD, self.k, self.v))
        return self._norm_and_rotate(k_BTKH, self.k_norm, draft_context.angles), v_BTKH

    def read(
        self, draft_context: DraftContext, spec: LayerSpec, state: KV, decoding: Decoding
    ) -> KV:
        """Add new states [B, T, D] to the cache, those of each row that `decoding` counts."""
        keys, values = self.project(draft_context)
        return write(state, KV(keys, values), decoding, is_ring(state, spec.window))


def causal(since_BS: jax.Array, num_queries: int) -> jax.Array:
    """Raise `since` of the T + Q keys so that no query sees a later key."""
    S = since_BS.shape[1]
    query_S = jnp.arange(S, dtype=jnp.int32) - (S - num_queries)
    return jnp.maximum(since_BS, query_S)


def block_context(
    anchors_BA: jax.Array,
    until_BT: jax.Array,
    block_size: int,
    positions_BQ: jax.Array,
    positions_BT: jax.Array,
) -> Context:
    """Build the mask of T states and A blocks of `block_size` that begin at ascending row indices;
    unused blocks have the index T, see nothing and are not seen.

    A state c is seen by the blocks whose anchor a lies in its subtree, after it: c < a < until[c].
    The state of the anchor itself does not exist yet when the draft guesses.
    """
    (_, T), (B, A) = until_BT.shape, anchors_BA.shape
    real_BA = anchors_BA < T
    # Unused blocks are counted at index T, which is cut off.
    starts_BT = jnp.zeros((B, T + 1), jnp.int32)
    starts_BT = starts_BT.at[jnp.arange(B)[:, None], anchors_BA].add(1)[:, :T]
    count_BT1 = jnp.pad(jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    # Blocks with an anchor up to c, and those with one before until[c].
    since_BT = count_BT1[:, 1:] * block_size
    last_BT = jnp.take_along_axis(count_BT1, until_BT, axis=1) * block_size
    first_A = jnp.arange(A, dtype=jnp.int32) * block_size
    stop_BA = jnp.where(real_BA, first_A + block_size, 0)
    block_since = jnp.broadcast_to(jnp.repeat(first_A, block_size), (B, A * block_size))
    block_until = jnp.repeat(stop_BA, block_size, axis=1)
    return Context(
        until=jnp.concatenate([last_BT, block_until], axis=1).astype(jnp.int32),
        since=jnp.concatenate([since_BT, block_since], axis=1).astype(jnp.int32),
        positions=positions_BQ,
        key_positions=jnp.concatenate([positions_BT, positions_BQ], axis=1),
    )
