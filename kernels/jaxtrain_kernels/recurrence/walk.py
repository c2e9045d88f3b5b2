"""Linear recurrences in plain XLA: chunks in blocks, a state walked through them, both ways.

Runs everywhere; deterministic. A `ChunkRule` says what happens inside of a chunk. What needs no
state is computed for a block of chunks at once, the rest chunk by chunk in depth-first order
(chunks.py). The loops run as often as the rows have chunks, so there is no number that a forest
could exceed.

The backward keeps the inputs alone. It walks once more, keeping the state at a few blocks, then
goes through the blocks from the last to the first, each entered once more from the state kept
before it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.recurrence.chunks import NEIGHBOR, ROOT, Chunks, cut_rows

LANES = 4  # chunks that an accelerator should be given at a time
KEPT = 8  # blocks at most; a state is large


class ChunkRule(NamedTuple):
    """A recurrence inside of chunks. Leading dims are free; C tokens, H key heads, R value heads of
    each. Inputs come as [..., H, C, X] and [..., H, R, C, X], zeros behind the last token of a
    chunk; the state S is [..., H, R, K, V]."""

    prepare: Callable[..., Any]
    """inputs -> a chunk: all that needs no state."""
    enter: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    """(chunk, S before) -> (what the outputs need beside it, S behind)."""
    outputs: Callable[[Any, jax.Array, Any], jax.Array]
    """(chunk, S before, what `enter` made) -> o [..., H, R, C, V]."""
    leave: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]
    """(chunk, gradient of o, of S behind) -> (what the gradients need beside it, that of S before).
    """
    gradients: Callable[..., tuple[jax.Array, ...]]
    """(chunk, S before, what `enter` made, gradient of o, what `leave` made, gradient of S behind,
    S behind) -> gradients of the inputs."""
    shared: int = 0
    """Number of inputs behind the others that all tokens share, of any shape; their gradients are
    each chunk's share."""


class Options(NamedTuple):
    """Static parameters of the program, besides shapes."""

    chunk: int
    """Tokens, a power of two."""
    block: int
    """Chunks that are prepared at once."""
    lanes: int
    """Lists that a row's trees are dealt to."""
    saved_blocks: int
    """Blocks at which the backward keeps the state."""
    chain: bool
    slots: int = 1
    """For states on the way."""


class Walk(NamedTuple):
    """The state on its way, of B lists."""

    current: jax.Array
    """[B, H, R, K, V]: behind the last chunk."""
    slots: jax.Array
    """[B, slots, H, R, K, V]: what later chunks will ask for."""


def run(
    rule: ChunkRule,
    inputs: Sequence[jax.Array],
    state: jax.Array,
    until: jax.Array,
    prev: jax.Array | None,
    chunk: int,
    lanes: int | None,
) -> tuple[jax.Array, jax.Array]:
    """(o, shaped as the third input; the states behind the rows, meant for prev None alone).

    Inputs [B, T, H, X] (what all value heads of a key head read) and [B, T, H, R, X]; state [B, H,
    R, K, V]; until and prev as the ops say. chunk: tokens of the longest; lanes: lists that a
    row's trees are dealt to, None: as many as fit the device. Gradients to inputs and state.
    """
    B, T = until.shape
    options = choose_options(B, T, chunk, lanes, prev is None)
    chunks = cut_rows(prev, until, options.chunk, options.lanes, options.block)
    options = options._replace(slots=chunks.slots)
    return _run(rule, options, tuple(inputs), state, tuple(chunks)[:-1])


def choose_options(B: int, T: int, chunk: int, lanes: int | None, chain: bool) -> Options:
    """Chunks no longer than the row; lists for rows that are few, where many chunks cost what one
    does."""
    while chunk > 1 and chunk // 2 >= T:
        chunk //= 2
    if lanes is None:
        lanes = 1 if jax.default_backend() == "cpu" else max(1, LANES // B)
    full = -(-T // chunk)
    block = min(32, -(-full // 4))
    saved_blocks = min(KEPT, -(-3 * full // (2 * block)) + 1)
    return Options(chunk, block, 1 if chain else lanes, saved_blocks, chain)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(rule, options, inputs, state, chunks):
    chunks = Chunks(*chunks, options.slots)

    def body(block, carry):
        walk, out = carry
        part = _prepare(rule, options, chunks, block, inputs)
        walk, (before, entered, _) = _walk(rule, options, chunks, block, part, state, walk)
        tokens = _tokens(options, chunks, block)
        return walk, _put(out, chunks.row, tokens, rule.outputs(part, before, entered))

    out = jnp.zeros_like(inputs[2])
    walk, out = lax.fori_loop(0, _blocks(options, chunks), body, (_start(chunks, state), out))
    last = walk.current if options.chain else jnp.zeros_like(state)
    return out, last


def _forward(rule, options, inputs, state, chunks):
    out, last = _run(rule, options, inputs, state, chunks)
    # A remat policy that saves this name spares the backward a second forward.
    out = checkpoint_name(out, "attention_out")
    return (out, last), (inputs, state, chunks)


def _backward(rule, options, residuals, cotangents):
    inputs, state, chunks = residuals
    d_out, d_last = cotangents
    chunks = Chunks(*chunks, options.slots)
    blocks = _blocks(options, chunks)
    stride = jnp.maximum(1, -(-blocks // options.saved_blocks))
    start = _start(chunks, state)

    def forward(block, carry):
        part = _prepare(rule, options, chunks, block, inputs)
        walk, states = _walk(rule, options, chunks, block, part, state, carry[0])
        return walk, part, states

    _, *empty = jax.eval_shape(forward, jnp.int32(0), (start,))

    def keep(block, carry):
        walk, saved = carry
        slot = jnp.where(block % stride == 0, block // stride, options.saved_blocks)
        saved = jax.tree.map(lambda all, x: all.at[slot].set(x, mode="drop"), saved, walk)
        return forward(block, (walk,))[0], saved

    saved = jax.tree.map(lambda x: jnp.zeros((options.saved_blocks, *x.shape), x.dtype), start)
    _, saved = lax.fori_loop(0, blocks, keep, (start, saved))

    def body(step, carry):
        d_walk, d_state, grads = carry
        block = blocks - 1 - step
        from_kept = block // stride
        walk = jax.tree.map(lambda all: all[from_kept], saved)
        # Of the blocks from there to this one what this one is made of remains.
        again = (walk, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty))
        first = from_kept * stride
        _, part, (before, entered, behind) = lax.fori_loop(first, block + 1, forward, again)
        tokens = _tokens(options, chunks, block)
        d_o = _take(d_out, chunks.row, tokens).astype(state.dtype)
        d_walk, d_state, d_made, d_S = _walk_back(
            rule, options, chunks, block, part, d_o, d_walk, d_state
        )
        chunk_grads = rule.gradients(part, before, entered, d_o, d_made, d_S, behind)
        of_tokens = len(inputs) - rule.shared
        grads = tuple(
            _put(all, chunks.row, tokens, x) if index < of_tokens else all + x.sum((0, 1))
            for index, (all, x) in enumerate(zip(grads, chunk_grads, strict=True))
        )
        return d_walk, d_state, grads

    d_walk = _start(chunks, jnp.zeros_like(state))
    if options.chain:
        d_walk = d_walk._replace(current=d_last)
    grads = tuple(jnp.zeros_like(x) for x in inputs)
    zeros = jnp.zeros_like(d_walk.current)
    d_walk, d_state, grads = lax.fori_loop(0, blocks, body, (d_walk, zeros, grads))
    # A chain without tokens hands its state on.
    d_state = jnp.where(_wide(chunks.count > 0, d_state), d_state, d_walk.current)
    d_state = d_state.reshape(*state.shape[:1], -1, *state.shape[1:]).sum(1)
    return grads, d_state, None


_run.defvjp(_forward, _backward)


def _start(chunks: Chunks, state) -> Walk:
    state_B = state[chunks.row]
    return Walk(state_B, jnp.zeros((len(state_B), chunks.slots, *state_B.shape[1:]), state_B.dtype))


def _blocks(options: Options, chunks: Chunks):
    """Blocks until the longest list ends."""
    return -(-jnp.max(chunks.count) // options.block)


def _tokens(options: Options, chunks: Chunks, block):
    return chunks.tokens(block * options.block, options.block, options.chunk)


def _take(x, row_B, tokens_BGC):
    """x [rows, T, ..., X] at the tokens of a block: [B, G, ..., C, X]; zeros for none."""
    taken = x.at[row_B[:, None, None], tokens_BGC].get(mode="fill", fill_value=0)
    return jnp.moveaxis(taken, 2, -2)


def _put(x, row_B, tokens_BGC, values):
    """The inverse of `_take`: x with values at these tokens."""
    values = jnp.moveaxis(values, -2, 2).astype(x.dtype)
    # Chunks do not overlap, so each token is written once.
    return x.at[row_B[:, None, None], tokens_BGC].set(values, mode="drop", unique_indices=True)


def _prepare(rule, options, chunks, block, inputs):
    """The chunks of a block, [B, G, H, ...]."""
    tokens, of_tokens = _tokens(options, chunks, block), len(inputs) - rule.shared
    taken = (_take(x, chunks.row, tokens) for x in inputs[:of_tokens])
    return rule.prepare(*taken, *inputs[of_tokens:])


def _links(options: Options, chunks: Chunks, block):
    """(source, keep) of the chunks of a block, [G, B]."""
    first = block * options.block
    return tuple(
        lax.dynamic_slice_in_dim(x, first, options.block, axis=1).T
        for x in (chunks.source, chunks.keep)
    )


def _wide(flags_B, array):
    return flags_B.reshape(-1, *(1,) * (array.ndim - 1))


def _by_chunk(tree):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tree)


def _walk(rule, options, chunks, block, part, state, walk):
    """(the walk behind a block; of its chunks the states before, what `enter` made and the states
    behind, [B, G, H, R, ...])."""
    rows_B = jnp.arange(len(chunks.row), dtype=jnp.int32)
    first = state[chunks.row]

    def step(walk, chunk_step):
        chunk, source, keep = chunk_step
        stored = walk.slots[rows_B, jnp.maximum(source, 0)]
        before = jnp.where(_wide(source == NEIGHBOR, stored), walk.current, stored)
        before = jnp.where(_wide(source == ROOT, stored), first, before)
        entered, behind = rule.enter(chunk, before)
        return Walk(behind, walk.slots.at[rows_B, keep].set(behind, mode="drop")), (
            before,
            entered,
            behind,
        )

    walk, by_step = lax.scan(step, walk, (_by_chunk(part), *_links(options, chunks, block)))
    return walk, _by_chunk(by_step)


def _walk_back(rule, options, chunks, block, part, d_out, d_walk, d_state):
    """Walk from the last chunk of a block to the first: returns the gradients of the current state,
    of those in slots and to the first ones; of the chunks what `leave` made and the gradients of
    the states behind them."""
    rows_B = jnp.arange(len(chunks.row), dtype=jnp.int32)

    def step(carry, chunk_step):
        (d_state_now, slots), d_state = carry
        chunk, d_o, source, keep = chunk_step
        owed = slots.at[rows_B, keep].get(mode="fill", fill_value=0)
        d_S = d_state_now + owed
        # The slot is reused by an earlier chunk, whose readers begin with a gradient of 0.
        slots = slots.at[rows_B, keep].set(0, mode="drop")
        d_made, before = rule.leave(chunk, d_o, d_S)
        zeros = jnp.zeros_like(before)
        d_state_now = jnp.where(_wide(source == NEIGHBOR, before), before, zeros)
        # Every root of a row starts from the row's state, so their gradients add up.
        d_state += jnp.where(_wide(source == ROOT, before), before, zeros)
        slot = jnp.where(source >= 0, source, chunks.slots)
        slots = slots.at[rows_B, slot].add(before, mode="drop")
        return (Walk(d_state_now, slots), d_state), (d_made, d_S)

    links = _links(options, chunks, block)
    by_chunk = (_by_chunk(part), _by_chunk(d_out), *links)
    (d_walk, d_state), by_step = lax.scan(step, (d_walk, d_state), by_chunk, reverse=True)
    return d_walk, d_state, *_by_chunk(by_step)
