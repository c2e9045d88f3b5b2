"""A draft that is told the answers, and which of them to get wrong."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Read(NamedTuple):
    """Tokens that the target has reported as read."""

    tokens: jax.Array
    """int32 [B, S]."""
    states: jax.Array
    """[B, S, F]."""
    length: jax.Array
    """int32 [B]."""


class ToyDraft(nnx.Module):
    """Guesses row by row what `texts` say, by the row's first token: {token: prompt and answer}.

    right: places of a text at which the guess is the text's token; elsewhere it is the next id.
    """

    capture = (1, 0)

    def __init__(self, texts, right, *, num_drafted=3, vocab=61, features=64):
        longest = max(map(len, texts.values()))
        table = np.zeros((vocab, longest + num_drafted + 2), np.int32)
        for first, text in texts.items():
            table[first, : len(text)] = text
        self.table = nnx.Variable(jnp.asarray(table))
        self.right = nnx.Variable(jnp.resize(jnp.asarray(right), table.shape[1]))
        self.num_drafted, self.vocab, self.features = num_drafted, vocab, features

    def unstack(self):
        return self

    def init_cache(self, rows, slots, dtype=None):
        states = jnp.zeros((rows, slots, self.features), dtype)
        return Read(jnp.zeros((rows, slots), jnp.int32), states, jnp.zeros(rows, jnp.int32))

    def grow_cache(self, cache, rows, slots):
        def put(old, new):
            return new.at[tuple(slice(size) for size in old.shape)].set(old)

        return jax.tree.map(put, cache, self.init_cache(rows, slots))

    def insert(self, cache, rows_R, filled, source_R):
        def put(old, new):
            part = tuple(slice(size) for size in new.shape[1:])
            return old.at[(rows_R, *part)].set(new[source_R], mode="drop")

        return jax.tree.map(put, cache, filled)

    def read(self, cache, target, tokens_BT, states_BTF, counts_B):
        (B, T), S = tokens_BT.shape, cache.tokens.shape[1]
        token_T = jnp.arange(T)
        slot_BT = jnp.where(token_T < counts_B[:, None], cache.length[:, None] + token_T, S)
        rows_B1 = jnp.arange(B)[:, None]
        return Read(
            cache.tokens.at[rows_B1, slot_BT].set(tokens_BT, mode="drop"),
            cache.states.at[rows_B1, slot_BT].set(states_BTF, mode="drop"),
            cache.length + counts_B,
        )

    def propose(self, cache, target, token_B):
        first_B = jnp.where(cache.length > 0, cache.tokens[:, 0], token_B)
        place_BK = cache.length[:, None] + 1 + jnp.arange(self.num_drafted)
        said_BK = jnp.take_along_axis(self.table[...][first_B], place_BK, 1, mode="clip")
        right_BK = self.right[...].at[place_BK].get(mode="clip")
        return jnp.where(right_BK, said_BK, (said_BK + 1) % self.vocab).astype(jnp.int32)
