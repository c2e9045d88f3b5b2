"""Trained rows of a frozen table: the embeddings of tokens that a config adds, beside an adapter.

    embedding   x[t] = rows[i] where token t is ids[i], else table[token]
    head        the table with `rows` in the place of its rows `ids`

As PEFT's `trainable_token_indices`: rows replace what the base has there, whatever that is. A tied
table has one set of rows for both.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class TokenRows(nnx.Module):
    """rows [N, D], shapes or arrays, in the place of those of the tokens `ids` (N of them, in any
    order). Every device holds all: there are few."""

    def __init__(self, rows, ids: Sequence[int]):
        self.rows = nnx.Param(rows, axes=(None, None))
        self.ids = tuple(ids)

    def look_up(self, x_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """The table's own vectors of tokens, with these rows where they belong."""
        order = np.argsort(self.ids)
        ids_N = jnp.asarray(np.asarray(self.ids)[order], tokens_BT.dtype)
        near_BT = jnp.minimum(jnp.searchsorted(ids_N, tokens_BT), len(self.ids) - 1)
        own_BTD = self.rows[...][jnp.asarray(order)[near_BT]].astype(x_BTD.dtype)
        return jnp.where((ids_N[near_BT] == tokens_BT)[..., None], own_BTD, x_BTD)

    def place(self, table_VD: jax.Array) -> jax.Array:
        """The table with these rows in it, in its dtype."""
        return table_VD.at[jnp.asarray(self.ids)].set(self.rows[...].astype(table_VD.dtype))
