"""Speculative decoding on the device: a draft guesses, the target reads all guesses at once.

    token ─ draft.propose ─> K guesses ─ target.decode(trial) ─> K + 1 draws, each with the noise
    of plain sampling at its position ─> guesses that equal the draws before them are accepted, plus
    one draw ─> target.commit, draft.read: of the accepted tokens alone

So the answer equals that of plain sampling, token for token, whatever the draft guesses; it is only
faster. (Tokens that are read together or one by one are rounded differently: where two tokens are
almost equally probable, the answers may diverge, unless the target is exact.)

Shapes: B rows, K guesses, T = K + 1 tokens of a cycle, N cycles and C tokens of a chunk.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.distributed.sharding import state_program
from jaxtrain.generation.local.slots import ChunkEnd, SamplerRows, draw_tokens
from jaxtrain.generation.local.token_sampling import DrawKind, DrawParameters
from jaxtrain.layers.mixer import SharedSlots
from jaxtrain.models.decoder import Decoded, DecoderCache

CYCLES = 16
"""Cycles of a chunk."""


class DraftedModelCache(NamedTuple):
    """Caches of target and draft."""

    target: DecoderCache
    draft: Any
    """The draft's own pytree of arrays [B, ...]."""


class DraftedModel(NamedTuple):
    """A model and the draft that guesses for it (models.draft.Draft), with the interface that
    `slots.py` expects of one model: the draft reads whatever the target reads."""

    target: Any
    draft: Any

    @property
    def exact(self) -> Any:
        """The target's `exact`."""
        return self.target.exact

    rope_axes = None
    """Prompts with images have no draft, so that all positions are those of text."""

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """The target's tokens that are not drawn."""
        return self.target.never_drawn

    @property
    def compute_dtype(self) -> Any:
        """The target's dtype of activations."""
        return self.target.compute_dtype

    @property
    def logit_softcap(self) -> float | None:
        """The target's bound of logits."""
        return self.target.logit_softcap

    def head(self) -> jax.Array:
        """Return the target's head."""
        return self.target.head()

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the target's logits."""
        return self.target.logits(hidden)

    def logits_of(self, head_VD: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return the target's logits, of its head."""
        return self.target.logits_of(head_VD, hidden)

    def init_cache(self, rows: int, slots: int) -> DraftedModelCache:
        """Return empty caches of both models."""
        return DraftedModelCache(
            self.target.init_cache(rows, slots), self.draft.init_cache(rows, slots)
        )

    def grow_cache(self, cache: DraftedModelCache, rows: int, slots: int) -> DraftedModelCache:
        """Return both caches with more rows or slots."""
        return DraftedModelCache(
            self.target.grow_cache(cache.target, rows, slots),
            self.draft.grow_cache(cache.draft, rows, slots),
        )

    def insert(
        self,
        cache: DraftedModelCache,
        rows_R: jax.Array,
        filled: DraftedModelCache,
        source_R: jax.Array,
    ) -> DraftedModelCache:
        """Insert rows into both caches."""
        return DraftedModelCache(
            self.target.insert(cache.target, rows_R, filled.target, source_R),
            self.draft.insert(cache.draft, rows_R, filled.draft, source_R),
        )

    def decode(
        self,
        tokens_BT: jax.Array,
        cache: DraftedModelCache,
        counts_B: jax.Array | None = None,
        *,
        shared: SharedSlots | None = None,
    ) -> Decoded:
        """Decode plainly; the draft reads the same tokens."""
        if counts_B is None:
            counts_B = jnp.full(len(tokens_BT), tokens_BT.shape[1], jnp.int32)
        how = {"capture": self.draft.capture, "shared": shared}
        read = self.target.decode(tokens_BT, cache.target, counts_B, **how)
        followed = self.draft.read(cache.draft, self.target, tokens_BT, read.captured, counts_B)
        return Decoded(read.hidden, DraftedModelCache(read.cache, followed))


class SpeculativeChunk(NamedTuple):
    """Result of a chunk of cycles."""

    tokens: jax.Array
    """int32 [B, C]."""
    logprobs: jax.Array
    """float32 [B, C] under the target, as in plain sampling."""
    handed: jax.Array
    """int32 [B]: number of tokens of each row."""
    lengths: jax.Array
    """int32 [B, N]: 1 + accepted guesses of each cycle; 0 where the row took no part."""


@state_program(static_argnames=("kind",), donate_argnames=("rows",))
def speculate_chunk(
    model: DraftedModel, rows: SamplerRows, stop_B: jax.Array, over: ChunkEnd, kind: DrawKind
) -> tuple[SamplerRows, SpeculativeChunk]:
    """Run up to CYCLES cycles of every row.

    Otherwise like slots.decode_chunk, with the same invariant of `rows`: one token per row is drawn
    and not handed out yet.
    """
    rows = rows._replace(done=rows.done | stop_B)
    B, T = rows.token.shape[0], model.draft.num_drafted + 1
    running = (~rows.done).sum()

    def step(carry):
        i, rows, chunk = carry
        rows, tokens_BT, logprobs_BT, count_B, drafted_B = cycle(model, rows, kind)
        chunk = hand_out(chunk, tokens_BT, logprobs_BT, count_B)
        lengths_BN = chunk.lengths.at[:, i].set(jnp.where(drafted_B, count_B, 0))
        # A pending token that ends its row is handed out at once, without a cycle of its own.
        over_B = ~rows.done & find_ends(rows, rows.token[:, None], rows.count[:, None])[:, 0]
        chunk = hand_out(chunk, rows.token[:, None], rows.logprob[:, None], over_B)
        rows = rows._replace(done=rows.done | over_B)
        return i + 1, rows, chunk._replace(lengths=lengths_BN)

    def going(carry):
        num_running = (~carry[1].done).sum()
        return over.goes_on(carry[0], CYCLES, running, num_running)

    room = (B, CYCLES * T + 1)
    chunk = SpeculativeChunk(
        jnp.full(room, -1, jnp.int32),
        jnp.zeros(room, jnp.float32),
        jnp.zeros(B, jnp.int32),
        jnp.zeros((B, CYCLES), jnp.int32),
    )
    start = (jnp.zeros((), jnp.int32), rows, chunk)
    _, rows, chunk = jax.lax.while_loop(going, step, start)
    return rows, chunk


def cycle(
    model: DraftedModel, rows: SamplerRows, kind: DrawKind
) -> tuple[SamplerRows, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return (rows, tokens [B, T], log-probs [B, T], number of tokens handed out [B], True if the
    row used guesses [B]) of one cycle."""
    target, draft, cache = *model, rows.cache
    guess_BK = draft.propose(cache.draft, target, rows.token)
    tokens_BT = jnp.concatenate([rows.token[:, None], guess_BK], axis=1)
    T_range = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    tried_B = jnp.where(rows.done, 0, tokens_BT.shape[1]).astype(jnp.int32)
    how = {"capture": draft.capture, "shared": rows.shared, "trial": True}
    read = target.decode(tokens_BT, cache.target, tried_B, **how)
    drawn_BT, drawn_logprob_BT = draw_all(target, read.hidden, rows, kind)
    # The noise of a draw depends on its position alone, so a guess is right exactly if plain
    # sampling would have drawn it. The cumulative product cuts at the first wrong guess.
    agreed_BK = jnp.cumprod(guess_BK == drawn_BT[:, :-1], axis=1)
    accepted_BT = (T_range <= agreed_BK.sum(1)[:, None]) & ~rows.done[:, None]
    last_BT = accepted_BT & find_ends(rows, tokens_BT, rows.count[:, None] + T_range)
    # Tokens behind the first that ends the row were never part of the answer.
    accepted_BT &= jnp.cumsum(last_BT, axis=1) - last_BT == 0
    over_B, count_B = (last_BT & accepted_BT).any(1), accepted_BT.sum(1, dtype=jnp.int32)
    logprobs_BT = jnp.concatenate([rows.logprob[:, None], drawn_logprob_BT[:, :-1]], axis=1)
    # Trial decoding left the caches' lengths unchanged: commit and draft.read keep the accepted
    # tokens only. A row that has ended keeps none, as it is not read again.
    read_B = jnp.where(over_B, 0, count_B)
    newest_B1 = jnp.maximum(count_B - 1, 0)[:, None]
    rows = rows._replace(
        cache=DraftedModelCache(
            target.commit(read.cache, read_B),
            draft.read(cache.draft, target, tokens_BT, read.captured, read_B),
        ),
        token=jnp.take_along_axis(drawn_BT, newest_B1, axis=1)[:, 0],
        logprob=jnp.take_along_axis(drawn_logprob_BT, newest_B1, axis=1)[:, 0],
        count=rows.count + read_B,
        done=rows.done | over_B,
    )
    # A row that its first token ended used no guess.
    return rows, tokens_BT, logprobs_BT, count_B, (count_B > 0) & ~last_BT[:, 0]


def draw_all(
    model: Any, hidden_BTD: jax.Array, rows: SamplerRows, kind: DrawKind
) -> tuple[jax.Array, jax.Array]:
    """Return (tokens, log-probs) [B, T]: the draws of plain sampling behind each of T tokens."""
    B, T, D = hidden_BTD.shape
    count_BT = rows.count[:, None] + jnp.arange(T, dtype=jnp.int32)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(rows.keys, count_BT)
    draw = DrawParameters(*(jnp.repeat(x, T) for x in rows.draw))
    drawn = draw_tokens(model, hidden_BTD.reshape(B * T, D), keys.reshape(B * T), draw, kind)
    return drawn[0].reshape(B, T), drawn[1].reshape(B, T)


def find_ends(rows: SamplerRows, tokens_BT: jax.Array, count_BT: jax.Array) -> jax.Array:
    """Return bool [B, T]: True if a token, the count-th of its row, ends it."""
    named_BT = (tokens_BT[:, :, None] == rows.ends[:, None]).any(2)
    return named_BT | (count_BT >= rows.limit[:, None])


def hand_out(
    chunk: SpeculativeChunk, tokens_BT: jax.Array, logprobs_BT: jax.Array, count_B: jax.Array
) -> SpeculativeChunk:
    """Append the first tokens of each row to the chunk."""
    B, T = tokens_BT.shape
    token_T = jnp.arange(T, dtype=jnp.int32)
    room = chunk.tokens.shape[1]
    place_BT = chunk.handed[:, None] + token_T
    place_BT = jnp.where(token_T < count_B[:, None], place_BT, room + token_T)
    rows_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]

    def put(all_BC: jax.Array, new_BT: jax.Array) -> jax.Array:
        return all_BC.at[rows_B1, place_BT].set(new_BT, mode="drop")

    return chunk._replace(
        tokens=put(chunk.tokens, tokens_BT),
        logprobs=put(chunk.logprobs, logprobs_BT),
        handed=chunk.handed + count_B,
    )
