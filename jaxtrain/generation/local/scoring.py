"""Log-probs of whole texts and the most probable tokens of each place, by a sampler's weights."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.adapters.slotted import NO_ADAPTER, AdapterSlot, choose_adapters
from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.losses.topk import TopK, likeliest_tokens
from jaxtrain.data.packing.pack import BARE, MIN_SCORING_ROW, lay_out, pack_for_scoring
from jaxtrain.data.packing.tree import PlacedImages, chain, join_images
from jaxtrain.distributed.feed import feed, row_shards, to_host
from jaxtrain.generation.engine import MAX_LIKELY, Completion, Likely
from jaxtrain.generation.local.requests import Request, Requests
from jaxtrain.generation.local.speculation import DraftedModel


def score_text(
    sampler: Requests,
    tokens: Sequence[int],
    images: PlacedImages | None = None,
    k: int = MAX_LIKELY,
    adapter: AdapterSlot = NO_ADAPTER,
) -> tuple[list[float], list[Likely]]:
    """Return (the log-prob of each token given those before it, NaN for the first; the k most
    probable tokens of each place, none for the first), at temperature 1. images: of the first
    tokens."""
    model, mesh = sampler.model, sampler.mesh
    model = model.target if isinstance(model, DraftedModel) else model
    tree, fields = lay_out(chain(np.asarray(tokens, np.int32), {})), BARE
    if images is not None:
        tree = replace(tree, images=join_images([(images, len(images.slot))], len(tokens)))
        fields = replace(BARE, images=sampler.packer)
    rows = 1 if mesh is None else row_shards(mesh)
    ((batch, ((_, row, start),)),) = pack_for_scoring(
        [tree], rows=rows, share_rows=False, row_tokens=MIN_SCORING_ROW, fields=fields
    )
    with sampler.on_mesh():
        scored = jax.tree.map(
            lambda x: np.asarray(to_host(x))[0, row, start + 1 : start + len(tokens)],
            score_rows(
                model, feed(batch, mesh), np.int32(adapter.index), min(k, model.head().shape[0])
            ),
        )
    logp, top = scored
    best = zip(top.ids.tolist(), top.logp.tolist(), strict=True)
    likely = [list(zip(*pair, strict=True)) for pair in best]
    return [float("nan"), *logp.tolist()], [(), *likely]


@functools.partial(jax.jit, static_argnames="k")
def score_rows(model: Any, batch: Batch, adapter: jax.Array, k: int) -> tuple[jax.Array, TopK]:
    """Return (log-probs float32 [A, B, T], the k most likely tokens [A, B, T, k]) of a batch.
    adapter: int32 [], the slot of its rows."""
    choose_adapters(model, adapter)
    return jax.lax.map(
        lambda micro: (token_logp(model, micro).logp, likeliest_tokens(model, micro, k)), batch
    )


def find_likely(sampler: Requests, request: Request, answer: Completion, k: int) -> list[Likely]:
    """Return the k most probable tokens of each place of an answer, with log-probs as the answer
    has them: at its temperature, and over the tokens that its constraint allowed, of which there
    may be fewer. request: as before the answer was drawn."""
    if not answer.tokens:
        return []
    start, temperature = len(request.prompt), request.sampling.temperature or 1.0
    never = sampler.model.never_drawn
    tokens = [*request.prompt, *answer.tokens]
    most = MAX_LIKELY + len(never)  # as many remain without those that are never drawn
    values, texts_likely = score_text(sampler, tokens, request.images, most, request.adapter)
    places = zip(answer.tokens, answer.logprobs, values[start:], texts_likely[start:], strict=True)
    likely = []
    for token, tempered, drawn, listed in places:
        best = [pair for pair in listed if pair[0] not in never]
        if request.constraint is not None:
            allowed = request.constraint.allowed
            best = [pair for pair in best if allowed[pair[0] // 32] >> (pair[0] % 32) & 1]
            if token not in request.ends:
                request.constraint.accept(token)
        # The log-prob at 1 divided by the temperature, but for a number that all tokens of a place
        # have in common.
        likely.append(
            [(candidate, (value - drawn) / temperature + tempered) for candidate, value in best[:k]]
        )
    return likely
