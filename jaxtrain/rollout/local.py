"""LocalSampler: KV-cached sampling in the training process, on the training mesh.

For tests, the quickstart and small runs; a server does better for large ones. Prompts of a group
are padded to bucketed lengths, so a run compiles a handful of programs. The device decodes CHUNK
tokens before the host looks, which is when stop texts are searched.

Shapes: B rows, P prompt slots, C tokens of a chunk, V vocab.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Completion, Sampling

CHUNK = 32


class Draw(NamedTuple):
    """The numbers of a Sampling as device scalars: changing them compiles nothing."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


class Rows(NamedTuple):
    """State of a group of rows between chunks."""

    cache: Any
    token: jax.Array
    """int32 [B] the last token drawn, not yet seen by the model."""
    logprob: jax.Array
    """float32 [B] its log-probability."""
    position: jax.Array
    """int32 [B] where that token stands in its row."""
    count: jax.Array
    """int32 scalar: tokens drawn per row."""
    limit: jax.Array
    """int32 [B] tokens that the row may draw."""
    done: jax.Array
    """bool [B]."""
    keys: jax.Array
    """[B] one random key a row; folded with `count` for each draw."""


class LocalSampler:
    """Continues prompts with a model of `jaxtrain.models`.

    `use` swaps the weights. `to_text` turns tokens into text, for stop texts. At most `max_batch`
    rows are decoded together, and no row grows beyond `max_len` tokens.
    """

    def __init__(
        self,
        model: Any,
        eos_ids: Iterable[int],
        pad_id: int = 0,
        *,
        max_len: int,
        max_batch: int = 64,
        to_text: Callable[[list[int]], str] | None = None,
    ):
        self.model = model
        self.eos_ids = frozenset(eos_ids)
        self.pad_id = pad_id
        self.max_len = max_len
        self.max_batch = max_batch
        self.to_text = to_text

    def use(self, model: Any) -> None:
        """Sample from these weights from now on; a model of the same shape compiles nothing."""
        self.model = model

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Iterable[int] = (),
        draws: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One Completion per prompt, in order; see `types.Completion` for its log-probs.

        Tokens of `stop_ids` end an answer besides those of the constructor. A draw depends on the
        seed and the prompt's number in `draws` (by default its index) alone, not on which rows
        share its group. Raises UserError for an empty prompt, one that leaves no room, and stop
        texts without `to_text`.
        """
        self._check(prompts, sampling)
        stops = np.array(sorted({*self.eos_ids, *stop_ids}) or [-1], np.int32)
        # Rows of like length together: less padding, and rows end at like times.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: list[Completion | None] = [None] * len(prompts)
        for start in range(0, len(order), self.max_batch):
            group = order[start : start + self.max_batch]
            numbers = group if draws is None else [draws[i] for i in group]
            found = self._generate_group([prompts[i] for i in group], numbers, sampling, stops)
            for i, answer in zip(group, found, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        vocab_size = self.model.head().shape[0]
        for index, prompt in enumerate(prompts):
            if not 0 < len(prompt) < self.max_len:
                raise UserError(
                    f"prompt {index} has {len(prompt)} tokens; it needs at least 1 and at most "
                    f"{self.max_len - 1}, to leave room for an answer within {self.max_len}"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab_size:
                raise UserError(
                    f"prompt {index} holds token {max(prompt)}, the model has {vocab_size}; use "
                    "the tokenizer that belongs to the model"
                )
        if sampling.stop and self.to_text is None:
            raise UserError("sampling.stop: stop texts need the sampler's to_text function")

    def _generate_group(
        self,
        prompts: Sequence[Sequence[int]],
        indices: Sequence[int],
        sampling: Sampling,
        stops: np.ndarray,
    ) -> list[Completion]:
        B, P = bucket(len(prompts), 1), bucket(max(map(len, prompts)), 32)
        slots = P + bucket(sampling.max_new_tokens, CHUNK)
        tokens_BP = np.full((B, P), self.pad_id, np.int32)
        lengths_B, limit_B = np.ones(B, np.int32), np.zeros(B, np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, : len(prompt)] = prompt
            lengths_B[row] = len(prompt)
            limit_B[row] = min(sampling.max_new_tokens, self.max_len - len(prompt))
        ids_B = np.zeros(B, np.int32)
        ids_B[: len(indices)] = indices
        draw = Draw(
            np.float32(sampling.temperature),
            np.int32(sampling.top_k),
            np.float32(sampling.top_p),
            np.float32(sampling.min_p),
        )
        kind = {
            "greedy": sampling.temperature == 0,
            "truncate": sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0,
        }
        rows = prefill(
            self.model,
            tokens_BP,
            lengths_B,
            limit_B,
            ids_B,
            sampling.seed,
            draw,
            slots=slots,
            **kind,
        )
        taken: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        ended = [False] * len(prompts)
        reason = ["length"] * len(prompts)
        while not all(ended):
            rows, tokens_BC, logprobs_BC = decode_chunk(
                self.model, rows, stops, draw, pad_id=self.pad_id, **kind
            )
            tokens_BC, logprobs_BC, done = map(_to_host, (tokens_BC, logprobs_BC, rows.done))
            stopped = done.copy()
            for row, (tokens, logprobs) in enumerate(taken):
                if ended[row]:
                    continue
                room = int(limit_B[row]) - len(tokens)
                new = tokens_BC[row, : min(room, CHUNK)].tolist()
                end = next((i + 1 for i, token in enumerate(new) if token in stops), None)
                seen = len(tokens)
                tokens += new[:end]
                logprobs += logprobs_BC[row, : len(tokens) - seen].tolist()
                cut = self._find_stop(tokens, seen, sampling.stop)
                if cut is not None:
                    del tokens[cut:], logprobs[cut:]
                if end is not None or cut is not None:
                    reason[row] = "stop"
                stopped[row] |= cut is not None
                ended[row] = bool(stopped[row])
            if (stopped != done).any():
                rows = rows._replace(done=jnp.asarray(stopped))
        return [
            Completion(tokens, logprobs, why)
            for (tokens, logprobs), why in zip(taken, reason, strict=True)
        ]

    def _find_stop(self, tokens: list[int], seen: int, stop: Sequence[str]) -> int | None:
        """Number of tokens after which the text first holds a stop text; None: it does not."""
        if not stop:
            return None

        def holds(count: int) -> bool:
            text = self.to_text(tokens[:count])
            return any(word in text for word in stop)

        if not holds(len(tokens)):
            return None
        return next(count for count in range(seen + 1, len(tokens) + 1) if holds(count))


def bucket(size: int, smallest: int) -> int:
    """The smallest `smallest * 2**n` that holds `size`: few shapes, at most twice the padding."""
    while smallest < size:
        smallest *= 2
    return smallest


@functools.partial(jax.jit, static_argnames=("slots", "greedy", "truncate"))
def prefill(
    model, tokens_BP, lengths_B, limit_B, ids_B, seed, draw: Draw, *, slots, greedy, truncate
) -> Rows:
    """Read the prompts (left-aligned, [B, P]) and draw the first token of each row."""
    B, P = tokens_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    valid_BP = positions_BP < lengths_B[:, None]
    hidden_BPD, cache = model.decode(tokens_BP, positions_BP, model.init_cache(B, slots), valid_BP)
    last_BD = jnp.take_along_axis(hidden_BPD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(ids_B)
    token, logprob = sample(
        model.logits(last_BD), _fold(keys, 0), draw, greedy=greedy, truncate=truncate
    )
    return Rows(
        cache=cache,
        token=token,
        logprob=logprob,
        position=lengths_B,
        count=jnp.ones((), jnp.int32),
        limit=limit_B,
        done=limit_B < 1,
        keys=keys,
    )


@functools.partial(
    jax.jit, static_argnames=("pad_id", "greedy", "truncate"), donate_argnames=("rows",)
)
def decode_chunk(
    model, rows: Rows, stops, draw: Draw, *, pad_id, greedy, truncate
) -> tuple[Rows, jax.Array, jax.Array]:
    """(rows, tokens [B, C], log-probs [B, C]): hand out the token that waits, draw the next, C
    times or until every row is done; what a row is given after its end is padding."""
    B = rows.token.shape[0]

    def step(carry):
        i, rows, tokens_BC, logprobs_BC = carry
        tokens_BC = tokens_BC.at[:, i].set(jnp.where(rows.done, pad_id, rows.token))
        logprobs_BC = logprobs_BC.at[:, i].set(jnp.where(rows.done, 0.0, rows.logprob))
        ended = (rows.token[:, None] == stops).any(1) | (rows.count >= rows.limit)
        # No way around the last, useless draw: a branch here would copy the cache every step.
        return i + 1, advance(rows._replace(done=rows.done | ended)), tokens_BC, logprobs_BC

    def advance(rows: Rows) -> Rows:
        hidden_B1D, cache = model.decode(rows.token[:, None], rows.position[:, None], rows.cache)
        token, logprob = sample(
            model.logits(hidden_B1D[:, 0]),
            _fold(rows.keys, rows.count),
            draw,
            greedy=greedy,
            truncate=truncate,
        )
        return rows._replace(
            cache=cache,
            token=token,
            logprob=logprob,
            position=rows.position + 1,
            count=rows.count + 1,
        )

    def going(carry):
        return (carry[0] < CHUNK) & ~carry[1].done.all()

    tokens_BC = jnp.full((B, CHUNK), pad_id, jnp.int32)
    logprobs_BC = jnp.zeros((B, CHUNK), jnp.float32)
    _, rows, tokens_BC, logprobs_BC = jax.lax.while_loop(
        going, step, (jnp.zeros((), jnp.int32), rows, tokens_BC, logprobs_BC)
    )
    return rows, tokens_BC, logprobs_BC


def sample(
    logits_BV: jax.Array, keys: jax.Array, draw: Draw, *, greedy: bool, truncate: bool
) -> tuple[jax.Array, jax.Array]:
    """(token int32 [B], log-prob float32 [B] before truncation) from float logits [B, V]."""
    logits_BV = logits_BV.astype(jnp.float32)
    if greedy:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    else:
        logits_BV = logits_BV / draw.temperature
        kept_BV = cut(logits_BV, draw.top_k, draw.top_p, draw.min_p) if truncate else logits_BV
        token_B = jax.vmap(jax.random.categorical)(keys, kept_BV).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def cut(logits_BV: jax.Array, top_k, top_p, min_p) -> jax.Array:
    """logits with the tokens that top_k, top_p or min_p exclude at -inf; see `types.Sampling`.

    All three are thresholds on the sorted logits, so tokens exactly as probable as the last one
    kept are kept, too.
    """
    V = logits_BV.shape[-1]
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    rank = jnp.arange(V)
    in_k = rank < jnp.where(top_k > 0, top_k, V)
    probs_BV = jax.nn.softmax(jnp.where(in_k, sorted_BV, -jnp.inf), axis=-1)
    # A token stays while those before it have not reached top_p: never fewer than one.
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    keep_BV = in_k & ((before_BV < top_p) | (top_p >= 1))
    last_B1 = jnp.min(jnp.where(keep_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    least_B1 = sorted_BV[:, :1] + jnp.log(min_p)
    return jnp.where(logits_BV >= jnp.maximum(last_B1, least_B1), logits_BV, -jnp.inf)


def _fold(keys: jax.Array, count) -> jax.Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, count))(keys)


def _to_host(array: jax.Array) -> np.ndarray:
    if not array.is_fully_addressable:
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
