"""Messages as they come, to messages in OpenAI form: ShareGPT on sight, renamed keys and roles."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.safe_io import (
    DEPTH,
    InvalidValue,
    UnreadableRow,
    has_surrogates,
    parse_json,
    too_deep,
)
from jaxtrain.text_safety import name_type, show

MOST_TEXT = 1 << 21
"""Characters of one text."""
TOO_MUCH = f"more than {MOST_TEXT:,} characters"
MOST_OF_ROW = 1 << 23
"""Characters of a row's texts together."""
MOST_MESSAGES = 4000
"""What a chat template gets through within its time."""
MOST_TOOLS = 1024

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train")

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
    "function_call": "function_call",
}
"""Roles that ShareGPT data and others use; function_call is a turn whose text is a tool call."""

ACCEPTED = ("system", "developer", "user", "assistant", "tool")


class MalformedRow(Exception):
    """A row that cannot be read; the text says why in words that can be counted over rows."""

    place = ""
    """Where in the row: "message 3"."""


def read_messages(
    value: Any, fields: Mapping[str, str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Messages in OpenAI form, arguments of tool calls as objects, empty keys left out.

    fields: renamed keys as {"messages.content": "value"}; roles: {"found": "wanted"}. Raises
    Malformed.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise MalformedRow("messages must be a list of {role, content}")
    if len(value) > MOST_MESSAGES:
        raise MalformedRow(f"more than {MOST_MESSAGES:,} messages")
    check_values(value)
    messages = []
    for number, item in enumerate(value, 1):
        try:
            messages.append(_message(item, fields, roles))
        except MalformedRow as error:
            error.place = f"message {number}"
            raise
    return messages


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas: a list, or the same as a JSON string; None if there are none."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise MalformedRow("tools must be a list of JSON schemas")
    if len(value) > MOST_TOOLS:
        raise MalformedRow(f"more than {MOST_TOOLS:,} tools")
    tools = [_json(tool, "tools") if isinstance(tool, str) else tool for tool in value]
    check_values(tools)
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise MalformedRow("tools must be a list of JSON schemas")
        if not isinstance(function.get("name", ""), str):
            raise MalformedRow("the name of a tool is not a string")
    return [dict(tool) for tool in tools]


def check_readable(row: Any) -> None:
    """Raise Malformed for a row that its file could not give."""
    if isinstance(row, UnreadableRow):
        raise MalformedRow(row.reason)


def check_values(value: Any) -> None:
    """Raise Malformed for what no template and no tokenizer gets through: values that are nested
    without end, half a surrogate pair, texts beyond MOST_TEXT or, together, MOST_OF_ROW."""
    if too_deep(value):
        raise MalformedRow(f"nested deeper than {DEPTH} levels")
    size, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if len(one) > MOST_TEXT:
                raise MalformedRow(TOO_MUCH)
            size += len(one)
            if not one.isascii() and has_surrogates(one):
                raise MalformedRow("a text with half a surrogate pair")
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one
    if size > MOST_OF_ROW:
        raise MalformedRow(f"more than {MOST_OF_ROW:,} characters in all")


def _message(item: Any, fields: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise MalformedRow(f"a message is {name_type(item)}, not an object")
    found = dict(item)
    if "role" not in found and "from" in found:
        found["role"], found["content"] = found["from"], found.get("value")
    for key in KEYS:
        renamed = fields.get(f"messages.{key}")
        if renamed is not None:
            found[key] = found.get(renamed)
    message: dict[str, Any] = {key: found[key] for key in KEYS if found.get(key) not in (None, [])}
    role: Any = message.get("role")
    if not isinstance(role, str):
        raise MalformedRow(f"a role is {name_type(role)}, not a text")
    role = roles.get(role, role if role in ACCEPTED else ROLES.get(role, role))
    message["role"] = role
    content = message.setdefault("content", "")
    if isinstance(content, list):
        message["content"] = content = _text_parts(content)
    if not isinstance(content, str):
        raise MalformedRow(f"content is {name_type(content)}, not a text")
    if role == "function_call":
        call = _json(content, "function_call")
        message.update(role="assistant", content="", tool_calls=[{"function": call}])
    elif role not in ACCEPTED:
        raise MalformedRow(f"unknown role {show(role, 40)}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
    if not isinstance(message.get("reasoning_content", ""), str):
        raise MalformedRow("reasoning_content is not a string")
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | int):
            raise MalformedRow(f"{key} is {name_type(message[key])}, not a text")
    return message


def _text_parts(parts: list[Any]) -> str:
    """Content given as parts, which must all be text."""
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise MalformedRow("only text content is supported")
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls with `arguments` as an object: templates write that as JSON themselves."""
    if isinstance(calls, str):
        calls = _json(calls, "tool_calls")
    if not isinstance(calls, list):
        raise MalformedRow("tool_calls must be a list")
    result = []
    for call in calls:
        if isinstance(call, str):
            call = _json(call, "tool_calls")
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedRow("a tool call needs function.name")
        if not isinstance(call.get("id", ""), str | int | None):
            raise MalformedRow("the id of a tool call is not a text")
        arguments = function.get("arguments")
        if arguments in (None, ""):
            arguments = {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"arguments of {show(function['name'], 40)}")
        if not isinstance(arguments, Mapping):
            raise MalformedRow(f"arguments of {show(function['name'], 40)} are no object")
        kept = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": dict(arguments)}
        result.append({**kept, "type": "function", "function": function})
    return result


def _json(text: str, what: str) -> Any:
    try:
        return parse_json(text)
    except InvalidValue as error:
        raise MalformedRow(f"{what}: {error}") from None
    except ValueError:
        raise MalformedRow(f"{what}: broken JSON") from None
