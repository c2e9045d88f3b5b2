"""Messages of a row in OpenAI form: detects ShareGPT, applies renamed keys and roles."""

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
"""Limit of what a chat template renders within its time budget."""
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
"""Roles of ShareGPT and other data; function_call is a turn whose text is a tool call."""

ACCEPTED = ("system", "developer", "user", "assistant", "tool")


class MalformedRow(Exception):
    """A row that cannot be read. The message is short and general, so that it can be counted."""

    location = ""
    """Position in the row: "message 3"."""


def read_messages(
    value: Any, fields: Mapping[str, str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return messages in OpenAI form: arguments of tool calls as objects, empty keys removed.

    fields: renamed keys as {"messages.content": "value"}; roles: {role in the data: role}. Raises
    MalformedRow.
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
            error.location = f"message {number}"
            raise
    return messages


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool schemas from a list or its JSON; None if there are none."""
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
    """Raise MalformedRow for a row that could not be read from its file."""
    if isinstance(row, UnreadableRow):
        raise MalformedRow(row.reason)


def check_values(value: Any) -> None:
    """Raise MalformedRow for values that would break a template or tokenizer: deep nesting, half a
    surrogate pair, texts longer than MOST_TEXT or, together, MOST_OF_ROW."""
    if too_deep(value):
        raise MalformedRow(f"nested deeper than {DEPTH} levels")
    size, pending = 0, [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            if len(entry) > MOST_TEXT:
                raise MalformedRow(TOO_MUCH)
            size += len(entry)
            if not entry.isascii() and has_surrogates(entry):
                raise MalformedRow("a text with half a surrogate pair")
        elif isinstance(entry, Mapping):
            pending += [*entry, *entry.values()]
        elif isinstance(entry, list | tuple):
            pending += entry
    if size > MOST_OF_ROW:
        raise MalformedRow(f"more than {MOST_OF_ROW:,} characters in all")


def _message(item: Any, fields: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise MalformedRow(f"a message is {name_type(item)}, not an object")
    renamed_item = dict(item)
    if "role" not in renamed_item and "from" in renamed_item:
        renamed_item["role"], renamed_item["content"] = (
            renamed_item["from"],
            renamed_item.get("value"),
        )
    for key in KEYS:
        renamed = fields.get(f"messages.{key}")
        if renamed is not None:
            renamed_item[key] = renamed_item.get(renamed)
    message: dict[str, Any] = {
        key: renamed_item[key] for key in KEYS if renamed_item.get(key) not in (None, [])
    }
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
    """Join the parts of a content, which must all be text."""
    contents = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in contents if isinstance(text, str)]
    if len(texts) < len(contents):
        raise MalformedRow("only text content is supported")
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls with `arguments` as an object, because templates write the JSON themselves."""
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
        call_id = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": dict(arguments)}
        result.append({**call_id, "type": "function", "function": function})
    return result


def _json(text: str, name: str) -> Any:
    try:
        return parse_json(text)
    except InvalidValue as error:
        raise MalformedRow(f"{name}: {error}") from None
    except ValueError:
        raise MalformedRow(f"{name}: broken JSON") from None
