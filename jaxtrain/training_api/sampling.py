"""Samples for clients: the fields of asample, and results in protobuf."""

import asyncio
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.environments.request_fields import MAX_STOP_TEXT, MAX_STOPS, RequestRefused
from jaxtrain.generation.engine import Completion, Sampling
from jaxtrain.generation.local.adapter_slots import AdapterEngine
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.text_safety import show
from jaxtrain.training_api import wire

MAX_SAMPLES = 1024
UNSUPPORTED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "target_prompt_logprobs": None,
    "record_stability_info": False,
}
"""Fields that are accepted at this value alone."""


class SampleRequest(NamedTuple):
    """Samples to draw."""

    prompt: list[int]
    count: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    prompt_logprobs: int | None
    """Number of the prompt's last tokens that are scored; None: none."""


def read_sample(body: Mapping[str, Any], name: str, vocab_size: int, longest: int) -> SampleRequest:
    """Read an asample request; RequestRefused names the field. name: a draw without a seed depends
    on it."""
    for field, value in UNSUPPORTED.items():
        if body.get(field) not in (value, None, False, 0):
            raise RequestRefused(400, f"{field} cannot be had here", field)
    prompt = read_prompt(body.get("prompt"), vocab_size)
    if not 0 < len(prompt) < longest:
        raise RequestRefused(
            400, f"prompt has {len(prompt):,} tokens; 1 to {longest - 1:,} leave room", "prompt"
        )
    count = body.get("num_samples", 1)
    if type(count) is not int or not 1 <= count <= MAX_SAMPLES:
        raise RequestRefused(400, f"num_samples must be 1 to {MAX_SAMPLES}", "num_samples")
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestRefused(400, f"sampling_params must be an object, not {show(params, 60)}")
    stops, stop_ids = read_stop(params.get("stop"), vocab_size)
    room = longest - len(prompt)
    limit = room
    if params.get("max_tokens") is not None:
        limit = min(int(read_number(params, "max_tokens", 1)), room)
    seed = zlib.crc32(name.encode())
    if params.get("seed") is not None:
        seed = int(read_number(params, "seed", 0))
    sampling = Sampling(
        max_new_tokens=limit,
        temperature=read_number(params, "temperature", 0, 1000, default=1.0),
        top_k=min(max(0, int(read_number(params, "top_k", -1, default=-1))), vocab_size),
        top_p=read_number(params, "top_p", 1e-6, 1, default=1.0),
        stop=stops,
        seed=seed & 0x7FFFFFFF,
    )
    scored = None
    if body.get("prompt_logprobs"):
        last = body.get("prompt_logprobs_last_n")
        scored = len(prompt) - 1 if last is None else last
        if type(scored) is not int or scored < 0:
            raise RequestRefused(400, "prompt_logprobs_last_n must be a whole number")
    return SampleRequest(prompt, count, sampling, stop_ids, scored)


def read_prompt(prompt: Any, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt's chunks; RequestRefused."""
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list):
        raise RequestRefused(400, "prompt must be an object with a list of chunks", "prompt")
    tokens: list[int] = []
    for chunk in chunks:
        ids = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(ids, list):
            chunk_kind = show(chunk.get("type") if isinstance(chunk, dict) else chunk, 60)
            raise RequestRefused(400, f"prompt.chunks: only text is read here, not {chunk_kind}")
        tokens += ids
    if any(type(token) is not int or not 0 <= token < vocab_size for token in tokens):
        raise RequestRefused(400, f"prompt must hold token ids, which are below {vocab_size}")
    return tokens


def read_stop(stop: Any, vocab_size: int) -> tuple[list[str], tuple[int, ...]]:
    """Return (texts, tokens) that end an answer, besides the model's own; RequestRefused."""
    if stop is None:
        return [], ()
    if stop == []:
        raise RequestRefused(
            400, "sampling_params.stop []: the model's end tokens always end an answer here"
        )
    stops: Any = [stop] if isinstance(stop, str) else stop
    if isinstance(stops, list) and len(stops) <= MAX_STOPS:
        if all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_TEXT for text in stops):
            return stops, ()
        if all(type(token) is int and 0 <= token < vocab_size for token in stops):
            return [], tuple(stops)
    raise RequestRefused(400, f"sampling_params.stop must be texts or token ids, not {show(stop)}")


def read_number(
    params: Mapping[str, Any],
    field: str,
    least: float,
    most: float = math.inf,
    default: float | None = None,
) -> float:
    """Return a number of sampling_params; RequestRefused."""
    value = params.get(field, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most or value == math.inf:
        limits = f"from {least:g} on" if most == math.inf else f"{least:g} to {most:g}"
        raise RequestRefused(
            400, f"sampling_params.{field} must be {limits}, not {show(value, 60)}"
        )
    return value


async def draw(engine: LocalEngine | AdapterEngine, request: SampleRequest) -> bytes:
    """Draw the samples of a request; returns a SampleResponse."""
    tasks = [
        asyncio.ensure_future(
            engine.generate(request.prompt, request.sampling, request.stop_ids, index)
        )
        for index in range(request.count)
    ]
    try:
        completions = await asyncio.gather(*tasks)
        scores = None
        if request.prompt_logprobs is not None:
            scores, _ = await engine.score(request.prompt)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return write_samples(completions, scores, request.prompt_logprobs)


def write_samples(
    completions: Sequence[Completion], scores: Sequence[float] | None, last: int | None
) -> bytes:
    """Return a SampleResponse. scores: of the prompt's tokens, of which the `last` are wanted."""
    response = wire.SampleResponse()
    for completion in completions:
        response.sequences.add(
            stop_reason=wire.STOP if completion.finish_reason == "stop" else wire.LENGTH,
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
    if scores is not None:
        assert last is not None
        values = np.array(scores, np.float32)
        values[: max(0, len(values) - last)] = np.nan
        response.prompt_logprobs = values.tobytes()
    return response.SerializeToString()
