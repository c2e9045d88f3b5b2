"""What an assistant turn holds besides its answer: thinking, and tool calls in the forms that
models of the Qwen, Hermes and Llama families write.

    <tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>
    <tool_call><function=search><parameter=query>tides</parameter></function></tool_call>
    {"name": "search", "parameters": {"query": "tides"}}            the whole turn is the call
"""

import json
import re
from typing import Any, NamedTuple

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
THINKING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
OPENED = "<think>"
CLOSED = "</think>"


class ToolCallError(Exception):
    """A tool call that cannot be answered; its text goes back to the model."""


class ToolCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Why it cannot be made: it is not in one of the forms."""


def strip_thinking(text: str) -> str:
    """An assistant turn without its thinking."""
    return THINKING.sub("", text)


def split_thinking(text: str, opened: bool = False) -> tuple[str, str]:
    """(the thinking, the rest) of an assistant turn. opened: its prompt has begun the thinking, as
    some templates do; then all up to </think> is thinking, or all."""
    if opened and OPENED not in text.partition(CLOSED)[0]:
        text = OPENED + text
    thoughts = [found.group(0) for found in THINKING.finditer(text)]
    return "".join(t.removeprefix(OPENED).removesuffix(CLOSED) for t in thoughts).strip(), (
        strip_thinking(text)
    )


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The tool calls of an assistant turn, in order; those in its thinking do not count. One that
    is in no known form has an `error`."""
    text = strip_thinking(text)
    if (bare := read_bare(text)) is not None:
        return [bare]
    calls = [read_call(found.group(1)) for found in CALL.finditer(text)]
    if "<tool_call>" in CALL.sub("", text):
        calls.append(ToolCall("", {}, "unfinished tool call"))
    return calls


def strip_tool_calls(text: str) -> str:
    """An assistant turn without its tool calls."""
    if read_bare(text) is not None:
        return ""
    return CALL.sub("", text).partition("<tool_call>")[0]


def read_bare(text: str) -> ToolCall | None:
    """The call that a turn is as a whole, in Llama's form; None where it is none."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    arguments = call.get("parameters", call.get("arguments"))
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    return ToolCall(call["name"], arguments)


def read_call(text: str) -> ToolCall:
    """The call between a pair of tags, JSON or XML; in neither form it has an `error`."""
    if found := FUNCTION.fullmatch(text):
        values = {name: _read_value(value) for name, value in PARAMETER.findall(found.group(2))}
        return ToolCall(found.group(1), values)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall("", {}, "tool call is not valid JSON")
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return ToolCall("", {}, "tool call needs name and arguments")
    return ToolCall(str(call.get("name")), call["arguments"])


def _read_value(text: str) -> Any:
    """A parameter's value: JSON where it is such, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
