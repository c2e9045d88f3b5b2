"""Tool calls in what a model wrote, by the family of its chat template, as endpoints give them.

    hermes   <tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>   Qwen, too
             <tool_call><function=search><parameter=query>tides</parameter></function></tool_call>
    llama3   {"name": "search", "parameters": {"query": "tides"}}       the whole turn is the call
    mistral  [TOOL_CALLS][{"name": "search", "arguments": {"query": "tides"}}]
             [TOOL_CALLS]search[ARGS]{"query": "tides"}

A call in no form of the family stays text: nobody guesses what a model meant.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtrain.environments.turns import CALL, CLOSED, ToolCall, read_bare, read_call

MISTRAL = re.compile(
    r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\[\s{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*)?(?P<value>[\[{])"
)
Parsed = tuple[str, list[ToolCall]]


def parse_hermes(text: str) -> Parsed:
    """Calls between tags, JSON or XML, each for itself."""
    calls: list[ToolCall] = []

    def take(found: re.Match) -> str:
        call = read_call(found.group(1))
        if call.error is not None:
            return found.group(0)
        calls.append(call)
        return ""

    return CALL.sub(take, text), calls


def parse_llama3(text: str) -> Parsed:
    """The whole turn, or several calls with a semicolon between them."""
    if (call := read_bare(text)) is not None:
        return "", [call]
    parts = text.strip().removeprefix("<|python_tag|>").split("; ")
    calls = [call for part in parts if (call := read_bare(part)) is not None]
    return ("", calls) if len(calls) == len(parts) else (text, [])


def parse_mistral(text: str) -> Parsed:
    """Behind the control token: a list of calls, or name and arguments."""
    content, calls, start = "", [], 0
    for found in MISTRAL.finditer(text):
        if found.start() < start:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start("value"))
        except (ValueError, RecursionError):
            continue
        name = found.group("name")
        listed = value if isinstance(value, list) else [value]
        made = [{"name": name, "arguments": value}] if name else listed
        if not made or not all(map(_is_call, made)):
            continue
        content += text[start : found.start()]
        calls += [ToolCall(call["name"], call["arguments"]) for call in made]
        start = end
    return content + text[start:], calls


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments"), dict)
    )


class ToolCallFormat(NamedTuple):
    """How the models of some chat templates call tools."""

    marks: tuple[str, ...]
    """Texts of which its templates hold one."""
    parse: Callable[[str], Parsed]
    """(what is left, calls) of a turn without its thinking."""


FAMILIES: Mapping[str, ToolCallFormat] = {
    "mistral": ToolCallFormat(("[TOOL_CALLS]",), parse_mistral),
    "hermes": ToolCallFormat(("<tool_call>",), parse_hermes),
    "llama3": ToolCallFormat(("<|python_tag|>", '"parameters":'), parse_llama3),
}
DEFAULT = "hermes"


def find_family(chat_template: str) -> str:
    """The family of a chat template, by what it writes; DEFAULT where it names no tool calls."""
    for name, family in FAMILIES.items():
        if any(mark in chat_template for mark in family.marks):
            return name
    return DEFAULT


def split_calls(text: str, family: str) -> Parsed:
    """(content, calls) of a turn; thinking stays in the content, and calls in it do not count."""
    thought, closed, rest = text.rpartition(CLOSED)
    if not closed and "<think>" in text:
        return text, []  # it was cut off within its thinking
    content, calls = FAMILIES[family].parse(rest)
    return (thought + closed + content, calls) if calls else (text, [])
