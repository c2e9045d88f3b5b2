"""Requests of agents to the chat endpoint: messages in chat-template form, tools, limits.

Agents cannot change the sampling distribution, which section sampling defines, because log-probs
and importance ratios would belong to another distribution. They can shorten an answer, and say what
it must match: its log-probs are then over the tokens that were allowed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.config.limits import SEED
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.data.chat.messages import MAX_MESSAGES, MalformedRow, MessageReader, check_values
from jaxtrain.environments.request_fields import (
    CHAT,
    TYPES,
    Note,
    RequestRefused,
    check_fields,
    describe,
    refuse,
    same_number,
)
from jaxtrain.environments.tool_calls import split_thinking
from jaxtrain.generation.engine import MAX_LIKELY, Sampling
from jaxtrain.huggingface.chat_template import TemplateFailed, check_kwargs
from jaxtrain.text_safety import show

MODEL = "policy"
"""Model name of the policy."""
GIVEN_IDS = "generation_token_ids"
"""Key of a message: token ids of a turn that an agent hands back."""
OWN_KEYS = (GIVEN_IDS, "prompt_token_ids", "generation_log_probs")

STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice"}
"""Keys of a request's structured_outputs, and of guided_KEY as vLLM had it before, and ours."""


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
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer besides those of the template."""
    likely: int = 0
    """Number of likely tokens at each place of the answer."""


def read_request(
    body: Any, sampling: Sampling, vocabulary: int, note: Note = lambda name: None
) -> ChatRequest:
    """Parse a request of an episode with `sampling`; RequestRefused, naming the field, if it cannot
    be served.

    vocabulary: number of token ids. note: receives names of fields that change nothing.
    """
    if not isinstance(body, dict):
        refuse(f"the body must be an object, found {describe(body)}")
    check_fields(body, CHAT, note)
    conversation = read_conversation(body, note)
    likely = check_top_logprobs(body)
    if body.get("model") not in (None, "", MODEL):
        raise RequestRefused(404, f"model {show(body['model'], 60)} is not served; {MODEL!r} is")
    sampling = limit(body, sampling)
    stops = read_stop_ids(body, vocabulary)
    messages, token_ids, tools, kwargs = conversation
    return ChatRequest(messages, token_ids, tools, sampling, kwargs, stops, likely)


def read_conversation(
    body: Mapping[str, Any], note: Note, images: Any = None
) -> tuple[list[dict[str, Any]], dict[int, list[int]], list[dict[str, Any]], dict | None]:
    """Return (messages, {index: token ids sent along}, tools, variables of the chat template) of a
    request of checked types; RequestRefused. images: the images.placing.RowImages of the request;
    None refuses images."""
    entries = body.get("messages")
    if not entries:
        refuse("messages must be a list of at least one message")
    if len(entries) > MAX_MESSAGES:
        refuse(f"messages has {len(entries):,} entries; at most {MAX_MESSAGES:,} are taken")
    for name in ("messages", "tools", "chat_template_kwargs"):
        try:
            check_values(body.get(name), () if images is None else images.keys)
        except MalformedRow as error:
            refuse(f"{name}: {error}")
    names: dict[str, str] = {}
    messages, token_ids = [], {}
    for index, entry in enumerate(entries):
        try:
            messages.append(read_message(entry, names, note, images))
        except RequestRefused as error:
            refuse(f"messages[{index}]: {error}")
        if (ids := entry.get(GIVEN_IDS)) is not None:
            if not TYPES["a list of whole numbers"](ids):
                refuse(f"messages[{index}].{GIVEN_IDS} must be a list of whole numbers")
            token_ids[index] = ids
    tools = [] if body.get("tool_choice") == "none" else read_tools(body.get("tools"))
    kwargs = body.get("chat_template_kwargs")
    try:
        check_kwargs(kwargs or {}, "chat_template_kwargs")
    except TemplateFailed as error:
        refuse(str(error))
    return messages, token_ids, tools, kwargs


def check_top_logprobs(body: Mapping[str, Any]) -> int:
    """Return how many likely tokens a chat request asks for at each place; RequestRefused."""
    top = body.get("top_logprobs") or 0
    if not 0 <= top <= MAX_LIKELY or (top and not body.get("logprobs")):
        refuse(f"top_logprobs {top} must be 0 to {MAX_LIKELY}, and with logprobs alone")
    return top


def read_logprobs(params: Mapping[str, Any]) -> int | None:
    """Return how many likely tokens a completion, or a request by tokens, asks for at each place;
    None: no log-probs at all. RequestRefused."""
    count = params.get("logprobs")
    count = {True: 1, False: None}[count] if isinstance(count, bool) else count
    if count is not None and not 0 <= count <= MAX_LIKELY:
        refuse(f"logprobs {show(count, 40)} must be 0 to {MAX_LIKELY}")
    return count


def read_stop_ids(body: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end an answer by a request; RequestRefused for no token ids."""
    stops = tuple(body.get("stop_token_ids") or ())
    if any(not 0 <= token < vocabulary for token in stops):
        refuse(f"stop_token_ids must be token ids, which are 0 to {vocabulary - 1}")
    return stops


def limit(body: Mapping[str, Any], sampling: Sampling) -> Sampling:
    """Restrict the episode's sampling as a request of checked types asks; RequestRefused if it asks
    for another distribution."""
    for key in ("temperature", "top_p", "min_p"):
        requested, expected = body.get(key), getattr(sampling, key)
        if requested is not None and not same_number(requested, expected):
            refuse(
                f"{key} {show(requested, 40)} is not this run's: sampling.{key} is {expected:g};"
                " leave it out"
            )
    requested = body.get("top_k")
    if requested is not None and max(requested, 0) != sampling.top_k:
        refuse(f"top_k {show(requested, 40)} is not this run's {sampling.top_k}; leave it out")
    if body.get("tool_choice") not in (None, "auto", "none"):
        refuse("a forced tool_choice would make the log-probs another distribution's")
    update: dict[str, Any] = {}
    if structured := read_structured(body):
        update["structured_outputs"] = structured
    for key in ("max_tokens", "max_completion_tokens"):
        if (most := body.get(key)) is not None:
            if most < 1:
                refuse(f"{key} must be a whole number from 1 on, found {show(most, 40)}")
            update["max_new_tokens"] = min(most, sampling.max_new_tokens)
    if (seed := body.get("seed")) is not None:
        # With the run's: two runs with the same agents must not draw the same.
        update["seed"] = (sampling.seed + seed) % (SEED + 1)
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if new := [text for text in stops if text not in sampling.stop]:
        update["stop"] = [*sampling.stop, *new]
    return sampling.model_copy(update=update) if update else sampling


def read_structured(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return what a request says that its answer must match; None: nothing. RequestRefused for what
    has no counterpart."""
    requested: dict[str, Any] = {}
    form = body.get("response_format") or {}
    if not isinstance(form, dict):
        refuse(f"response_format must be an object, found {form!r:.40}")
    match form.get("type", "text"):
        case "text":
            pass
        case "json_object":
            requested["response_format"] = {"json": {"type": "object"}}
        case "json_schema":
            schema = form.get("json_schema")
            requested["response_format"] = {
                "json": schema.get("schema") if isinstance(schema, dict) else None
            }
        case kind:
            refuse(f"response_format of type {kind!r:.40} is not served")
    if outputs := body.get("structured_outputs"):
        requested["structured_outputs"] = outputs
    for key in (key for key in body if key.startswith("guided_") and body[key]):
        requested[key] = {key.removeprefix("guided_"): body[key]}
    if not requested:
        return None
    if len(requested) > 1:
        refuse(f"{' and '.join(requested)} both say what to match; keep one")
    ((key, outputs),) = requested.items()
    if not isinstance(outputs, dict):
        refuse(f"{key} must be an object, found {outputs!r:.40}")
    table = {name: value for name, value in outputs.items() if value is not None}
    if unknown := sorted(set(table) - set(STRUCTURED)):
        refuse(f"{key} of {unknown[0]!r:.40} is not served; json, regex and choice are")
    if isinstance(table.get("json"), str):
        try:
            table["json"] = json.loads(table["json"])
        except (ValueError, RecursionError):
            refuse(f"{key}: the schema is no JSON")
    if len(table) != 1:
        refuse(f"{key} needs one of json, regex and choice")
    try:
        structured = StructuredOutputs(**{STRUCTURED[name]: v for name, v in table.items()})
    except ValueError:
        refuse(f"{key} needs an object for json, a text for regex, a list of texts for choice")
    if not structured or next(structured.find_conflict(key), None):
        refuse(f"{key} is empty, so nothing could match it")
    return structured


def read_message(
    message: Any, names: dict[str, str], note: Note = lambda name: None, images: Any = None
) -> dict[str, Any]:
    """Convert a message to chat-template form, as rows of data are read; arguments that are no JSON
    object stay text. names: {tool call id: name}, extended in place. note: receives the keys that
    nothing reads. images: as in read_conversation."""
    if isinstance(message, dict):
        message = {key: value for key, value in message.items() if key not in OWN_KEYS}
    reader = MessageReader(lenient=True, images=images)
    try:
        read = reader.read(message)
    except MalformedRow as error:
        refuse(f"{error}, found {show(message, 80)}")
    for key in sorted(reader.unread):
        note(key)
    read.pop("train", None)
    # A lone surrogate is JSON, but no text that a tokenizer takes.
    for key in ("content", "reasoning_content"):
        if key in read:
            read[key] = read[key].encode("utf-8", "replace").decode()
    for key in ("tool_call_id", "name"):
        if key in read:
            read[key] = str(read[key])
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
    if not isinstance(tools, list | None):
        refuse(f"tools must be a list of objects, found {describe(tools)}")
    for index, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if function is None and isinstance(tool, dict) and tool.get("type") == "function":
            function = {key: value for key, value in tool.items() if key != "type"}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            refuse(f"tools[{index}]: a tool needs type function and a name, found {show(tool, 80)}")
        for key, kind in (("description", "a text"), ("parameters", "an object")):
            if function.get(key) is not None and not TYPES[kind](function[key]):
                refuse(
                    f"tools[{index}].function.{key} must be {kind}, found {describe(function[key])}"
                )
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
        refuse("input must be a text or a list of items")
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
                turn = {"role": "assistant", "tool_calls": [wrapped]}
                (call,) = read_message(turn, names)["tool_calls"]
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
                refuse(f"an item of input is of no known type: {item!r:.80}")
    return messages
