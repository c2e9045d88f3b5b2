"""Requests for tokens and their answers: public routes of vLLM and SGLang, one validated result.

`/inference/v1/generate` (servers started with --enable-scale-out) reports which weights drew each
token. `/v1/completions` with token ids does not, nor does SGLang's `/generate`; there the caller
must know.
"""

import base64
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.batch import RouteShape
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Likely, Sampling
from jaxtrain.generation.vllm.images import SentPrompt

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
SGLANG = "/generate"

NEVER = -100.0
"""Bias of tokens that are not drawn, the least that vLLM takes: their probability is below what
float32 adds to that of others."""
VLLM_NAN = -9999.0
"""Log-prob that vLLM writes for a NaN."""


class GarbageAnswer(Exception):
    """Raised for an answer with status 200 that violates the route's format."""


class ServerAnswer(NamedTuple):
    """Validated answer to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    """NaN where the server has none."""
    finish_reason: str
    """stop, length, or abort: the server was ordered to return what it had."""
    labels: list[str] | None
    """The server's name for the weights that drew each token; None if it does not report them."""
    likely: Sequence[Likely] = ()
    """The most probable tokens of each place, if they were asked for."""
    routed: np.ndarray | None = None
    """Record (data.routes) of the experts for the prompt's tokens and these; None if the server
    keeps none."""


@dataclasses.dataclass(frozen=True)
class AnswerPart:
    """A request for an answer, or for its continuation after an interruption."""

    prompt: list[int]
    """The prompt and the tokens drawn so far."""
    sampling: Sampling
    stop_ids: Sequence[int]
    max_tokens: int
    seed: int
    session: int = 0
    likely: int = 0
    """Number of likely tokens to list at each place."""
    masks: bool = False
    """Accept an answer some of whose log-probs are missing: another one had none, either."""
    images: SentPrompt | None = None
    """The prompt as it is sent if it has images."""
    never: Sequence[int] = ()
    """Tokens that are not drawn."""


def build_request(route: str, part: AnswerPart, model: str) -> dict[str, Any]:
    """Build the body of a request.

    Everything that changes the distribution is sent explicitly: vLLM takes what is missing from the
    model's generation_config.json."""
    sampling = part.sampling
    greedy = sampling.temperature == 0
    params = {
        "n": 1,
        "max_tokens": part.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": part.seed,
        "stop_token_ids": [int(token) for token in part.stop_ids],
        "stop": list(sampling.stop),
        # 0: that of the drawn token alone.
        "logprobs": part.likely,
    }
    if part.never:
        params["logit_bias"] = {str(token): NEVER for token in part.never}
    structured = sampling.structured_outputs
    if route == SGLANG:
        return _build_sglang(part, params)
    if structured.json_schema:
        params["structured_outputs"] = {"json": structured.json_schema}
    elif structured:
        params["structured_outputs"] = structured.model_dump(exclude_defaults=True)
    if route == GENERATE and not sampling.stop:
        # Its answers hold tokens alone. Text of each would cost vLLM's API process, the bound of
        # small models, 45 to 75 % more time per token (docs/vllm.md).
        params["detokenize"] = False
    tokens = [int(token) for token in part.prompt]
    if part.images is not None:
        pictures = {"content_parts": part.images.parts, "return_token_ids": True}
        tokens = part.images.tokens
        return {"model": model, "token_ids": tokens, "sampling_params": params, **pictures}
    if route == GENERATE:
        return {"model": model, "token_ids": tokens, "sampling_params": params}
    names = {"return_token_ids": True, "return_tokens_as_token_ids": bool(part.likely)}
    return {"model": model, "prompt": tokens, **names, **params}


def _build_sglang(part: AnswerPart, params: dict[str, Any]) -> dict[str, Any]:
    """Build the body of SGLang's route from vLLM's parameters. Draws have no seed there."""
    structured = part.sampling.structured_outputs
    if structured:
        chosen = structured.model_dump(exclude_defaults=True)
        if len(chosen) != 1 or not chosen.keys() <= {"json_schema", "regex"}:
            raise UserError(
                "sampling.structured_outputs: SGLang takes json_schema or regex, not"
                f" {', '.join(sorted(chosen))}"
            )
        text = structured.json_schema
        params |= {"json_schema": json.dumps(text)} if text else {"regex": structured.regex}
    names = {"max_tokens": "max_new_tokens"}
    dropped = ("n", "seed", "logprobs")
    sent = {names.get(key, key): value for key, value in params.items() if key not in dropped}
    sent["top_k"] = params["top_k"] or -1
    return {
        "input_ids": [int(token) for token in part.prompt],
        "sampling_params": sent,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": part.likely,
        "stream": False,
    }


def derive_seed(seed: int, index: int, position: int) -> int:
    """Return a seed for one request: equal for the same place of an episode, different
    elsewhere."""
    text = f"{seed}/{index}/{position}".encode()
    # Not hash(), which differs between processes.
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") >> 1


def parse_answer(
    route: str,
    raw: bytes,
    max_tokens: int,
    num_prompt: int = 0,
    routes: RouteShape | None = None,
    likely: int = 0,
    echo: Sequence[int] | None = None,
) -> ServerAnswer:
    """Validate an answer; GarbageAnswer explains what is wrong. UserError if the server read
    another prompt than `echo`, the tokens of one with images.

    routes: which experts to read, for the `num_prompt` tokens of the prompt and those of the
    answer. likely: number of likely tokens that were asked for at each place.
    """
    try:
        answer = json.loads(raw)
    except ValueError:
        raise GarbageAnswer(f"no JSON but {_short(raw)}") from None
    if route == SGLANG:
        answer = _read_sglang(answer)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise GarbageAnswer(f"no list of one choice: {_short(raw)}")
    if echo is not None and (read := answer.get("prompt_token_ids")) != echo:
        count = (
            f"{len(read)} tokens" if isinstance(read, list) else "a prompt that it does not show"
        )
        raise UserError(
            f"of a prompt of {len(echo)} tokens with images the server makes {count}, so it would"
            " answer something else than is trained; start it with a folder whose tokenizer,"
            " preprocessor_config.json and processor_config.json are those of model.path"
        )
    choice = choices[0]
    tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        raise GarbageAnswer(f"token_ids are no list of token ids: {_short(raw)}")
    if reason not in ("stop", "length", "abort"):
        raise GarbageAnswer(f"finish_reason is {reason!r}")
    if len(tokens) > max_tokens or (not tokens and reason != "abort"):
        raise GarbageAnswer(f"{len(tokens)} tokens, 1 to {max_tokens} were asked for")
    logprobs = _read_logprobs(route, choice, tokens)
    # vLLM turns a NaN into null or, with processed log-probs, into -9999.
    logprobs = [math.nan if x is None or x == VLLM_NAN else x for x in logprobs]
    bad = [x for x in logprobs if not isinstance(x, int | float) or x >= 1e-3 or x <= -1e30]
    if len(logprobs) != len(tokens) or bad:
        problem = f"{bad[0]!r} among them" if bad else "as many are needed"
        raise GarbageAnswer(f"{len(logprobs)} log-probs for {len(tokens)} tokens, {problem}")
    labels, routed = _read_labels(choice, len(tokens)), None
    if routes is not None:
        routed = _read_routed(choice, num_prompt + len(tokens) - 1, routes)
    best = _read_likely(route, choice, len(tokens), likely) if likely else ()
    return ServerAnswer(tokens, [float(x) for x in logprobs], reason, labels, best, routed)


def _read_sglang(answer: Any) -> dict[str, Any]:
    """Return SGLang's answer in the form of GENERATE. Tokens are those of the log-probs, which
    include the one that ended the answer."""
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        # A request that is aborted while it waits has drawn nothing, and may come without the key.
        aborted = reason == "abort" and not meta.get("output_token_logprobs")
        drawn = () if aborted else meta["output_token_logprobs"]
        pairs = [(entry[0], entry[1]) for entry in drawn]
        tops = meta.get("output_top_logprobs") or [()] * len(pairs)
        content = [
            {
                "token_id": token,
                "logprob": value,
                "top_logprobs": [{"token_id": top[1], "logprob": top[0]} for top in best or ()],
            }
            for (value, token), best in zip(pairs, tops, strict=True)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise GarbageAnswer(
            f"no output_token_logprobs in meta_info: {str(answer)[:120]!r}"
        ) from None
    choice = {"token_ids": [token for _, token in pairs], "finish_reason": reason}
    return {"choices": [{**choice, "logprobs": {"content": content}}]}


def _read_logprobs(route: str, choice: dict[str, Any], tokens: list[int]) -> list[Any]:
    logprobs = choice.get("logprobs") or {}
    if not isinstance(logprobs, dict):
        return []
    if route == COMPLETIONS:
        return logprobs.get("token_logprobs") or []
    content = logprobs.get("content") or []
    if not all(isinstance(item, dict) for item in content):
        return [math.nan]
    ids = [item.get("token_id", token) for item, token in zip(content, tokens, strict=False)]
    if ids != tokens[: len(ids)]:
        raise GarbageAnswer("the log-probs belong to other tokens than token_ids")
    return [item.get("logprob", math.nan) for item in content]


def _read_likely(route: str, choice: dict[str, Any], count: int, most: int) -> list[Likely]:
    """Return the most probable tokens of each of `count` places, the best first. vLLM lists the
    drawn token among them even if it is none of these, and names tokens by their ids."""
    try:
        if route == COMPLETIONS:
            places = [list((listed or {}).items()) for listed in choice["logprobs"]["top_logprobs"]]
        else:
            places = [
                [(top.get("token_id", top.get("token")), top["logprob"]) for top in tops or []]
                for tops in (item.get("top_logprobs") for item in choice["logprobs"]["content"])
            ]
        likely = [
            [
                (int(str(name).removeprefix("token_id:")), float(value))
                for name, value in listed
                if value is not None and value > VLLM_NAN
            ]
            for listed in places
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise GarbageAnswer("its likely tokens are no ids with log-probs") from None
    if len(likely) != count:
        raise GarbageAnswer(f"likely tokens of {len(likely)} places for {count} tokens")
    return [sorted(listed, key=lambda pair: -pair[1])[:most] for listed in likely]


def _read_labels(choice: dict[str, Any], count: int) -> list[str] | None:
    """Return the label of each token's weights; None if the answer has none."""
    spans = choice.get("weight_versions")
    if spans is None:
        return None
    labels: list[str] = []
    try:
        for span in spans:
            if span["start"] != len(labels):
                break
            labels += [str(span["version"])] * (span["end"] - span["start"])
    except (KeyError, TypeError):
        raise GarbageAnswer(f"weight_versions {spans!r}") from None
    if len(labels) != count:
        raise GarbageAnswer(f"weight_versions {spans!r} do not cover {count} tokens")
    return labels


def _read_routed(choice: dict[str, Any], length: int, routes: RouteShape) -> np.ndarray | None:
    """Return a record of `length` tokens. vLLM has a row of all layers, dense ones included, for
    every token but the last ("return_routed_experts" in its documentation), as base64 of a .npy
    file."""
    encoded = choice.get("routed_experts")
    if encoded is None:
        return None
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, TypeError, OSError, EOFError):
        raise GarbageAnswer("routed_experts is no .npy file in base64") from None
    layers, top = routes.layers, routes.top
    fits = array.ndim == 3 and array.shape[0] == length and array.shape[2] == top
    if not fits or array.shape[1] <= layers[-1] or array.dtype.kind not in "ui":
        raise GarbageAnswer(
            f"routed_experts is {array.dtype} of shape {array.shape}; {length} tokens in more than"
            f" {layers[-1]} layers with {top} experts each were wanted"
        )
    chosen = array[:, list(layers)].reshape(length, routes.width)
    return np.where(chosen < routes.experts, chosen, routes.missing).astype(routes.dtype)


def _short(raw: bytes) -> str:
    text = " ".join(raw[:400].decode(errors="replace").split())
    return repr(text if len(text) <= 120 else text[:117] + "...")
