"""Reading of prompts in blocks of a fixed size, so that prompts of all lengths share programs.

    prompts ── assign ─┬─> wide block: many prompts side by side, a chunk of each per call
                       └─> long block: one prompt, in larger chunks or without idle neighbors
    every call continues the caches of its rows; a row whose prompt ends takes the next prompt

So an engine compiles two programs that read prompts, whose sizes follow from its number of rows
alone. Prompts with images go in groups of their own, which begin together: the tower reads the
images of a group at once, before its first chunk. Where tokens of an image see later ones of it,
each group is read in one call, whose size is a power of two times that of a chunk.

Shapes: U prompts of a block, C tokens of a chunk, S slots of a cache, V vocab, E experts' numbers,
L tokens of the longest prompt, P patches of a prompt.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import Context

from jaxtrain.adapters.slotted import NO_ADAPTER, AdapterSlot, choose_adapters
from jaxtrain.batch import IMAGE_SLOT, Batch, Images, RouteShape
from jaxtrain.data.packing.pack import ImagePacker
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.distributed.sharding import state_program
from jaxtrain.layers.embed import SeenImages

MAX_PATCHES = 1 << 15
"""Patches of a group of prompts, so that the tower's activations have room."""


class StoredPrefix(NamedTuple):
    """Beginning of a prompt that need not be read."""

    row: int
    """Row of the stored states (prefix_cache.py)."""
    count: int
    """Tokens of it."""


@dataclass(frozen=True)
class Prompt:
    """Tokens to be continued. Two are equal if tokens, images and adapter are: different images
    have the same tokens."""

    tokens: tuple[int, ...]
    images: tuple[Image, ...] = ()
    slot: tuple[int, ...] = ()
    """As in PlacedImages; empty without images."""
    adapter: AdapterSlot = NO_ADAPTER
    """Adapter that reads it."""
    stored: StoredPrefix | None = field(default=None, compare=False)
    """State to begin from; None: the empty one."""

    @classmethod
    def of(
        cls, tokens: Sequence[int], placed: PlacedImages | None, adapter: AdapterSlot = NO_ADAPTER
    ) -> "Prompt":
        """Return the prompt of tokens and their images."""
        if placed is None:
            return cls(tuple(tokens), adapter=adapter)
        return cls(tuple(tokens), placed.images, tuple(placed.slot.tolist()), adapter)

    @property
    def placed(self) -> PlacedImages:
        """Its images."""
        return PlacedImages(self.images, np.array(self.slot, np.int32))

    @property
    def start(self) -> int:
        """Number of tokens that need not be read."""
        return 0 if self.stored is None else self.stored.count

    def __len__(self) -> int:
        """Number of tokens to read."""
        return len(self.tokens) - self.start


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


class SeenGroup(NamedTuple):
    """Images of prompts that begin together."""

    images: SeenImages
    """Of all of their tokens."""
    start: jax.Array | np.int32
    """int32 []: index of the first token of a call."""

    def cut(self, C: int) -> SeenImages:
        """Return the images of the C tokens of a call."""
        slot_UC, rope_UC3, since_UC = (
            None if x is None else jax.lax.dynamic_slice_in_dim(x, self.start, C, axis=1)
            for x in (self.images.slot, self.images.rope, self.images.since)
        )
        if since_UC is not None:
            since_UC = since_UC - self.start
        return self.images._replace(slot=slot_UC, rope=rope_UC3, since=since_UC)


class FilledPrompts(NamedTuple):
    """Prompts of which the model has read a part or all."""

    cache: Any
    """With U rows and S slots."""
    last_output: jax.Array
    """Behind the last token read of each row, for `slots.draw_tokens`: logits float32 [U, V], of an
    exact model hidden states [U, D]."""
    length: jax.Array
    """int32 [U] tokens read."""
    adapter: Any
    """int32 [U] slot of the adapter that reads them."""
    shift: jax.Array | None = None
    """int32 [U]: what is added to the index of a token behind the prompt where a model turns by
    time, row and column, because images take fewer positions than tokens; None of other models."""


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


@state_program(static_argnames=("U", "S"))
def empty_prompts(model: Any, *, U: int, S: int) -> FilledPrompts:
    """Return U rows of S slots that have read nothing."""
    V, D = model.head().shape
    shape, dtype = ((U, V), jnp.float32) if model.exact is None else ((U, D), model.compute_dtype)
    no_U = jnp.zeros(U, jnp.int32)
    shift_U = None if model.rope_axes is None else no_U
    return FilledPrompts(model.init_cache(U, S), jnp.zeros(shape, dtype), no_U, no_U, shift_U)


@jax.jit
def see(model: Any, images: Images, slot_UL: jax.Array) -> SeenImages:
    """Run the tower on the images of U prompts."""
    index_UL = jnp.broadcast_to(jnp.arange(slot_UL.shape[1], dtype=jnp.int32), slot_UL.shape)
    until_UL = jnp.full(slot_UL.shape, slot_UL.shape[1], jnp.int32)
    streams = {IMAGE_SLOT: slot_UL}
    batch = Batch(slot_UL, index_UL, index_UL - 1, until_UL, {}, streams=streams, images=images)
    return model.see(batch, Context(until_UL, None, index_UL, index_UL))


@state_program(static_argnames=("routes",), donate_argnames=("filled",))
def fill(
    model: Any,
    filled: FilledPrompts,
    tokens_UC: jax.Array,
    counts_U: jax.Array,
    fresh_U: jax.Array,
    routes: RouteShape | None = None,
    group: SeenGroup | None = None,
) -> tuple[FilledPrompts, jax.Array | None]:
    """Read the first `counts_U` of each row's tokens behind those it has read before, and return
    the rows with the experts of the tokens if `routes` asks for them. fresh_U: bool, rows that
    begin a new prompt. group: their images."""
    U, C = tokens_UC.shape
    choose_adapters(model, filled.adapter)
    seen = None if group is None else group.cut(C)
    # An empty cache of one slot clears a row: keys and values behind its length are never seen, so
    # that only recurrent states have to be reset as a whole.
    row_U = jnp.where(fresh_U, jnp.arange(U, dtype=jnp.int32), U)
    empty = model.init_cache(1, 1)
    cache = model.insert(filled.cache, row_U, empty, jnp.zeros(U, jnp.int32))
    if seen is None:
        read = model.decode(tokens_UC, cache, counts_U)
    else:
        read = model.decode_seen(seen, tokens_UC, cache, counts_U)
    last_U11 = jnp.maximum(counts_U - 1, 0)[:, None, None]
    last_UD = jnp.take_along_axis(read.hidden, last_U11, axis=1)[:, 0]
    last_output_UX = last_UD if model.exact else model.logits(last_UD).astype(jnp.float32)
    filled = FilledPrompts(
        read.cache,
        jnp.where((counts_U > 0)[:, None], last_output_UX, filled.last_output),
        jnp.where(fresh_U, 0, filled.length) + counts_U,
        filled.adapter,
        filled.shift,
    )
    if filled.shift is not None:
        shift_U = jnp.where(fresh_U, 0, filled.shift)
        if seen is not None and seen.rope is not None:
            last_U3 = jnp.take_along_axis(seen.rope, last_U11, axis=1)[:, 0]
            behind_U = last_U3.max(-1) + 1 - filled.length
            shift_U = jnp.where(counts_U > 0, behind_U, shift_U)
        filled = filled._replace(shift=shift_U)
    return filled, None if routes is None else read.routed.astype(routes.dtype)


@state_program(donate_argnames=("filled",))
def resume(
    model: Any,
    filled: FilledPrompts,
    row: jax.Array,
    stored: Any,
    source: jax.Array,
    count: jax.Array,
) -> FilledPrompts:
    """Return the rows with one, `row`, that has read the first `count` tokens of row `source` of
    another cache, which has no more slots; all int32 []."""
    cache = model.insert(filled.cache, row[None], stored, source[None])
    shift_U = filled.shift
    return filled._replace(
        cache=cache._replace(length=cache.length.at[row].set(count)),
        length=filled.length.at[row].set(count),
        shift=None if shift_U is None else shift_U.at[row].set(0),
    )


def read_prompts(
    model: Any,
    prompts: Sequence[Prompt],
    blocks: Sequence[Block],
    slots: int,
    routes: RouteShape | None = None,
    packer: ImagePacker | None = None,
    stored: Any = None,
) -> Iterator[PrefillCall]:
    """Read distinct prompts, each of at most `slots` tokens, with the blocks that suit them.
    packer: makes patches, for prompts with images. stored: cache of the stored
    prefixes."""
    texts = [prompt for prompt in prompts if not prompt.images]
    for block, assigned in zip(blocks, assign(texts, *blocks), strict=True):
        if assigned:
            yield from read_by(block, model, assigned, slots, routes, stored=stored)
    if len(texts) < len(prompts):
        assert packer is not None, "prompts with images need what makes patches of them"
        pictured = sorted((prompt for prompt in prompts if prompt.images), key=len)
        patches, block = packer.bucket([prompt.placed for prompt in pictured]), blocks[1]
        if model.image_blocks:
            calls = 1 << (block.count_calls(pictured[-1]) - 1).bit_length()
            rows = max(1, block.rows // calls)
            block = block._replace(rows=rows, tokens=block.tokens * calls)
        rows = min(block.rows, max(1, MAX_PATCHES // patches))
        rows = min(rows, 1 << (len(pictured) - 1).bit_length())
        reader = ImagePrompts(packer, patches)
        yield from read_by(block._replace(rows=rows), model, pictured, slots, routes, reader)


class ImagePrompts(NamedTuple):
    """Reader of the images of prompts, with the same number of patches for all of them."""

    packer: ImagePacker
    patches: int
    """P."""

    def see(self, model: Any, prompts: Sequence[Prompt], rows: int, length: int) -> SeenImages:
        """Run the tower on a group of at most `rows` prompts of at most `length` tokens."""
        placed = [prompt.placed for prompt in prompts]
        slot_UL = np.full((rows, length), -1, np.int32)
        for row, images in enumerate(placed):
            slot_UL[row, : len(images.slot)] = images.slot
        padded = [*placed, *[None] * (rows - len(placed))]
        return see(model, self.packer.pack(padded, self.patches), slot_UL)


def read_by(
    block: Block,
    model: Any,
    prompts: Sequence[Prompt],
    slots: int,
    routes: RouteShape | None,
    images: ImagePrompts | None = None,
    stored: Any = None,
) -> Iterator[PrefillCall]:
    """Read prompts with one block. images: all prompts have images, whose features are those of
    a group that begins together. stored: see read_prompts."""
    filled = empty_prompts(model, U=block.rows, S=slots)
    waiting = deque(prompts)
    reading: list[tuple[Prompt, int] | None] = [None] * block.rows
    group, adapter_U = None, np.zeros(block.rows, np.int32)
    while waiting or any(reading):
        begins = images is None or not any(reading)
        if images is not None and begins:
            members = list(itertools.islice(waiting, block.rows))
            length = -(-slots // block.tokens) * block.tokens
            seen = images.see(model, members, block.rows, length)
            group = SeenGroup(seen, np.int32(0))
        tokens_UC = np.zeros((block.rows, block.tokens), np.int32)
        counts_U, fresh_U = np.zeros(block.rows, np.int32), np.zeros(block.rows, bool)
        chunks = []
        for row in range(block.rows):
            if reading[row] is None and waiting and begins:
                prompt = waiting.popleft()
                reading[row], fresh_U[row] = (prompt, prompt.start), prompt.stored is None
                adapter_U[row] = prompt.adapter.index
                if prompt.stored is not None:
                    source, count = map(np.int32, prompt.stored)
                    filled = resume(model, filled, np.int32(row), stored, source, count)
            if (current := reading[row]) is None:
                continue
            prompt, start = current
            chunk = prompt.tokens[start : start + block.tokens]
            tokens_UC[row, : len(chunk)], counts_U[row] = chunk, len(chunk)
            stop = start + len(chunk)
            ended = stop == len(prompt.tokens)
            reading[row] = None if ended else (prompt, stop)
            chunks.append(ReadChunk(row, prompt, len(chunk), ended))
        # A copy: the device may read the array itself, after the next prompt has changed it.
        filled = filled._replace(adapter=adapter_U.copy())
        filled, routed = fill(model, filled, tokens_UC, counts_U, fresh_U, routes, group)
        yield PrefillCall(filled, chunks, routed)
        if group is not None:
            group = group._replace(start=np.int32(group.start + block.tokens))


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
