"""States of ended answers: a prompt that begins like one is read from where it differs.

    row of an ended answer ── store ──> stored rows ── resume ──> a prompt's row, which is continued
                                             │
                    other weights: emptied ──┘   the oldest is replaced

So the next turn of a conversation does not read the earlier ones again, if the same adapter draws
it. States of attention serve
any beginning of their tokens. Those of recurrent layers and of rings of a window cannot step back:
they serve prompts that continue all of their tokens.
"""

from collections import OrderedDict
from typing import Any

import jax
import numpy as np

from jaxtrain.adapters.slotted import AdapterSlot
from jaxtrain.distributed.sharding import state_program
from jaxtrain.generation.local.prefill import Prompt, StoredPrefix
from jaxtrain.layers.mixer import Tokenwise


class PrefixCache:
    """States of at most `rows` answers, by one set of weights."""

    def __init__(self, rows: int):
        self.rows = rows
        self.slots = 0
        """Of a stored row; 0 while nothing is stored."""
        self.stored: Any = None
        """The model's cache of `rows` rows."""
        self.queried = self.hits = 0
        """Tokens of all prompts so far, and those of them that were not read again."""
        self._weights: object = None
        self._cuts = False
        self._tokens: OrderedDict[int, tuple[AdapterSlot, np.ndarray]] = OrderedDict()
        """Tokens that each stored row has read, with an adapter; the row that was used last comes
        last."""

    def clear(self) -> None:
        """Forget everything."""
        self._weights, self.stored, self.slots = None, None, 0
        self._tokens.clear()

    def follow(self, weights: object, model: Any) -> None:
        """Forget everything unless these are the weights of the last call."""
        if weights is not self._weights:
            self.clear()
            self._weights = weights
            self._cuts = all(
                isinstance(mixer, Tokenwise) or (mixer.keeps_packed and spec.window is None)
                for spec, mixer in model.stack.mixers()
            )

    def find(self, prompt: Prompt) -> StoredPrefix | None:
        """Return the longest stored beginning of a prompt; None: there is none. The prompt's last
        token is always read: it predicts the first of the answer."""
        best = StoredPrefix(0, 0)
        tokens = np.asarray(prompt.tokens[:-1], np.int32)
        for row, (adapter, read) in self._tokens.items():
            length = min(len(tokens), len(read)) if adapter == prompt.adapter else 0
            differs = np.flatnonzero(tokens[:length] != read[:length])
            count = int(differs[0]) if len(differs) else length
            if count > best.count and (self._cuts or count == len(read)):
                best = StoredPrefix(row, count)
        self.queried += len(prompt.tokens)
        self.hits += best.count
        if not best.count:
            return None
        self._tokens.move_to_end(best.row)
        return best

    def store(self, model: Any, cache: Any, row: int, read: Prompt, slots: int) -> None:
        """Store a row of the sampler's cache, of so many slots, that has read these tokens."""
        if slots > self.slots:
            if self.stored is None:
                self.stored = empty_cache(model, rows=self.rows, slots=slots)
            else:
                self.stored = grow_cache(model, self.stored, rows=self.rows, slots=slots)
            self.slots = slots
        tokens = np.asarray(read.tokens, np.int32)
        target = self._choose(read.adapter, tokens)
        self.stored = copy_row(model, self.stored, np.int32(target), cache, np.int32(row))
        self._tokens[target] = read.adapter, tokens
        self._tokens.move_to_end(target)

    def _choose(self, adapter: AdapterSlot, tokens: np.ndarray) -> int:
        """Return the row to replace: that of an earlier turn of the conversation, else an empty
        one, else the one that was used least recently."""
        for row, (reader, read) in self._tokens.items():
            if (
                reader == adapter
                and len(read) <= len(tokens)
                and np.array_equal(read, tokens[: len(read)])
            ):
                return row
        if len(self._tokens) < self.rows:
            return next(row for row in range(self.rows) if row not in self._tokens)
        return next(iter(self._tokens))


@state_program(static_argnames=("rows", "slots"))
def empty_cache(model: Any, *, rows: int, slots: int) -> Any:
    """Return the model's empty cache."""
    return model.init_cache(rows, slots)


@state_program(static_argnames=("rows", "slots"))
def grow_cache(model: Any, cache: Any, *, rows: int, slots: int) -> Any:
    """Return the cache with more slots."""
    return model.grow_cache(cache, rows, slots)


@state_program(donate_argnames=("stored",))
def copy_row(model: Any, stored: Any, target: jax.Array, cache: Any, row: jax.Array) -> Any:
    """Return `stored` with row `row` of another cache as its row `target`; both int32 []."""
    return model.insert(stored, target[None], cache, row[None])
