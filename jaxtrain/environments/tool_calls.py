"""Thinking and tool calls in the text of assistant turns.

    hermes   <tool_call>{"name": "search", "arguments": {"query": "tides"}}</tool_call>   also Qwen
             <tool_call><function=search><parameter=query>tides</parameter></function></tool_call>
    llama3   {"name": "search", "parameters": {"query": "tides"}}       the whole turn is the call
    mistral  [TOOL_CALLS][{"name": "search", "arguments": {"query": "tides"}}]
             [TOOL_CALLS]search[ARGS]{"query": "tides"}

`parse_tool_calls` reads the hermes and llama3 forms, whatever the model. `split_calls` reads those
of the chat template's family, for endpoints: a call in no form of the family stays text, because a
guess could be wrong.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
THINKING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
OPENED = "<think>"
CLOSED = "</think>"
MAX_NESTING = 8
"""Alternatives within alternatives of a JSON schema that are followed."""


class ToolCallError(Exception):
    """A tool call cannot be answered; the message is returned to the model."""


class ToolCall(NamedTuple):
    """Tool call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Reason why it is invalid: it has none of the forms."""


def strip_thinking(text: str) -> str:
    """Remove the thinking from an assistant turn."""
    return THINKING.sub("", text)


def split_thinking(text: str, opened: bool = False) -> tuple[str, str]:
    """Split an assistant turn into (thinking, remaining text).

    opened: True if its prompt opened the thinking, as some templates do; then everything up to
    </think> is thinking, or all of it.
    """
    if opened and OPENED not in text.partition(CLOSED)[0]:
        text = OPENED + text
    thoughts = [match.group(0) for match in THINKING.finditer(text)]
    return "".join(t.removeprefix(OPENED).removesuffix(CLOSED) for t in thoughts).strip(), (
        strip_thinking(text)
    )


def parse_tool_calls(text: str, tools: Sequence[Any] = ()) -> list[ToolCall]:
    """Parse the tool calls of an assistant turn in order, ignoring its thinking. A call in no known
    form has an `error`. tools: schemas that the texts of XML arguments are typed by."""
    text = strip_thinking(text)
    if (bare := read_bare(text)) is not None:
        return [bare]
    calls = [read_call(match.group(1), tools) for match in CALL.finditer(text)]
    if "<tool_call>" in CALL.sub("", text):
        calls.append(ToolCall("", {}, "unfinished tool call"))
    return calls


def strip_tool_calls(text: str) -> str:
    """Remove the tool calls from an assistant turn."""
    if read_bare(text) is not None:
        return ""
    return CALL.sub("", text).partition("<tool_call>")[0]


def read_bare(text: str) -> ToolCall | None:
    """Parse a turn that is a single call in Llama's form; None if it is not."""
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


def read_call(text: str, tools: Sequence[Any] = ()) -> ToolCall:
    """Parse the call between a pair of tags, JSON or XML; with an `error` if it is neither."""
    if match := FUNCTION.fullmatch(text):
        name, arguments = match.groups()
        schemas = find_parameters(name, tools)
        values = {key: read_value(v, schemas.get(key)) for key, v in PARAMETER.findall(arguments)}
        return ToolCall(name, values)
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall("", {}, "tool call is not valid JSON")
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return ToolCall("", {}, "tool call needs name and arguments")
    return ToolCall(str(call.get("name")), call["arguments"])


def find_parameters(name: str, tools: Sequence[Any]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name, with the definitions that they may refer
    to; empty if there are none."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            parameters = parameters if isinstance(parameters, Mapping) else {}
            values, shared = parameters.get("properties"), read_definitions(parameters)
            values = values if isinstance(values, Mapping) else {}
            return {
                key: {"$defs": shared, **value} if isinstance(value, Mapping) else value
                for key, value in values.items()
            }
    return {}


def read_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `$ref` of a schema may name; older drafts call it definitions."""
    shared = schema.get("$defs") or schema.get("definitions")
    return shared if isinstance(shared, Mapping) else {}


TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Types of JSON Schema but string, and what JSON's values of them are in Python."""
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as templates write them that print arguments without JSON, and as JSON."""


def read_value(text: str, schema: Any) -> Any:
    """Convert the text of an XML argument to a type that its JSON schema allows. It stays text if
    that is a string, if there is no such type, or if the text has another form."""
    allowed = list_types(schema)
    if not allowed - {"string"}:
        return text
    try:
        value = json.loads(PYTHON.get(text.strip(), text))
        # Python reads NaN and 1e400, which are no numbers of JSON, wherever they stand.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    if "string" in allowed:
        allowed = allowed & {"null"}  # all other texts are strings, too
    kinds = {kind for name in allowed for kind in TYPES.get(name, ())}
    if type(value) is float and value.is_integer() and float not in kinds and int in kinds:
        return int(value)
    return value if type(value) in kinds else text


def list_types(
    schema: Any,
    depth: int = 0,
    shared: Mapping[str, Any] | None = None,
    seen: set[str] | None = None,
) -> set[str]:
    """Return the names of the types that a JSON schema allows; empty if it names none. shared:
    definitions that it may refer to. seen: names of those that were looked up."""
    if not isinstance(schema, Mapping) or depth > MAX_NESTING:
        return set()
    shared, seen = read_definitions(schema) or shared or {}, set() if seen is None else seen
    kind = schema.get("type")
    names = set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in shared and name not in seen:  # again, it could add nothing, and might never end
        seen.add(name)
        names |= list_types(shared[name], depth + 1, shared, seen)
    for key in ("anyOf", "oneOf", "allOf"):
        for option in schema.get(key) or ():
            names |= list_types(option, depth + 1, shared, seen)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not names and isinstance(values, list):
        listed = {name for name, kinds in TYPES.items() for v in values if type(v) in kinds}
        names = listed | ({"string"} if any(isinstance(v, str) for v in values) else set())
    return names | ({"null"} if names and schema.get("nullable") is True else set())


MISTRAL = re.compile(
    r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\[\s{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*)?(?P<value>[\[{])"
)
Parsed = tuple[str, list[ToolCall]]


def parse_hermes(text: str, tools: Sequence[Any] = ()) -> Parsed:
    """Parse calls between tags, JSON or XML."""
    calls: list[ToolCall] = []

    def take(match: re.Match) -> str:
        call = read_call(match.group(1), tools)
        if call.error is not None:
            return match.group(0)
        calls.append(call)
        return ""

    return CALL.sub(take, text), calls


def parse_llama3(text: str, tools: Sequence[Any] = ()) -> Parsed:
    """Parse a turn that is a call, or several calls separated by semicolons."""
    if (call := read_bare(text)) is not None:
        return "", [call]
    parts = text.strip().removeprefix("<|python_tag|>").split("; ")
    calls = [call for part in parts if (call := read_bare(part)) is not None]
    return ("", calls) if len(calls) == len(parts) else (text, [])


def parse_mistral(text: str, tools: Sequence[Any] = ()) -> Parsed:
    """Parse calls after the control token: a list of calls, or name and arguments."""
    content, calls, start = "", [], 0
    for match in MISTRAL.finditer(text):
        if match.start() < start:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.start("value"))
        except (ValueError, RecursionError):
            continue
        name = match.group("name")
        listed = value if isinstance(value, list) else [value]
        entries = [{"name": name, "arguments": value}] if name else listed
        if not entries or not all(map(_is_call, entries)):
            continue
        content += text[start : match.start()]
        calls += [ToolCall(call["name"], call["arguments"]) for call in entries]
        start = end
    return content + text[start:], calls


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments"), dict)
    )


class ToolCallFormat(NamedTuple):
    """Format of tool calls in a family of chat templates."""

    marks: tuple[str, ...]
    """Texts of which its templates contain at least one."""
    parse: Callable[[str, Sequence[Any]], Parsed]
    """Splits a turn without thinking, given the tools, into (remaining text, calls)."""


FAMILIES: Mapping[str, ToolCallFormat] = {
    "mistral": ToolCallFormat(("[TOOL_CALLS]",), parse_mistral),
    "hermes": ToolCallFormat(("<tool_call>",), parse_hermes),
    "llama3": ToolCallFormat(("<|python_tag|>", '"parameters":'), parse_llama3),
}
DEFAULT = "hermes"


def find_family(chat_template: str) -> str:
    """Detect the family of a chat template; DEFAULT if it has no tool calls."""
    for name, family in FAMILIES.items():
        if any(mark in chat_template for mark in family.marks):
            return name
    return DEFAULT


def split_calls(text: str, family: str, tools: Sequence[Any] = ()) -> Parsed:
    """Split a turn into (content, calls); thinking stays in the content, and calls in it are
    ignored. tools: as for parse_tool_calls."""
    thought, closed, rest = text.rpartition(CLOSED)
    if not closed and "<think>" in text:
        return text, []  # cut off within its thinking
    content, calls = FAMILIES[family].parse(rest, tools)
    return (thought + closed + content, calls) if calls else (text, [])
