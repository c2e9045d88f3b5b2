"""Response bodies of chat and token endpoints for a sampled turn, in vLLM's format."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.environments.chat_request import MODEL
from jaxtrain.environments.episode_record import ChatAnswer
from jaxtrain.generation.engine import Completion, Likely


def write_chat(answer: ChatAnswer, number: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Build the response to POST /v1/chat/completions."""
    drawn = answer.completion
    message = dict(answer.message)
    if calls := message.get("tool_calls"):
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    reason = "tool_calls" if calls and drawn.finish_reason == "stop" else drawn.finish_reason
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
    if body.get("logprobs"):
        likely = drawn.likely
        if body.get("top_logprobs") and not likely:
            # Of an engine that reports the drawn token's alone.
            likely = [[pair] for pair in zip(drawn.tokens, drawn.logprobs, strict=True)]
        choice["logprobs"] = write_logprobs(drawn.tokens, drawn.logprobs, likely)
    response = {
        "id": number,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [choice],
        "usage": write_usage(len(answer.prompt), len(drawn.tokens)),
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = [int(token) for token in drawn.tokens]
        response["prompt_token_ids"] = answer.prompt
    return response


def write_tokens(prompt: list[int], drawn: Completion, number: str) -> dict[str, Any]:
    """Build the response to POST /inference/v1/generate."""
    tokens = [int(token) for token in drawn.tokens]
    likely = drawn.likely or [()] * len(tokens)
    content = [
        {
            "token_id": token,
            "logprob": write_number(value),
            "rank": None,
            "top_logprobs": [
                {"token_id": other, "logprob": write_number(logprob), "rank": rank}
                for rank, (other, logprob) in enumerate(best, 1)
            ],
        }
        for token, value, best in zip(tokens, drawn.logprobs, likely, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": drawn.finish_reason,
        "stop_reason": None,
        "token_ids": tokens,
        "logprobs": {"content": content},
    }
    usage = write_usage(len(prompt), len(tokens))
    return {"request_id": number, "choices": [choice], "prompt_token_ids": prompt, "usage": usage}


def write_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    likely: Sequence[Likely] = (),
    name: Callable[[int], str] = "token_id:{}".format,
) -> dict[str, Any]:
    """Build the log-probs of a chat's answer, as OpenAI writes them. likely: the most probable
    tokens of each place; empty for none. name: maps a token to its text."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = name(token)
        return {"token": text, "logprob": write_number(value), "bytes": list(text.encode())}

    places = zip(tokens, logprobs, likely or [()] * len(tokens), strict=True)
    return {
        "content": [
            {**entry(token, value), "top_logprobs": [entry(*pair) for pair in best]}
            for token, value, best in places
        ]
    }


def write_number(value: float) -> float | None:
    """Return a log-prob as JSON has it: null for NaN, the least number for what is impossible."""
    return None if value != value else max(value, -9999.0)


def write_usage(prompt: int, completion: int) -> dict[str, int]:
    """Build the token counts of a response."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def split_chat(response: dict[str, Any], body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a chat response into the chunks of a stream, which is sent only when complete."""
    (choice,) = response["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {"role": "assistant", "content": choice["message"]["content"] or ""}
    extra = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
    parts: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None, **extra}]
    if calls:
        parts.append({"delta": {"tool_calls": calls}, "finish_reason": None})
    parts.append({"delta": {}, "finish_reason": choice["finish_reason"]})
    common = {
        key: response[key]
        for key in ("id", "created", "model", "prompt_token_ids")
        if key in response
    }
    head = {**common, "object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, **part}]} for part in parts]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        chunks.append({**head, "choices": [], "usage": response["usage"]})
    return chunks
