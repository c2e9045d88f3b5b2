"""Unmasking of one block of tokens, pass by pass, for rows of canvases on the device.

    first pass      the whole canvas, bidirectional   ─> keys and values of all tokens, if cached
    further passes  the whole canvas, or the block alone with those keys and values

Shapes: B rows, C canvas, W block, D model, V vocab.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Unmasking:
    """Parameters of unmasking; methods/diffusion/config.py documents the values."""

    mask_id: int
    shift: bool = True
    """Predict a token from the model's output at the token before it."""
    steps: int | None = None
    block_length: int | None = None
    confidence: Literal["probability", "margin", "entropy", "random"] = "probability"
    threshold: float | None = None
    cache: bool = False

    def passes(self, length: int, limit: int) -> int:
        """Return the passes over a block of `length` tokens of an answer of `limit`."""
        if self.steps is None:
            return length
        return max(1, min(length, -(-self.steps * length // limit)))


class BlockCanvas(NamedTuple):
    """Canvases and the position of their blocks; int32 [B] unless noted."""

    tokens: jax.Array
    """int32 [B, C]."""
    start: jax.Array
    stop: jax.Array
    """The block is [start, stop); start is at least 1."""
    end: jax.Array
    """End of the canvas; padding follows."""
    passes: jax.Array
    seed: jax.Array
    number: jax.Array
    """Determines, with the seed, the row's noise."""
    temperature: jax.Array
    """float32 [B]."""


@functools.partial(jax.jit, static_argnames=("W", "how"))
def unmask_block(
    model: Any, block: BlockCanvas, W: int, how: Unmasking
) -> tuple[jax.Array, jax.Array]:
    """Return (tokens int32 [B, W], log-probs float32 [B, W]) of the blocks, completely unmasked.

    Of the remaining masks, pass k of K accepts the most confident 1 / (K - k), at least one, and
    all those beyond `how.threshold`; an accepted token stays.
    """
    B, C = block.tokens.shape
    offset_W = jnp.arange(W, dtype=jnp.int32)
    place_BW = block.start[:, None] + offset_W
    inside_BW = place_BW < block.stop[:, None]
    first_B = block.start - int(how.shift)
    keys_B = jax.vmap(lambda s, n: jax.random.fold_in(jax.random.key(s), n))(
        block.seed, block.number
    )

    def read_all(tokens_BC):
        cache = model.init_cache(B, C)
        decoded = model.decode(tokens_BC, cache, block.end, horizon_B=block.end)
        index_BW = jnp.minimum(first_B[:, None] + offset_W, C - 1)
        return jnp.take_along_axis(decoded.hidden, index_BW[:, :, None], axis=1), decoded.cache

    def read_block(tokens_BC, cache):
        T = W + int(how.shift)
        index_BT = jnp.minimum(first_B[:, None] + jnp.arange(T, dtype=jnp.int32), C - 1)
        new_BT = jnp.take_along_axis(tokens_BC, index_BT, axis=1)
        cache = cache._replace(length=first_B)
        # Tokens behind a shorter block only fill the width: their keys stay those of the reading.
        decoded = model.decode(new_BT, cache, block.stop - first_B, horizon_B=block.end)
        return decoded.hidden[:, :W], decoded.cache

    def keep_some(state: UnmaskState, hidden_BWD) -> UnmaskState:
        tokens_BW = jnp.take_along_axis(state.tokens, jnp.minimum(place_BW, C - 1), axis=1)
        masked_BW = inside_BW & (tokens_BW == how.mask_id)
        # Row by row: logits of all blocks [B, W, V] at once may not fit.
        guess = jax.lax.map(
            lambda row: guess_row(model, *row, state.step, how),
            (hidden_BWD, keys_B, place_BW, block.temperature),
        )
        left_B = masked_BW.sum(1)
        share_B = jnp.maximum(1, left_B // jnp.maximum(1, block.passes - state.step))
        # The last pass takes all that is left, whatever division has rounded away.
        count_B = jnp.where(state.step >= block.passes - 1, left_B, share_B)
        if how.threshold is not None:
            sure_BW = masked_BW & (guess.probability >= how.threshold)
            count_B = jnp.maximum(count_B, sure_BW.sum(1))
        order_BW = jnp.argsort(jnp.where(masked_BW, -guess.confidence, jnp.inf), axis=1)
        rank_BW = jnp.argsort(order_BW, axis=1)
        kept_BW = masked_BW & (rank_BW < count_B[:, None])
        rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
        # C is beyond the canvas, and mode="drop" leaves such writes out.
        target_BW = jnp.where(kept_BW, place_BW, C)
        return UnmaskState(
            state.step + 1,
            state.tokens.at[rows_B1, target_BW].set(guess.token, mode="drop"),
            jnp.where(kept_BW, jnp.log(guess.probability), state.logprob),
            jnp.any((left_B - kept_BW.sum(1)) > 0),
        )

    start = UnmaskState(jnp.int32(0), block.tokens, jnp.zeros((B, W), jnp.float32), jnp.bool_(True))
    if how.cache:
        hidden_BWD, cache = read_all(block.tokens)
        start = keep_some(start, hidden_BWD)

        def next_pass(carry):
            state, cache = carry
            hidden_BWD, cache = read_block(state.tokens, cache)
            return keep_some(state, hidden_BWD), cache

        last, _ = jax.lax.while_loop(lambda carry: carry[0].unfinished, next_pass, (start, cache))
    else:
        last = jax.lax.while_loop(
            lambda state: state.unfinished,
            lambda state: keep_some(state, read_all(state.tokens)[0]),
            start,
        )
    found_BW = jnp.take_along_axis(last.tokens, jnp.minimum(place_BW, C - 1), axis=1)
    return found_BW, last.logprob


class UnmaskState(NamedTuple):
    """State between passes."""

    step: jax.Array
    tokens: jax.Array
    """int32 [B, C]."""
    logprob: jax.Array
    """float32 [B, W]."""
    unfinished: jax.Array
    """True if any mask remains."""


class BlockGuess(NamedTuple):
    """Predictions at the positions of a row's block, [W] each."""

    token: jax.Array
    probability: jax.Array
    """float32, of that token, at the temperature."""
    confidence: jax.Array
    """float32; the largest is accepted first."""


def guess_row(model: Any, hidden_WD, key, place_W, temperature, step, how: Unmasking) -> BlockGuess:
    """Predict a token at every position, never the mask; temperature 0 takes the argmax, otherwise
    Gumbel noise samples from softmax(logits / temperature)."""
    logits_WV = model.logits(hidden_WD).astype(jnp.float32)
    # A mask that is guessed would never be unmasked, and the loop would not end.
    logits_WV = logits_WV.at[:, how.mask_id].set(-jnp.inf)
    cold = temperature <= 0
    logits_WV = logits_WV / jnp.where(cold, 1.0, temperature)
    step_key = jax.random.fold_in(key, step)
    # By position in the canvas, not in the batch: neighbors and padding change no draw.
    keys_W = jax.vmap(lambda position: jax.random.fold_in(step_key, position))(place_W)
    noise_WV = jax.vmap(lambda position_key: jax.random.gumbel(position_key, logits_WV.shape[-1:]))(
        keys_W
    )
    token_W = jnp.argmax(logits_WV + jnp.where(cold, 0.0, noise_WV), axis=-1).astype(jnp.int32)
    logp_WV = jax.nn.log_softmax(logits_WV)
    logp_W = jnp.take_along_axis(logp_WV, token_W[:, None], axis=1)[:, 0]
    probability_W = jnp.exp(logp_W)
    match how.confidence:
        case "probability":
            confidence_W = probability_W
        case "margin":
            best_W2 = jax.lax.top_k(logp_WV, 2)[0]
            confidence_W = jnp.exp(best_W2[:, 0]) - jnp.exp(best_W2[:, 1])
        case "entropy":
            safe_WV = jnp.where(jnp.isfinite(logp_WV), logp_WV, 0.0)
            confidence_W = jnp.sum(jnp.exp(logp_WV) * safe_WV, axis=-1)
        case "random":
            confidence_W = jax.vmap(
                lambda position_key: jax.random.uniform(jax.random.fold_in(position_key, 1))
            )(keys_W)
    return BlockGuess(token_W, probability_W, confidence_W)
