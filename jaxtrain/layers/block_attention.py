"""BlockAttention: blocks of guesses that see states of another model before them, and themselves.

    keys     c0 c1 c2 c3 c4 c5 | a0 a1 a2 | b0 b1 b2        block a begins at 3, block b at 5
    block a  x  x  x             x  x  x
    block b  x  x  x  x  x                   x  x  x

Keys and values of both kinds go through the same projections; the states c are no tokens of the
layer and do not change from layer to layer. Every key is seen by one interval of queries, so this
is the attention of packed forests with more keys than queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.distributed.sharding import constrain
from jaxtrain.layers.attention import Attention
from jaxtrain.layers.fused_linear import multiply_together
from jaxtrain.layers.kv_cache import KV, is_ring, ring_context, write
from jaxtrain.layers.mixer import Decoding, LayerInputs, LayerSpec
from jaxtrain.layers.rope import Angles
from jaxtrain.layers.sharded_attention import attend


class DraftContext(NamedTuple):
    """What the blocks of all layers see beside themselves (`LayerInputs.beside`)."""

    states: jax.Array
    """[B, T, D], the same in every layer."""
    angles: Angles
    """Of their positions [B, T]."""


class BlockAttention(Attention):
    """[B, Q, D] of blocks in Q places -> [B, Q, D].

    In training `inputs.context` has the intervals of T + Q keys, the states of `inputs.beside`
    first. A layer with a window is causal inside of a block; without one its places see each other
    both ways. In decoding the state holds keys and values of the states read so far (`read`), which
    the one block of a row sees and does not join.
    """

    trials = "none"
    keeps_packed = False

    def __call__(
        self, x_BTD: jax.Array, inputs: LayerInputs, state: KV | None = None
    ) -> tuple[jax.Array, KV | None]:
        x_BTD = constrain(x_BTD, "rows", "length", "features")
        projected = multiply_together(x_BTD, self.q, self.k, self.v)
        q_BQNH, k_BQKH, v_BQKH = (self._heads(y_BQF) for y_BQF in projected)
        q_BQNH = self._turn(q_BQNH, self.q_norm, inputs.angles)
        k_BQKH = self._turn(k_BQKH, self.k_norm, inputs.angles)
        window = inputs.spec.window
        if state is None:
            k_BTKH, v_BTKH = self.project(inputs.beside)
            context = inputs.context
            if window is not None:
                context = context._replace(since=causal(context.since, x_BTD.shape[1]))
        else:
            k_BTKH, v_BTKH = (x.astype(k_BQKH.dtype) for x in state)
            context = ring_context(state.k.shape[1], inputs.context.positions, inputs.decoding)
            if window is None:
                context = context._replace(since=jnp.zeros_like(context.until))
        k_BSKH = jnp.concatenate([k_BTKH, k_BQKH], axis=1)
        v_BSKH = jnp.concatenate([v_BTKH, v_BQKH], axis=1)
        see = {"window": window, "softcap": self.softcap, "impl": self.impl}
        out_BQNH = attend(q_BQNH, k_BSKH, v_BSKH, context, **see)
        y_BQD = self.out(out_BQNH.reshape(*x_BTD.shape[:2], -1))
        return constrain(y_BQD, "rows", "sequence", "features"), state

    def join_kernels(self) -> None:
        """Nothing: keys and values of the states are made without queries."""

    def project(self, beside: DraftContext) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, T, K, H] of the states."""
        x_BTD = constrain(beside.states, "rows", "length", "features")
        k_BTKH, v_BTKH = (self._heads(y) for y in multiply_together(x_BTD, self.k, self.v))
        return self._turn(k_BTKH, self.k_norm, beside.angles), v_BTKH

    def read(self, beside: DraftContext, spec: LayerSpec, state: KV, decoding: Decoding) -> KV:
        """The state with new states [B, T, D], of each row those that `decoding` counts."""
        keys, values = self.project(beside)
        return write(state, KV(keys, values), decoding, is_ring(state, spec.window))


def causal(since_BS: jax.Array, num_queries: int) -> jax.Array:
    """`since` of the T + Q keys where no query sees a later one."""
    S = since_BS.shape[1]
    own_S = jnp.arange(S, dtype=jnp.int32) - (S - num_queries)
    return jnp.maximum(since_BS, own_S)


def block_context(
    anchors_BA: jax.Array,
    until_BT: jax.Array,
    block_size: int,
    positions_BQ: jax.Array,
    positions_BT: jax.Array,
) -> Context:
    """Who sees whom: T states, then A blocks of `block_size` that begin at ascending row indices;
    places without a block have the index T, see nothing and are not seen.

    A state c is seen by the blocks whose anchor a is one of its own subtree behind it: c < a <
    until[c]. At the anchor itself there is no state yet where the draft guesses.
    """
    (_, T), (B, A) = until_BT.shape, anchors_BA.shape
    real_BA = anchors_BA < T
    begun_BT = jnp.zeros((B, T + 1), jnp.int32).at[jnp.arange(B)[:, None], anchors_BA].add(1)[:, :T]
    count_BT1 = jnp.pad(jnp.cumsum(begun_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    # Blocks with an anchor up to c, and those with one before until[c].
    since_BT = count_BT1[:, 1:] * block_size
    last_BT = jnp.take_along_axis(count_BT1, until_BT, axis=1) * block_size
    first_A = jnp.arange(A, dtype=jnp.int32) * block_size
    stop_BA = jnp.where(real_BA, first_A + block_size, 0)
    own_since = jnp.broadcast_to(jnp.repeat(first_A, block_size), (B, A * block_size))
    own_until = jnp.repeat(stop_BA, block_size, axis=1)
    return Context(
        until=jnp.concatenate([last_BT, own_until], axis=1).astype(jnp.int32),
        since=jnp.concatenate([since_BT, own_since], axis=1).astype(jnp.int32),
        positions=positions_BQ,
        key_positions=jnp.concatenate([positions_BT, positions_BQ], axis=1),
    )
