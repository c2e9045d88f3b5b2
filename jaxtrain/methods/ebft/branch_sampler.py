"""Blocks drawn at many places of packed documents at once, on the devices that train.

    documents [B, T] ── read once ──> keys and values of all layers
    step 0       drawn from what the token before each anchor predicts
    step s       the M tokens of step s - 1 go on; of the documents each sees what its anchor has
                 before it, of the drawn ones those of its own branch

Who sees a slot is an interval of the M branches, because these stand in the order of their anchors.
Models with layers that keep no packed rows (recurrent ones) read the whole forest anew each step.

Shapes: B rows, T packed tokens, A blocks, N samples of each, M = A * N branches, G tokens of each,
U tokens of a row of the forest, S slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtrain_kernels import Context

from jaxtrain.batch import Batch
from jaxtrain.generation.local.token_sampling import DrawKind, DrawParameters, sample
from jaxtrain.methods.ebft.blocks import BlockPositions

MAX_LOGITS = 2**26
"""Logits that are held at once."""


class SamplingOptions(NamedTuple):
    """Temperature and cuts of drawn tokens."""

    samples: int
    """N."""
    length: int
    """G."""
    temperature: float
    """0 takes the most probable token."""
    top_p: float = 1.0


def draw_blocks(
    model,
    documents: Batch,
    forest: Batch,
    spots: BlockPositions,
    keys_B: jax.Array,
    how: SamplingOptions,
) -> jax.Array:
    """int32 [B, A, N, G]: what the model says at the spots of rows [B, T]; nothing that means
    anything where there is no block. forest: of blocks.lay_blocks, the documents' tokens in
    it. keys: a row's noise depends on its key alone."""
    if model.keeps_packed:
        return _draw_behind(model, documents, spots, keys_B, how)
    return _draw_again(model, forest, spots, keys_B, how)


def _draw_behind(
    model, documents: Batch, spots: BlockPositions, keys_B, how: SamplingOptions
) -> jax.Array:
    """By keys and values of the documents."""
    (B, T), (A, N, G) = documents.tokens.shape, (spots.predictor.shape[1], how.samples, how.length)
    M, S = A * N, T + (how.length - 1) * A * N
    model.unstack()  # layers run one by one, over and over
    depth_BA = _take(documents.positions, spots.predictor)
    depth_BM = jnp.repeat(depth_BA, N, axis=1)
    own_M = jnp.arange(M, dtype=jnp.int32)
    step_Q = jnp.repeat(jnp.arange(G - 1, dtype=jnp.int32), M)

    def behind(of_documents_BT: jax.Array, of_drawn: jax.Array) -> jax.Array:
        rest = jnp.broadcast_to(of_drawn, (B, S - T))
        return jnp.concatenate([of_documents_BT, rest], axis=1).astype(jnp.int32)

    later_BQ = jnp.tile(depth_BM, (1, G - 1)) + 1 + step_Q
    key_positions = behind(documents.positions, later_BQ)
    index_T = jnp.broadcast_to(jnp.arange(T), (B, T))
    no = jnp.zeros((B, S - T), jnp.int32)
    context = Context(behind(documents.until, no), behind(index_T, no), documents.positions)
    states = model.init_packed(B, S)
    hidden_BTD, states = model.append(
        documents.tokens, states, 0, context._replace(key_positions=key_positions)
    )
    before_BAD = jnp.take_along_axis(
        hidden_BTD, jnp.minimum(spots.predictor, T - 1)[:, :, None], axis=1
    )
    first_BM = _draw(model, before_BAD, N, _fold(keys_B, 0), how)
    if G == 1:
        return first_BM.reshape(B, A, N, 1)
    since_BT, until_BT = sight(documents.until, spots.predictor, N)
    own_Q = jnp.tile(own_M, G - 1)

    def go_on(carry, step):
        states, token_BM = carry
        known_Q = step_Q < step
        context = Context(
            behind(until_BT, jnp.where(known_Q, own_Q + 1, own_Q)),
            behind(since_BT, own_Q),
            depth_BM + step,
            key_positions,
        )
        hidden_BMD, states = model.append(token_BM, states, T + (step - 1) * M, context)
        token_BM = _draw(model, hidden_BMD, 1, _fold(keys_B, step), how)
        return (states, token_BM), token_BM

    steps = jnp.arange(1, G, dtype=jnp.int32)
    _, later_GBM = jax.lax.scan(go_on, (states, first_BM), steps)
    found_GBM = jnp.concatenate([first_BM[None], later_GBM])
    return jnp.moveaxis(found_GBM, 0, -1).reshape(B, A, N, G)


def _draw_again(
    model, forest: Batch, spots: BlockPositions, keys_B, how: SamplingOptions
) -> jax.Array:
    """Read the whole forest once a step: no drawn token sees the places that are not drawn yet."""
    (B, U), N, G = forest.tokens.shape, how.samples, how.length
    branch_BM = branches(spots, how)
    rows_B1 = jnp.arange(B)[:, None]
    before_BA = jnp.maximum(_take(forest.prev, spots.start), 0)

    def go_on(tokens_BU, step):
        hidden_BUD = model.hidden(forest._replace(tokens=tokens_BU)).hidden
        last_BM = jnp.where(step > 0, branch_BM + step - 1, jnp.repeat(before_BA, N, axis=1))
        at_BMD = jnp.take_along_axis(hidden_BUD, jnp.minimum(last_BM, U - 1)[:, :, None], axis=1)
        token_BM = _draw(model, at_BMD, 1, _fold(keys_B, step), how)
        at_BM = jnp.where(branch_BM < U, branch_BM + step, U)
        return tokens_BU.at[rows_B1, at_BM].set(token_BM, mode="drop"), token_BM

    _, found_GBM = jax.lax.scan(go_on, forest.tokens, jnp.arange(G, dtype=jnp.int32))
    return jnp.moveaxis(found_GBM, 0, -1).reshape(B, -1, N, G)


def sight(
    until_BT: jax.Array, predictor_BA: jax.Array, samples: int
) -> tuple[jax.Array, jax.Array]:
    """(since, until) int32 [B, T]: which of the branches see each token of the documents. A token
    c is seen by the blocks whose predictor p is of its subtree: c <= p < until[c]."""
    (B, T), rows_B1 = until_BT.shape, jnp.arange(len(until_BT))[:, None]
    begun_BT = jnp.zeros((B, T + 1), jnp.int32).at[rows_B1, predictor_BA].add(1)[:, :T]
    before = jnp.pad(jnp.cumsum(begun_BT, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    last_BT = jnp.take_along_axis(before, until_BT, axis=1)
    return before[:, :-1] * samples, last_BT * samples


def branches(spots: BlockPositions, how: SamplingOptions) -> jax.Array:
    """int32 [B, M] index in the forest of each branch's first token; at or beyond U: none."""
    offset_N = jnp.arange(how.samples, dtype=jnp.int32) * how.length
    return (spots.start[:, :, None] + offset_N).reshape(len(spots.start), -1)


def _take(values_BT: jax.Array, index_BA: jax.Array) -> jax.Array:
    """Values at row indices, of which those behind the end mean nothing."""
    return jnp.take_along_axis(values_BT, jnp.minimum(index_BA, values_BT.shape[1] - 1), axis=1)


def _fold(keys_B: jax.Array, number) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)


def _draw(
    model, hidden_BQD: jax.Array, times: int, keys_B: jax.Array, how: SamplingOptions
) -> jax.Array:
    """int32 [B, Q * times]: tokens from what each hidden state predicts, `times` from each."""
    B, Q, D = hidden_BQD.shape
    fold_many: Callable = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    keys_BQ = fold_many(keys_B, jnp.arange(Q * times)).reshape(B, Q, times)
    vocabulary = model.head().shape[0]
    piece = max(1, min(Q, MAX_LOGITS // (B * times * vocabulary)))
    pieces = -(-Q // piece)
    padding = ((0, 0), (0, pieces * piece - Q), (0, 0))
    hidden = jnp.pad(hidden_BQD, padding).reshape(B, pieces, piece, D)
    keys = jnp.pad(jax.random.key_data(keys_BQ), (*padding, (0, 0)))
    keys = keys.reshape(B, pieces, piece * times, -1)
    kind = DrawKind(how.temperature > 0, how.top_p < 1)

    def of_piece(arrays):
        hidden_BPD, keys_BPx = arrays
        logits = jnp.repeat(model.logits(hidden_BPD), times, axis=1)
        count = logits.shape[0] * logits.shape[1]
        numbers = (how.temperature, 0, how.top_p, 0.0)
        kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
        draw = DrawParameters(*(jnp.full(count, x, k) for x, k in zip(numbers, kinds, strict=True)))
        flat = jax.random.wrap_key_data(keys_BPx.reshape(count, -1))
        token, _ = sample(logits.reshape(count, -1), flat, draw, kind, never=model.never_drawn)
        return token.reshape(logits.shape[:2])

    drawn = jax.lax.map(of_piece, (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(keys, 1, 0)))
    return jnp.moveaxis(drawn, 0, 1).reshape(B, -1)[:, : Q * times]
