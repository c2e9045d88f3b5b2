"""Requests of agents to the chat endpoint: messages in chat-template form, tools, limits.

Agents cannot change the sampling distribution, which section sampling defines, because log-probs
and importance ratios would belong to another distribution. They can shorten an answer, and say what
it must match: its log-probs are then over the tokens that were allowed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config.task import StructuredOutputs
from jaxtrain.data.chat.messages import MalformedRow, MessageReader
from jaxtrain.environments.tool_calls import split_thinking
from jaxtrain.generation.engine import Sampling

NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
}
"""Keys of a request that must have their default values."""
FORBIDDEN = ("logit_bias", "bad_words", "allowed_token_ids")
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice"}
"""Keys of a request's structured_outputs, and of guided_KEY as vLLM had it before, and ours."""


class RequestRefused(Exception):
    """A request is answered with an HTTP error, whose text is the message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class ChatRequest(NamedTuple):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    """Messages for chat templates: contents are texts, arguments of tool calls are dicts."""
    given_ids: dict[int, list[int]]
    """{index of a message: token ids that the agent sent along with it}"""
    tools: list[dict[str, Any]]
    sampling: Sampling
    """Sampling of the episode, restricted by the request."""
    kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""


def read_request(body: Any, sampling: Sampling) -> ChatRequest:
    """Parse a request of an episode with `sampling`; RequestRefused if it cannot be served."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RequestRefused(400, "the body must be an object with a list of messages")
    if not body["messages"]:
        raise RequestRefused(400, "messages must not be empty")
    names: dict[str, str] = {}
    messages = [read_message(message, names) for message in body["messages"]]
    token_ids = {
        index: message["generation_token_ids"]
        for index, message in enumerate(body["messages"])
        if isinstance(message.get("generation_token_ids"), list)
    }
    tools = [] if body.get("tool_choice") == "none" else read_tools(body.get("tools"))
    kwargs = body.get("chat_template_kwargs")
    if not isinstance(kwargs, dict | None):
        raise RequestRefused(400, f"chat_template_kwargs must be an object, found {kwargs!r:.80}")
    return ChatRequest(messages, token_ids, tools, limit(body, sampling), kwargs)


def limit(body: Mapping[str, Any], sampling: Sampling) -> Sampling:
    """Restrict the episode's sampling as requested; RequestRefused if another distribution is."""
    for key, expected in (
        *((key, getattr(sampling, key)) for key in ("temperature", "top_p", "min_p")),
        *NEUTRAL.items(),
    ):
        requested = body.get(key)
        if requested is not None and not same_number(requested, expected):
            advice = (
                f"sampling.{key} is {expected:g}"
                if key not in NEUTRAL
                else f"only {expected} is drawn"
            )
            raise RequestRefused(
                400, f"{key} {requested!r:.40} is not this run's: {advice}; leave it out"
            )
    requested = body.get("top_k")
    if requested is not None and max(requested, 0) != sampling.top_k:
        raise RequestRefused(
            400, f"top_k {requested!r:.40} is not this run's {sampling.top_k}; leave it out"
        )
    for key in FORBIDDEN:
        if body.get(key):
            raise RequestRefused(400, f"{key} would make the log-probs another distribution's")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestRefused(
            400, "a forced tool_choice would make the log-probs another distribution's"
        )
    update: dict[str, Any] = {}
    if structured := read_structured(body):
        update["structured_outputs"] = structured
    for key in ("max_tokens", "max_completion_tokens"):
        if (most := body.get(key)) is not None:
            if not isinstance(most, int) or isinstance(most, bool) or most < 1:
                raise RequestRefused(
                    400, f"{key} must be a whole number from 1 on, found {most!r:.40}"
                )
            update["max_new_tokens"] = min(most, sampling.max_new_tokens)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if new := [text for text in stops if text not in sampling.stop]:
        update["stop"] = [*sampling.stop, *new]
    return sampling.model_copy(update=update) if update else sampling


def read_structured(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return what a request says that its answer must match; None: nothing. RequestRefused for what
    has no counterpart."""
    given: dict[str, Any] = {}
    form = body.get("response_format") or {}
    if not isinstance(form, dict):
        raise RequestRefused(400, f"response_format must be an object, found {form!r:.40}")
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            given["response_format"] = {"json": {"type": "object"}}
        case "json_schema":
            schema = form.get("json_schema")
            given["response_format"] = {
                "json": schema.get("schema") if isinstance(schema, dict) else None
            }
        case kind:
            raise RequestRefused(400, f"response_format of type {kind!r:.40} is not served")
    if outputs := body.get("structured_outputs"):
        given["structured_outputs"] = outputs
    for key in (key for key in body if key.startswith("guided_") and body[key]):
        given[key] = {key.removeprefix("guided_"): body[key]}
    if not given:
        return None
    if len(given) > 1:
        raise RequestRefused(400, f"{' and '.join(given)} both say what to match; keep one")
    ((key, outputs),) = given.items()
    if not isinstance(outputs, dict):
        raise RequestRefused(400, f"{key} must be an object, found {outputs!r:.40}")
    table = {name: value for name, value in outputs.items() if value is not None}
    if unknown := sorted(set(table) - set(STRUCTURED)):
        raise RequestRefused(
            400, f"{key} of {unknown[0]!r:.40} is not served; json, regex and choice are"
        )
    if isinstance(table.get("json"), str):
        try:
            table["json"] = json.loads(table["json"])
        except ValueError:
            raise RequestRefused(400, f"{key}: the schema is no JSON") from None
    if len(table) != 1:
        raise RequestRefused(400, f"{key} needs one of json, regex and choice")
    try:
        structured = StructuredOutputs(**{STRUCTURED[name]: v for name, v in table.items()})
    except ValueError:
        raise RequestRefused(
            400, f"{key} needs an object for json, a text for regex, a list of texts for choice"
        ) from None
    if not structured or next(structured.find_conflict(key), None):
        raise RequestRefused(400, f"{key} is empty, so nothing could match it")
    return structured


def same_number(requested: Any, expected: float) -> bool:
    """Return True if a requested number equals the expected one within float32 precision."""
    return isinstance(requested, int | float) and abs(requested - expected) <= 1e-6 * max(
        1.0, abs(expected)
    )


def read_message(message: Any, names: dict[str, str]) -> dict[str, Any]:
    """Convert a message to chat-template form, as rows of data are read; arguments that are no JSON
    object stay text. names: {tool call id: name}, extended in place."""
    reader = MessageReader(roles={"developer": "system"}, lenient=True)
    try:
        read = reader.read(message)
    except MalformedRow as error:
        raise RequestRefused(400, f"{error}, found {message!r:.80}") from None
    read.pop("train", None)
    # A lone surrogate is JSON, but no text that a tokenizer takes.
    for key in ("content", "reasoning_content"):
        if key in read:
            read[key] = read[key].encode("utf-8", "replace").decode()
    for call in read.get("tool_calls", ()):
        call["id"] = str(call.get("id"))
        names[call["id"]] = call["function"]["name"]
    if read["role"] == "tool":
        name = read.get("name") or names.get(str(read.setdefault("tool_call_id", None)))
        read |= {"name": name} if name else {}
    return read


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Convert tool schemas to chat-template form, without `strict`, which only affects a server's
    sampling."""
    read = []
    for tool in tools or []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if function is None and isinstance(tool, dict) and tool.get("type") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(400, f"a tool needs type function and a name, found {tool!r:.80}")
        schema = {key: value for key, value in function.items() if key != "strict"}
        read.append({"type": "function", "function": schema})
    return read


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for assistant messages with equal thinking, text and calls."""
    thinking, content = message.get("reasoning_content"), message.get("content") or ""
    if thinking is None:
        thinking, content = split_thinking(content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (
        thinking.strip(),
        content.strip(),
        tuple(
            (call["name"], json.dumps(call["arguments"], sort_keys=True, default=str))
            for call in calls
        ),
    )


def read_input(items: Any) -> list[dict[str, Any]]:
    """Convert the input items of a Responses request to chat messages; a text is a user message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, Sequence) or not items:
        raise RequestRefused(400, "input must be a text or a list of items")
    names: dict[str, str] = {}
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        match kind:
            case "message":
                messages.append(read_message(item, names))
            case "function_call":
                function = {key: item.get(key) for key in ("name", "arguments")}
                wrapped = {"id": item.get("call_id"), "function": function}
                said = {"role": "assistant", "tool_calls": [wrapped]}
                (call,) = read_message(said, names)["tool_calls"]
                last: dict[str, Any] = messages[-1] if messages else {"role": ""}
                if last["role"] != "assistant":
                    last = {"role": "assistant", "content": ""}
                    messages.append(last)
                last["tool_calls"] = [*last.get("tool_calls", ()), call]
            case "function_call_output":
                call_id, content = item.get("call_id"), item.get("output")
                result = {"role": "tool", "tool_call_id": call_id, "content": content}
                messages.append(read_message(result, names))
            case "reasoning":
                texts = [part.get("text", "") for part in item.get("summary") or []]
                thought = {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}
                messages.append(thought)
            case _:
                raise RequestRefused(400, f"an item of input is of no known type: {item!r:.80}")
    return messages
