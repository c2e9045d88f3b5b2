"""Response bodies of chat and token endpoints for a sampled turn, in vLLM's format."""

import json
import time
from collections.abc import Mapping
from typing import Any

from jaxtrain.environments.chat_request import MODEL
from jaxtrain.environments.episode_record import ChatAnswer
from jaxtrain.generation.engine import Completion


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
        entries = [
            {
                "token": f"token_id:{token}",
                "logprob": value if value == value else None,
                "bytes": None,
            }
            for token, value in zip(drawn.tokens, drawn.logprobs, strict=True)
        ]
        # Engines report the drawn token's alone.
        top = bool(body.get("top_logprobs"))
        choice["logprobs"] = {
            "content": [{**entry, "top_logprobs": [entry] * top} for entry in entries]
        }
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
    content = [
        {
            "token_id": token,
            "logprob": value if value == value else None,
            "rank": None,
            "top_logprobs": [],
        }
        for token, value in zip(tokens, drawn.logprobs, strict=True)
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
