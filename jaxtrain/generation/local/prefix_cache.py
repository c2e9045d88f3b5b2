"""States of answers that have ended: a prompt that begins like one is read from where it differs.

    row of an ended answer ── store ──> kept rows ── resume ──> a prompt's row, which goes on behind
                                           │
                  other weights: emptied ──┘   the oldest is replaced

So the next turn of a conversation does not read the earlier ones again. States of attention serve
any beginning of their tokens. Those of recurrent layers and of rings of a window cannot step back:
they serve prompts that go on behind all of their tokens.
"""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.generation.local.prefill import Known
from jaxtrain.layers.mixer import Tokenwise


class PrefixCache:
    """At most `rows` kept states of one set of weights."""

    def __init__(self, rows: int):
        self.rows = rows
        self.slots = 0
        """Of a kept row; 0 while nothing is kept."""
        self.kept: Any = None
        """The model's cache of `rows` rows."""
        self.queried = self.hits = 0
        """Tokens of all prompts so far, and those of them that were not read again."""
        self._weights: object = None
        self._cuts = False
        self._tokens: OrderedDict[int, np.ndarray] = OrderedDict()
        """What each kept row has read, the one that was used last behind the others."""

    def follow(self, weights: object, model: Any) -> None:
        """Forget everything unless these are the weights of the last call."""
        if weights is not self._weights:
            self._weights, self.kept, self.slots = weights, None, 0
            self._tokens.clear()
            self._cuts = all(
                isinstance(mixer, Tokenwise) or (mixer.keeps_packed and spec.window is None)
                for spec, mixer in model.stack.mixers()
            )

    def find(self, tokens: Sequence[int]) -> Known | None:
        """Return the kept row that has read the longest beginning of a prompt; None: there is
        none. The prompt's last token is always read: it predicts the first of the answer."""
        best = Known(0, 0)
        prompt = np.asarray(tokens[:-1], np.int32)
        for row, read in self._tokens.items():
            both = min(len(prompt), len(read))
            differs = np.flatnonzero(prompt[:both] != read[:both])
            count = int(differs[0]) if len(differs) else both
            if count > best.count and (self._cuts or count == len(read)):
                best = Known(row, count)
        self.queried += len(tokens)
        self.hits += best.count
        if not best.count:
            return None
        self._tokens.move_to_end(best.row)
        return best

    def store(self, model: Any, cache: Any, row: int, read: Sequence[int], slots: int) -> None:
        """Keep a row of the sampler's cache, of so many slots, that has read these tokens."""
        if slots > self.slots:
            if self.kept is None:
                self.kept = empty_cache(model, rows=self.rows, slots=slots)
            else:
                self.kept = grow_cache(model, self.kept, rows=self.rows, slots=slots)
            self.slots = slots
        tokens = np.asarray(read, np.int32)
        place = self._choose(tokens)
        self.kept = copy_row(model, self.kept, np.int32(place), cache, np.int32(row))
        self._tokens[place] = tokens
        self._tokens.move_to_end(place)

    def _choose(self, tokens: np.ndarray) -> int:
        """Return the row to replace: an earlier turn of the conversation, an empty one, the one
        that was used least recently."""
        for row, read in self._tokens.items():
            if len(read) <= len(tokens) and np.array_equal(read, tokens[: len(read)]):
                return row
        if len(self._tokens) < self.rows:
            return next(row for row in range(self.rows) if row not in self._tokens)
        return next(iter(self._tokens))


@functools.partial(jax.jit, static_argnames=("rows", "slots"))
def empty_cache(model: Any, *, rows: int, slots: int) -> Any:
    """Return the model's empty cache."""
    return model.init_cache(rows, slots)


@functools.partial(jax.jit, static_argnames=("rows", "slots"))
def grow_cache(model: Any, cache: Any, *, rows: int, slots: int) -> Any:
    """Return the cache with more slots."""
    return model.grow_cache(cache, rows, slots)


@functools.partial(jax.jit, donate_argnames=("kept",))
def copy_row(model: Any, kept: Any, place: jax.Array, cache: Any, row: jax.Array) -> Any:
    """Return `kept` with a row of another cache at `place`; int32 []."""
    return model.insert(kept, place[None], cache, row[None])
