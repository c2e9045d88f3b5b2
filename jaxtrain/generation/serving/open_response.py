"""Response bodies of `jaxtrain serve`: choices, log-probs and chunks, as OpenAI and vLLM write
them."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxtrain.environments.chat_response import write_logprobs, write_number, write_usage
from jaxtrain.environments.episode_record import make_call_id
from jaxtrain.environments.tool_calls import ToolCall
from jaxtrain.generation.engine import FinishReason, Likely
from jaxtrain.generation.serving.open_request import OpenRequest


class ScoredTokens(NamedTuple):
    """Tokens with log-probs, NaN for one that nothing predicts."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    likely: Sequence[Likely] = ()
    """Of each token's place; empty if they were not asked for."""


class ResponseWriter:
    """Writes what answers one request."""

    def __init__(
        self, request: OpenRequest, number: str, model: str, version: str, decode: Callable
    ):
        """number: of the request. version: of the weights that answer."""
        self.request, self.decode = request, decode
        self.kind = "chat.completion" if request.chat else "text_completion"
        prefix = "chatcmpl" if request.chat else "cmpl"
        self.head = {
            "id": f"{prefix}-{number}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": version,
        }

    def response(self, choices: list[dict[str, Any]], drawn: int) -> dict[str, Any]:
        """Build the whole response. drawn: number of tokens of all answers."""
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage(drawn)}

    def usage(self, drawn: int) -> dict[str, int]:
        """Build the numbers of tokens."""
        return write_usage(sum(map(len, self.request.prompts)), drawn)

    def chunk(self, choices: list[dict[str, Any]], drawn: int | None = None) -> dict[str, Any]:
        """Build a chunk of a stream; with `drawn` the last one, which has the numbers of tokens."""
        kind = "chat.completion.chunk" if self.request.chat else self.kind
        usage = {} if drawn is None else {"usage": self.usage(drawn)}
        return {**self.head, "object": kind, "choices": choices, **usage}

    def choice(
        self,
        index: int,
        text: str,
        calls: Sequence[ToolCall],
        scored: ScoredTokens,
        reason: FinishReason,
        stop: str | None,
    ) -> dict[str, Any]:
        """Build a whole answer. stop: the stop text that ended it."""
        if self.request.chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message |= {"content": text or None, "tool_calls": write_calls(calls)}
            body = {"message": message}
        else:
            body = {"text": text}
        return {
            "index": index,
            **body,
            "logprobs": self.logprobs(scored),
            "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            "stop_reason": stop,
            **self._ids(index, scored),
        }

    def delta(self, index: int, text: str, scored: ScoredTokens, first: bool) -> dict[str, Any]:
        """Build a piece of an answer. first: it is the first one."""
        if self.request.chat:
            body = {"delta": {**({"role": "assistant"} if first else {}), "content": text}}
        else:
            body = {"text": text}
        return {
            "index": index,
            **body,
            "logprobs": self.logprobs(scored) if scored.tokens else None,
            "finish_reason": None,
            **self._ids(index, scored, first),
        }

    def last(
        self, index: int, calls: Sequence[ToolCall], reason: FinishReason, stop: str | None
    ) -> dict[str, Any]:
        """Build the end of an answer whose text has been sent."""
        listed = [{"index": i, **call} for i, call in enumerate(write_calls(calls))]
        delta = {"tool_calls": listed} if calls else {}
        return {
            "index": index,
            **({"delta": delta} if self.request.chat else {"text": ""}),
            "logprobs": None,
            "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            "stop_reason": stop,
        }

    def logprobs(self, scored: ScoredTokens) -> dict[str, Any] | None:
        """Build the log-probs of an answer, or of a piece of it; None if none were asked for."""
        if self.request.logprobs is None:
            return None
        return write_logprobs(*scored, self._name) if self.request.chat else self._legacy(scored)

    def _legacy(self, scored: ScoredTokens) -> dict[str, Any]:
        names = [self._name(token) for token in scored.tokens]
        offsets, offset = [], 0
        for name in names:
            offsets.append(offset)
            offset += len(name)
        values = [write_number(value) for value in scored.logprobs]
        likely = scored.likely or [()] * len(names)
        top = []
        for name, value, best in zip(names, values, likely, strict=True):
            # The token itself is among them even if it is not one of the most probable.
            pairs = {self._name(token): write_number(p) for token, p in best} | {name: value}
            top.append(None if value is None else pairs)
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        return self.decode([token]) if self.request.spelled else f"token_id:{token}"

    def _ids(self, index: int, scored: ScoredTokens, first: bool = True) -> dict[str, Any]:
        if not self.request.token_ids:
            return {}
        prompt = {"prompt_token_ids": self.request.prompts[index // self.request.n]}
        return {"token_ids": list(scored.tokens), **(prompt if first else {})}


def write_calls(calls: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """Build tool calls, with ids of their own."""
    return [
        {
            "id": make_call_id(),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in calls
    ]
