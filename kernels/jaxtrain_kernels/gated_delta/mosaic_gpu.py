"""The Hopper backend of the gated delta rule: what it takes, the chunks, and its vjp.

Forward: `gpu_prepare` makes T and P of every chunk, `gpu_walk` takes the states through the lists
of chunks. A forest of more chunks than `gpu_windows.capacity` is left to the loops of XLA: which of
the two is known when the program runs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain_kernels.gated_delta import (
    gpu_gradients,
    gpu_prepare,
    gpu_walk,
    gpu_walk_back,
    gpu_windows,
    xla,
)
from jaxtrain_kernels.mosaic import num_cores, require_hopper

DIM = 128  # of keys and of values
STATES = 2**30 * 11 // 8
"""Bytes of states, before and behind each chunk, that the backward holds: those of 32 heads and as
many chunks as 32,768 tokens of a forest have room for."""


class Options(NamedTuple):
    """Static parameters of the kernels, besides shapes."""

    chain: bool
    lanes: int
    """Lists that a row's trees are dealt to."""
    parts: int = 2
    """Thread blocks that share the columns of a head's state."""


def gated_delta(q, k, v, g, beta, until, prev=None, *, state=None, chunks=None):
    """Implement `jaxtrain_kernels.gated_delta`; bfloat16, 128 dims, one GPU per call."""
    require_hopper()
    T, (K, V) = q.shape[1], (q.shape[-1], v.shape[-1])
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16, got {q.dtype}")
    if (K, V) != (DIM, DIM):
        raise NotImplementedError(f"heads of {K} and {V} dims are not of {DIM}")
    if T == 1:
        raise NotImplementedError("one token a row is no chunk")
    options = choose_options(q, v, prev is None)
    return run(options, q, k, v, g, beta, until, prev, state, chunks)


def find_chunks(until, prev):
    """Compute `chunks` for `gated_delta`; None where this backend declines, and for chains."""
    try:
        require_hopper()
    except NotImplementedError:
        return None
    return None if prev is None else gpu_windows.cut(prev, until)


def choose_options(q, v, chain: bool) -> Options:
    """Choose the number of lists that gives every multiprocessor a thread block."""
    B, N = q.shape[0], v.shape[2]
    options = Options(chain, 1)
    lanes = 1 if chain else max(1, min(8, num_cores() // (B * N * options.parts)))
    return options._replace(lanes=lanes)


def run(options, q, k, v, g, beta, until, prev, state, chunks=None):
    """`gated_delta` behind its checks."""
    B, T = until.shape
    missing = gpu_windows.missing_tokens(T, options.chain)
    if missing:
        longer = (jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)) for x in (q, k, v))
        q, k, v = longer
        g, beta = (jnp.pad(x, [(0, 0), (0, missing), (0, 0)]) for x in (g, beta))
        until, chunks = jnp.pad(until, [(0, 0), (0, missing)]), None
        prev = None if prev is None else jnp.pad(prev, [(0, 0), (0, missing)], constant_values=-1)
    if prev is not None and chunks is None:  # here, so that the backward need not find them again
        chunks = gpu_windows.cut(prev, until)
    if state is None:
        state = jnp.zeros((B, v.shape[2], q.shape[-1], v.shape[-1]), jnp.float32)
    out, last = _gated_delta(options, q, k, v, g, beta, state, until, prev, chunks)
    return out[:, :T] if missing else out, last if options.chain else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_delta(options, q, k, v, g, beta, state, *rows):
    return _choose(options, _walked, _looped, (q, k, v, g, beta, state), *rows)


def _choose(options, kernels, loops, arrays, until, prev, chunks):
    """By the kernels, or by XLA where a forest has too many chunks for them."""
    links, slots = gpu_windows.find_links(until, options.lanes, chunks)
    by_kernels = functools.partial(kernels, options, links, slots)
    if options.chain:
        return by_kernels(*arrays)
    by_loops = functools.partial(loops, until, prev)
    return lax.cond(jnp.max(links.total) <= links.window.shape[1], by_kernels, by_loops, *arrays)


def _walked(options, links, slots, q, k, v, g, beta, state):
    chunked, blank = make_chunks(options, links, q, k, v, g, beta, blank=(v.shape,))
    out, last = gpu_walk.walk(links, chunked, state, slots, onto=blank[0] if blank else None)
    return out, last if options.chain else jnp.zeros_like(state)


def make_chunks(options, links, q, k, v, g, beta, *, blank):
    """(all that needs no state, arrays of the shapes `blank` for outputs of forests)."""
    g, beta = (gpu_windows.by_chunk(links, x, options.chain) for x in (g, beta))
    chunked = gpu_windows.Chunked(q, k, v, beta, jnp.cumsum(g, -1))
    T, P, *blank = gpu_prepare.prepare(chunked, links, () if options.chain else blank)
    return chunked._replace(T=T, P=P), tuple(blank)


def _looped(until, prev, q, k, v, g, beta, state):
    out, last = xla.gated_delta(q, k, v, g, beta, until, prev, state=state, lanes=1)
    return out, jnp.zeros_like(state) if last is None else last


def _forward(options, q, k, v, g, beta, state, *rows):
    out, last = _gated_delta(options, q, k, v, g, beta, state, *rows)
    # In a loop XLA would run the kernels twice: for their result, and into the stack of all
    # layers'.
    out, last = lax.optimization_barrier((out, last))
    # A remat policy that saves this name spares the backward a second forward.
    out = checkpoint_name(out, "attention_out")
    return (out, last), (q, k, v, g, beta, state, rows)


def _backward(options, residuals, cotangents):
    *arrays, rows = residuals
    grads = _choose(options, _walked_back, _looped_back, (*arrays, *cotangents), *rows)
    return *grads, None, None, None


def _walked_back(options, links, slots, *arrays):
    """Gradients by groups of heads, if the states of all chunks would take too much memory."""
    q, _, v = arrays[:3]
    count = count_groups(links.window.size, q.shape[2], v.shape[2], q.shape[3] * v.shape[3])
    one_group = functools.partial(_group_back, options, links, slots)
    if count == 1:
        return one_group(*arrays)
    axes = (2, 2, 2, 2, 2, 1, 2, 1)  # of the heads

    def body(i, grads):
        part = (
            lax.dynamic_slice_in_dim(x, i * (x.shape[axis] // count), x.shape[axis] // count, axis)
            for x, axis in zip(arrays, axes, strict=True)
        )
        return tuple(
            lax.dynamic_update_slice_in_dim(total, x, i * x.shape[axis], axis)
            for total, x, axis in zip(grads, one_group(*part), axes, strict=False)
        )

    return lax.fori_loop(0, count, body, tuple(jnp.zeros_like(x) for x in arrays[:6]))


def count_groups(chunks: int, key_heads: int, value_heads: int, size: int) -> int:
    """Groups of heads that the backward goes through, each of whole key heads; `size` numbers a
    state. Groups are no larger than need be: each walks the whole list again."""
    count, states = 1, 2 * 2 * chunks * value_heads * size
    while states > count * STATES and key_heads % (2 * count) == 0:
        count *= 2
    return count


def _group_back(options, links, slots, q, k, v, g, beta, state, d_out, d_last):
    chain = options.chain
    shapes = (q.shape, k.shape, v.shape)
    chunked, blank = make_chunks(options, links, q, k, v, g, beta, blank=shapes)
    new, S = gpu_walk.walk(links, chunked, state, slots, states=True)
    owed = d_last if chain else None
    d_x, d_S, d_state = gpu_walk_back.walk_back(links, chunked, d_out, owed, slots)
    # A list without chunks owes nothing to its row's state.
    d_state = jnp.where((links.count > 0)[:, None, None, None], d_state, 0.0)
    d_state = d_state.reshape(*state.shape[:1], -1, *state.shape[1:]).sum(1)
    walked = (S, new, d_out, d_x, d_S)
    *grads, d_g, d_beta = gpu_gradients.gradients(links, chunked, *walked, onto=blank)
    by_token = functools.partial(gpu_windows.from_chunks, links, chain=chain, tokens=q.shape[1])
    return *grads, by_token(d_g), by_token(d_beta), d_state


def _looped_back(until, prev, *arrays):
    *arrays, d_out, d_last = arrays
    _, pull = jax.vjp(functools.partial(_looped, until, prev), *arrays)
    return pull((d_out, d_last))


_gated_delta.defvjp(_forward, _backward)
