"""Messages as they come, to messages in OpenAI form: ShareGPT on sight, renamed keys and roles."""

import json
from collections.abc import Mapping
from typing import Any

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


class Malformed(Exception):
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
        raise Malformed("messages must be a list of {role, content}")
    messages = []
    for number, item in enumerate(value, 1):
        try:
            messages.append(_message(item, fields, roles))
        except Malformed as error:
            error.place = f"message {number}"
            raise
    return messages


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas: a list, or the same as a JSON string; None if there are none."""
    if isinstance(value, str):
        value = _json(value, "tools") if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Malformed("tools must be a list of JSON schemas")
    return [dict(tool) for tool in value]


def _message(item: Any, fields: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise Malformed(f"a message is a {type(item).__name__}, not an object")
    found = dict(item)
    if "role" not in found and "from" in found:
        found["role"], found["content"] = found["from"], found.get("value")
    for key in KEYS:
        renamed = fields.get(f"messages.{key}")
        if renamed is not None:
            found[key] = found.get(renamed)
    message: dict[str, Any] = {key: found[key] for key in KEYS if found.get(key) not in (None, [])}
    role: Any = message.get("role")
    role = roles.get(role, role if role in ACCEPTED else ROLES.get(role, role))
    message["role"] = role
    content = message.setdefault("content", "")
    if isinstance(content, list):
        message["content"] = content = _text_parts(content)
    if not isinstance(content, str):
        raise Malformed(f"content is a {type(content).__name__}, not a string")
    if role == "function_call":
        call = _json(content, "function_call")
        message.update(role="assistant", content="", tool_calls=[{"function": call}])
    elif role not in ACCEPTED:
        raise Malformed(f"unknown role {role!r}")
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"])
    if not isinstance(message.get("reasoning_content", ""), str):
        raise Malformed("reasoning_content is not a string")
    return message


def _text_parts(parts: list[Any]) -> str:
    """Content given as parts, which must all be text."""
    found = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise Malformed("only text content is supported")
    return "".join(texts)


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls with `arguments` as an object: templates write that as JSON themselves."""
    if isinstance(calls, str):
        calls = _json(calls, "tool_calls")
    if not isinstance(calls, list):
        raise Malformed("tool_calls must be a list")
    result = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Malformed("a tool call needs function.name")
        arguments = function.get("arguments")
        if arguments in (None, ""):
            arguments = {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"arguments of {function['name']}")
        if not isinstance(arguments, Mapping):
            raise Malformed(f"arguments of {function['name']} are no object")
        kept = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": function["name"], "arguments": dict(arguments)}
        result.append({**kept, "type": "function", "function": function})
    return result


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Malformed(f"{what}: broken JSON") from None
