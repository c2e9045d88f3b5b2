"""Rows of a cache on the device: prompts go in, tokens come out, ended rows are reused.

    prefill.fill                           each distinct prompt once ──> its state, first logits
    insert(model, rows, filled, entry)     into free rows; several rows may take one prompt
    decode_chunk(model, rows, stop, ...)   up to CHUNK tokens of every row

Shapes: B rows, U prompts, R rows to fill, S slots of a row, C tokens of a chunk, V vocab.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.adapters.slotted import choose_adapters
from jaxtrain.batch import RouteShape
from jaxtrain.distributed.sharding import state_program
from jaxtrain.generation.local.prefill import FilledPrompts
from jaxtrain.generation.local.token_sampling import DrawKind, DrawParameters, sample
from jaxtrain.layers.mixer import SharedSlots

CHUNK = 32


class SamplerRows(NamedTuple):
    """State of all rows between chunks."""

    cache: Any
    """The model's own pytree."""
    token: jax.Array
    """int32 [B] the last drawn token, not yet read by the model."""
    logprob: jax.Array
    """float32 [B] its log-probability."""
    count: jax.Array
    """int32 [B] tokens drawn so far, including `token`."""
    limit: jax.Array
    """int32 [B] maximum number of tokens."""
    done: jax.Array
    """bool [B]: ended, or never started."""
    keys: jax.Array
    """[B] a random key per row; folded with `count` for each draw."""
    draw: DrawParameters
    ends: jax.Array
    """int32 [B, E] tokens that end the row, padded with -1."""
    shared: SharedSlots
    """Slots shared by rows that were filled together with the same prompt."""
    adapter: jax.Array
    """int32 [B]: see FilledPrompts."""
    shift: jax.Array | None = None
    """int32 [B]: see FilledPrompts."""


class RowInsert(NamedTuple):
    """Initial values of R rows. A row index beyond B is padding and is dropped."""

    row: np.ndarray
    """int32 [R] target row."""
    source: np.ndarray
    """int32 [R] index of the prompt, below U."""
    leader: np.ndarray
    """int32 [R] row that reads the prompt's slots for all rows that begin with it now."""
    limit: np.ndarray
    """int32 [R]."""
    seed: np.ndarray
    """int32 [R]; with `number` it makes the row's random key."""
    number: np.ndarray
    """int32 [R]."""
    draw: DrawParameters
    ends: np.ndarray
    """int32 [R, E]."""
    allowed: np.ndarray | None = None
    """uint32 [R, W] bits of the tokens that may come first; None: all."""


class ChunkEnd(NamedTuple):
    """When a chunk is over."""

    ended: jax.Array | np.ndarray | np.int32
    """int32 []: after so many rows have ended in it."""
    steps: jax.Array | np.ndarray | np.int32
    """int32 []: after so many steps."""

    def goes_on(self, step: jax.Array, C: int, before: jax.Array, running: jax.Array) -> jax.Array:
        """Return bool []: True if step number `step`, below C, is part of it. before, running:
        int32 [], rows that ran at its start and that run now."""
        return (step < jnp.minimum(self.steps, C)) & (running > 0) & (before - running < self.ended)


@jax.jit
def unstack(model: Any) -> Any:
    """Return the model with its layers stored separately, so that a token copies no weights."""
    return model.unstack()


@state_program(static_argnames=("B", "S", "E"))
def empty_rows(model: Any, *, B: int, S: int, E: int) -> SamplerRows:
    """Return B idle rows of S slots."""
    zeros_B, no_B = jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.float32)
    return SamplerRows(
        cache=model.init_cache(B, S),
        token=zeros_B,
        logprob=no_B,
        count=zeros_B,
        limit=zeros_B,
        done=jnp.ones(B, bool),
        keys=jax.vmap(jax.random.key)(zeros_B),
        draw=DrawParameters(jnp.ones(B, jnp.float32), zeros_B, jnp.ones(B, jnp.float32), no_B),
        ends=jnp.full((B, E), -1, jnp.int32),
        shared=SharedSlots(jnp.arange(B, dtype=jnp.int32), zeros_B),
        adapter=zeros_B,
        shift=None if model.rope_axes is None else zeros_B,
    )


@state_program(static_argnames=("B", "S", "E"))
def grow(model: Any, rows: SamplerRows, *, B: int, S: int, E: int) -> SamplerRows:
    """Return the rows with more rows, slots or ends; none may shrink."""
    extra = B - rows.token.shape[0]

    def longer(x: jax.Array, fill: Any = 0) -> jax.Array:
        return jnp.concatenate([x, jnp.full((extra, *x.shape[1:]), fill, x.dtype)])

    # Not donated: every array gets a new shape, so that no buffer could be reused.
    ends = jnp.pad(rows.ends, ((0, 0), (0, E - rows.ends.shape[1])), constant_values=-1)
    new_keys = jax.vmap(jax.random.key)(jnp.zeros(extra, jnp.int32))
    alone = jnp.arange(B - extra, B, dtype=jnp.int32)
    return SamplerRows(
        cache=model.grow_cache(rows.cache, B, S),
        token=longer(rows.token),
        logprob=longer(rows.logprob),
        count=longer(rows.count),
        limit=longer(rows.limit),
        done=longer(rows.done, True),
        keys=jnp.concatenate([rows.keys, new_keys]),
        draw=DrawParameters(*map(longer, rows.draw)),
        ends=longer(ends, -1),
        shared=SharedSlots(jnp.concatenate([rows.shared.leader, alone]), longer(rows.shared.until)),
        adapter=longer(rows.adapter),
        shift=None if rows.shift is None else longer(rows.shift),
    )


@state_program()
def keep(rows: SamplerRows, index_R: jax.Array) -> SamplerRows:
    """Return some of the rows, in this order; all arrays of a model's state are [B, ...]."""
    remaining = jax.tree.map(lambda x: x[index_R], rows)
    return remaining._replace(shared=elect(remaining.shared, len(rows.token)))


@state_program(static_argnames=("kind",), donate_argnames=("rows",))
def insert(
    model: Any, rows: SamplerRows, filled: FilledPrompts, entry: RowInsert, kind: DrawKind
) -> SamplerRows:
    """Start rows behind their prompts, and draw the first token of each.

    `rows` are donated: the cache is the largest array of the sampler, and is updated in place.
    """
    # A key depends on the request alone, so that the answer does not depend on the row it gets.
    make = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))
    keys = make(entry.seed, entry.number)
    first = _fold(keys, jnp.zeros_like(entry.number))
    last_output = filled.last_output[entry.source]
    if model.exact is None:
        never = model.never_drawn
        token, logprob = sample(last_output, first, entry.draw, kind, entry.allowed, never)
    else:
        token, logprob = draw_tokens(model, last_output, first, entry.draw, kind, entry.allowed)

    def put(all_: jax.Array, new: jax.Array) -> jax.Array:
        return all_.at[entry.row].set(new, mode="drop")

    return SamplerRows(
        cache=model.insert(rows.cache, entry.row, filled.cache, entry.source),
        token=put(rows.token, token),
        logprob=put(rows.logprob, logprob),
        count=put(rows.count, jnp.ones_like(entry.limit)),
        limit=put(rows.limit, entry.limit),
        done=put(rows.done, entry.limit < 1),
        keys=put(rows.keys, keys),
        draw=DrawParameters(*map(put, rows.draw, entry.draw)),
        ends=put(rows.ends, entry.ends),
        shared=share(rows.shared, entry, filled.length),
        adapter=put(rows.adapter, filled.adapter[entry.source]),
        shift=None if filled.shift is None else put(rows.shift, filled.shift[entry.source]),
    )


def share(shared: SharedSlots, entry: RowInsert, length_U: jax.Array) -> SharedSlots:
    """Return the slots that rows share once these are filled: rows with one prompt share it."""
    # A row that is refilled leaves its group: the others elect another leader, whose slots hold the
    # same keys and values.
    left_B = shared.until.at[entry.row].set(0, mode="drop")
    leader_B, until_B = elect(shared._replace(until=left_B), len(shared.leader))
    return SharedSlots(
        leader_B.at[entry.row].set(entry.leader, mode="drop"),
        until_B.at[entry.row].set(length_U[entry.source], mode="drop"),
    )


def elect(shared: SharedSlots, B: int) -> SharedSlots:
    """Return the rows of the last state, each behind the first remaining row of its group; `leader`
    is one of the B rows before, equal within a group."""
    own_R = jnp.arange(len(shared.leader), dtype=jnp.int32)
    there_R = shared.until > 0
    first_B = jnp.full(B, B, jnp.int32).at[shared.leader].min(jnp.where(there_R, own_R, B))
    return SharedSlots(jnp.where(there_R, first_B[shared.leader], own_R), shared.until)


@state_program(static_argnames=("kind", "routes"), donate_argnames=("rows",))
def decode_chunk(
    model: Any,
    rows: SamplerRows,
    stop_B: jax.Array,
    over: ChunkEnd,
    kind: DrawKind,
    routes: RouteShape | None = None,
    allowed_BW: jax.Array | None = None,
) -> tuple[SamplerRows, jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return (rows, tokens [B, C], log-probs [B, C], number of tokens handed out per row [B], and
    with `routes` the experts of these tokens [B, C, R], undefined for the token that ends a row).

    Each step hands out the pending token and draws the next, until the chunk is over, after C steps
    at the latest. `stop_B` ends rows beforehand. allowed_BW: uint32 [B, W] bits of the tokens that
    may follow each row's pending one; C is then 1, for the host has to see the token that is drawn.
    """
    C = CHUNK if allowed_BW is None else 1
    rows = rows._replace(done=rows.done | stop_B)
    choose_adapters(model, rows.adapter)
    B = rows.token.shape[0]
    running = (~rows.done).sum()

    def step(carry):
        i, rows, tokens_BC, logprobs_BC, handed_B, routed_BCR = carry
        handed_B += ~rows.done
        tokens_BC = tokens_BC.at[:, i].set(jnp.where(rows.done, -1, rows.token))
        logprobs_BC = logprobs_BC.at[:, i].set(jnp.where(rows.done, 0.0, rows.logprob))
        ended = (rows.token[:, None] == rows.ends).any(1) | (rows.count >= rows.limit)
        # The last draw of a chunk may be useless, but lax.cond would copy the cache in every step.
        rows, routed_B1R = advance(rows._replace(done=rows.done | ended))
        if routes is not None:
            routed_BCR = routed_BCR.at[:, i].set(routed_B1R[:, 0].astype(routes.dtype))
        return i + 1, rows, tokens_BC, logprobs_BC, handed_B, routed_BCR

    def advance(rows: SamplerRows) -> tuple[SamplerRows, jax.Array | None]:
        # Rows that are done read no token, so that their cache stays as it is.
        count_B = (~rows.done).astype(jnp.int32)
        tokens_B1 = rows.token[:, None]
        if rows.shift is None:
            read = model.decode(tokens_B1, rows.cache, count_B, shared=rows.shared)
        else:
            read = model.decode_seen(rows.shift, tokens_B1, rows.cache, count_B, rows.shared)
        keys = _fold(rows.keys, rows.count)
        token, logprob = draw_tokens(model, read.hidden[:, 0], keys, rows.draw, kind, allowed_BW)
        rows = rows._replace(
            cache=read.cache, token=token, logprob=logprob, count=rows.count + ~rows.done
        )
        return rows, read.routed

    def going(carry):
        num_running = (~carry[1].done).sum()
        return over.goes_on(carry[0], C, running, num_running)

    tokens_BC = jnp.full((B, C), -1, jnp.int32)
    logprobs_BC = jnp.zeros((B, C), jnp.float32)
    zeros_B, routed_BCR = jnp.zeros(B, jnp.int32), None
    if routes is not None:
        routed_BCR = jnp.zeros((B, C, routes.width), routes.dtype)
    # A while loop rather than a scan, so that the chunk can end early; its carry, the cache
    # included, is updated in place.
    start = (jnp.zeros((), jnp.int32), rows, tokens_BC, logprobs_BC, zeros_B, routed_BCR)
    return jax.lax.while_loop(going, step, start)[1:]


def draw_tokens(
    model: Any,
    hidden_BD: jax.Array,
    keys: jax.Array,
    draw: DrawParameters,
    kind: DrawKind,
    allowed_BW: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (token int32 [B], log-prob float32 [B]) drawn behind final-normed hidden states.

    An exact model draws from logits, and scores the token, as training does. Over allowed tokens
    alone the log-prob differs from training's by right.
    """
    if model.exact is None or allowed_BW is not None:
        return sample(model.logits(hidden_BD), keys, draw, kind, allowed_BW, model.never_drawn)

    def choose(logits_head, hidden_1BD, aux):
        keys_1BX, draw = aux
        keys = jax.random.wrap_key_data(keys_1BX[0])
        logits = model.logits_of(logits_head, hidden_1BD[0])
        draw, never = DrawParameters(*(x[0] for x in draw)), model.never_drawn
        return sample(logits, keys, draw, kind, never=never)[0][None]

    head_VD, exact = model.head(), model.exact
    aux = jax.random.key_data(keys)[None], DrawParameters(*(x[None] for x in draw))
    token_1B = exact.tokenwise(choose, head_VD, hidden_BD[None], aux)
    temperature_1B = jnp.where(draw.temperature == 0, 1.0, draw.temperature)[None]
    softcap = model.logit_softcap
    log_probs = exact.logp(head_VD, hidden_BD[None], token_1B, temperature_1B, softcap)
    return token_1B[0], log_probs.logp[0]


def _fold(keys: jax.Array, count_B: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in)(keys, count_B)
