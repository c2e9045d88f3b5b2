"""Reading of prompts in blocks of a fixed size, so that prompts of all lengths share programs.

    prompts ── assign ─┬─> wide block: many prompts side by side, a chunk of each per call
                       └─> long block: one prompt, in larger chunks or without idle neighbors
    every call continues the caches of its rows; a row whose prompt ends takes the next prompt

So an engine compiles two programs that read prompts, whose sizes follow from its number of rows
alone.

Shapes: U prompts of a block, C tokens of a chunk, S slots of a cache, V vocab, E experts' numbers.
"""

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import RouteShape

Prompt = tuple[int, ...]


class Block(NamedTuple):
    """Size of a call that reads prompts."""

    rows: int
    tokens: int
    """Tokens of each row."""
    overhead: int
    """Number of tokens that would take as long as the fixed part of a call."""

    @property
    def cost(self) -> int:
        """Return the time of a call, in tokens."""
        return self.rows * self.tokens + self.overhead

    def count_calls(self, prompt: Prompt) -> int:
        """Return the number of calls in which a row reads the prompt."""
        return -(-len(prompt) // self.tokens)


def choose_blocks(free_rows: int, platform: str) -> tuple[Block, Block]:
    """Return the long and the wide block of a sampler in which about `free_rows` rows become free
    at once."""
    # A CPU computes what it needs for padding; an accelerator is bound by launches and by reading
    # weights, and computes a few hundred tokens as fast as one.
    if platform == "cpu":
        return Block(1, 64, 64), Block(max(1, min(free_rows, 8)), 64, 64)
    return Block(1, 512, 1024), Block(max(1, min(free_rows, 64)), 128, 1024)


class FilledPrompts(NamedTuple):
    """Prompts of which the model has read a part or all."""

    cache: Any
    """With U rows and S slots."""
    last_output: jax.Array
    """Behind the last token read of each row, for `slots.draw_tokens`: logits float32 [U, V], of an
    exact model hidden states [U, D]."""
    length: jax.Array
    """int32 [U] tokens read."""


class ReadChunk(NamedTuple):
    """A prompt's part in a call."""

    row: int
    prompt: Prompt
    count: int
    """Tokens of it that were read."""
    ended: bool


class PrefillCall(NamedTuple):
    """Result of a call."""

    filled: FilledPrompts
    """To be inserted before the next call, which reuses its memory."""
    chunks: list[ReadChunk]
    routed: jax.Array | None
    """[U, C, E] experts of the tokens, if recorded."""


@functools.partial(jax.jit, static_argnames=("U", "S"))
def empty_prompts(model: Any, *, U: int, S: int) -> FilledPrompts:
    """Return U rows of S slots that have read nothing."""
    V, D = model.head().shape
    shape, dtype = ((U, V), jnp.float32) if model.exact is None else ((U, D), model.compute_dtype)
    return FilledPrompts(model.init_cache(U, S), jnp.zeros(shape, dtype), jnp.zeros(U, jnp.int32))


@functools.partial(jax.jit, static_argnames=("routes",), donate_argnames=("filled",))
def fill(
    model: Any,
    filled: FilledPrompts,
    tokens_UC: jax.Array,
    counts_U: jax.Array,
    fresh_U: jax.Array,
    routes: RouteShape | None = None,
) -> tuple[FilledPrompts, jax.Array | None]:
    """Read the first `counts_U` of each row's tokens behind those it has read before, and return
    the rows with the experts of the tokens if `routes` asks for them. fresh_U: bool, rows that
    begin a new prompt."""
    U = len(counts_U)
    # An empty cache of one slot clears a row: keys and values behind its length are never seen, so
    # that only recurrent states have to be reset as a whole.
    row_U = jnp.where(fresh_U, jnp.arange(U, dtype=jnp.int32), U)
    empty = model.init_cache(1, 1)
    cache = model.insert(filled.cache, row_U, empty, jnp.zeros(U, jnp.int32))
    read = model.decode(tokens_UC, cache, counts_U)
    last_U11 = jnp.maximum(counts_U - 1, 0)[:, None, None]
    last_UD = jnp.take_along_axis(read.hidden, last_U11, axis=1)[:, 0]
    last_output_UX = last_UD if model.exact else model.logits(last_UD).astype(jnp.float32)
    filled = FilledPrompts(
        read.cache,
        jnp.where((counts_U > 0)[:, None], last_output_UX, filled.last_output),
        jnp.where(fresh_U, 0, filled.length) + counts_U,
    )
    return filled, None if routes is None else read.routed.astype(routes.dtype)


def read_prompts(
    model: Any,
    prompts: Sequence[Prompt],
    blocks: Sequence[Block],
    slots: int,
    routes: RouteShape | None = None,
) -> Iterator[PrefillCall]:
    """Read distinct prompts, each of at most `slots` tokens, with the blocks that suit them."""
    for block, assigned in zip(blocks, assign(prompts, *blocks), strict=True):
        if assigned:
            yield from read_by(block, model, assigned, slots, routes)


def read_by(
    block: Block, model: Any, prompts: Sequence[Prompt], slots: int, routes: RouteShape | None
) -> Iterator[PrefillCall]:
    """Read prompts with one block."""
    filled = empty_prompts(model, U=block.rows, S=slots)
    waiting = deque(prompts)
    reading: list[tuple[Prompt, int] | None] = [None] * block.rows
    while waiting or any(reading):
        tokens_UC = np.zeros((block.rows, block.tokens), np.int32)
        counts_U, fresh_U = np.zeros(block.rows, np.int32), np.zeros(block.rows, bool)
        chunks = []
        for row in range(block.rows):
            if reading[row] is None and waiting:
                reading[row], fresh_U[row] = (waiting.popleft(), 0), True
            if (current := reading[row]) is None:
                continue
            prompt, start = current
            chunk = prompt[start : start + block.tokens]
            tokens_UC[row, : len(chunk)], counts_U[row] = chunk, len(chunk)
            stop = start + len(chunk)
            reading[row] = None if stop == len(prompt) else (prompt, stop)
            chunks.append(ReadChunk(row, prompt, len(chunk), stop == len(prompt)))
        filled, routed = fill(model, filled, tokens_UC, counts_U, fresh_U, routes)
        yield PrefillCall(filled, chunks, routed)


def assign(
    prompts: Sequence[Prompt], long: Block, wide: Block
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts for the long and those for the wide block, longest first, so that the
    calls take the least time."""
    ordered = sorted(prompts, key=len, reverse=True)
    alone = list(itertools.accumulate(map(long.count_calls, ordered), initial=0))
    behind = [*itertools.accumulate(map(wide.count_calls, reversed(ordered)), initial=0)][::-1]

    def cost(split: int) -> int:
        longest = wide.count_calls(ordered[split]) if split < len(ordered) else 0
        wide_calls = max(longest, -(-behind[split] // wide.rows))
        return alone[split] * long.cost + wide_calls * wide.cost

    split = min(range(len(ordered) + 1), key=cost)
    return ordered[:split], ordered[split:]
