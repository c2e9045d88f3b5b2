"""Rewards of sampled blocks by how well their hidden states in a frozen model match the data's.

    forest ── frozen model ──> states of chosen layers, each of norm 1, one behind the other
      of a block's own tokens, of the document's in their place ── pooled, matched ──> rewards
      rewards of a block's samples ──> advantages

Jelassi et al. 2026 (arXiv 2603.12248). However many layers there are, features are brought to norm
1 again before they are matched: else C layers would weigh the diversity C times as much as one.

Shapes: B rows, U tokens of a row of the forest, A blocks, N samples of each, G tokens of each, F
features, P places of a feature.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.core.scorer import pool
from jaxtrain.methods.ebft.feature_matching import Pooling, normalize, pooling_weights, rewards

Estimator = Literal["rloo", "group_norm", "reinforce"]


@dataclass(frozen=True)
class BlockRewardOptions:
    """The numbers of the rewards."""

    layers: tuple[int, ...]
    """Whose outputs are read, from 0."""
    samples: int
    """N."""
    length: int
    """G."""
    pooling: Pooling = "last_token"
    """Of a block's tokens."""
    whitening: bool = False
    alignment: float = 1.0
    diversity: float = 1.0
    estimator: Estimator = "rloo"


class BlockRewards(NamedTuple):
    """Rewards of blocks; undefined where there is no block."""

    advantage: jax.Array
    """[B, A, N]."""
    reward: jax.Array
    """[B, A], and the next: means over the samples."""
    alignment: jax.Array
    diversity: jax.Array
    cfm: jax.Array


def judge(
    model, forest: Batch, start_BA: jax.Array, truth_BAG: jax.Array, how: BlockRewardOptions
) -> BlockRewards:
    """The blocks of rows [B, U] whose samples begin at start + n * G, against the document's tokens
    at `truth`; row indices."""
    (B, U), N, G = forest.tokens.shape, how.samples, how.length
    weights_PG = pooling_weights(how.pooling, G)
    used = np.flatnonzero(weights_PG.any(0))
    weights_1Pu = jnp.asarray(weights_PG[None, :, used])
    states_BUF = model.captured(forest, how.layers)

    def features(positions: jax.Array) -> jax.Array:
        """[B, ..., P * F] of windows [B, ..., G] of row indices."""
        positions = positions[..., used]
        flat = jnp.minimum(positions, U - 1).reshape(B, -1, 1)
        pooled = jnp.take_along_axis(states_BUF, flat, axis=1)
        wide = pooled.astype(jnp.promote_types(pooled.dtype, jnp.float32))
        by_layer = normalize(wide.reshape(*positions.shape, len(how.layers), -1))
        return pool(by_layer.reshape(*positions.shape, -1), weights_1Pu)[..., 0, :]

    offset_N = G * jnp.arange(N, dtype=jnp.int32)
    first_BAN1 = (start_BA[:, :, None] + offset_N)[..., None]
    matched = rewards(
        features(first_BAN1 + jnp.arange(G, dtype=jnp.int32)),
        features(truth_BAG),
        alignment=how.alignment,
        diversity=how.diversity,
        whitening=how.whitening,
    )
    return BlockRewards(
        advantages(matched.rewards, how.estimator),
        matched.rewards.mean(-1),
        matched.alignment.mean(-1),
        matched.diversity.mean(-1),
        matched.cfm,
    )


def advantages(reward_BAN: jax.Array, estimator: Estimator) -> jax.Array:
    """[B, A, N], over the samples of each block; the rewards themselves where one is alone."""
    N = reward_BAN.shape[-1]
    if N == 1 or estimator == "reinforce":
        return reward_BAN
    if estimator == "rloo":
        other_rewards = reward_BAN.sum(-1, keepdims=True) - reward_BAN
        return reward_BAN - other_rewards / (N - 1)
    centered = reward_BAN - reward_BAN.mean(-1, keepdims=True)
    return centered / (reward_BAN.std(-1, ddof=1, keepdims=True) + 1e-8)
