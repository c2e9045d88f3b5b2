"""Context: the attention mask of packed rows, as data that goes from the batch to the kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Context(NamedTuple):
    """Visibility of S keys to T queries, and their positions.

    Key s is visible to query t iff since[s] <= t < until[s]; windows compare positions. Where the
    queries are the keys, as in training, S is T.
    """

    until: jax.Array
    """int32 [B, S]."""
    since: jax.Array | None = None
    """int32 [B, S]; None means s itself (causal)."""
    positions: jax.Array | None = None
    """int32 [B, T] of the queries; needed for windows and rotations."""
    key_positions: jax.Array | None = None
    """int32 [B, S]; None means the queries' positions."""
    prev: jax.Array | None = None
    """int32 [B, T] index of the token before on the same branch, -1 at a root: where a recurrent
    layer takes its state from. None means t - 1."""

    def real(self) -> jax.Array:
        """bool [B, T] of a row that attends to itself: False in padding, which sees itself alone
        at position 0 (and so for a document of one token, which nothing can train on)."""
        alone = self.until == jnp.arange(1, self.until.shape[1] + 1, dtype=jnp.int32)
        same = self.until.shape == self.positions.shape
        return (self.positions > 0) | ~alone if same else jnp.ones(self.positions.shape, bool)
