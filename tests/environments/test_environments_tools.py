"""Plain functions as tools: schemas, checked calls, and calls out of what a model wrote."""

import asyncio
import json
import time

import pytest

from jaxtrain.environments.tool_calls import (
    ToolCall,
    parse_tool_calls,
    read_value,
    split_thinking,
    strip_tool_calls,
)
from jaxtrain.environments.tools import Toolbox, make_tool
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed


def search(query: str, limit: int = 3) -> list[str]:
    """Look something up.

    Args:
        query: What to look for.
        limit: How many hits to return.
    """
    if query == "raise":
        raise ValueError("no such thing")
    if query == "sleep":
        time.sleep(2)
    return [f"{query} {number}" for number in range(limit)]


async def weigh(kilos: float) -> str:
    """Weigh something.

    Args:
        kilos: Its mass.
    """
    await asyncio.sleep(0 if kilos < 100 else 5)
    return f"{kilos:g} kg"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("search", {"query": "tides", "limit": 1}, '["tides 0"]'),
        ("search", {"query": "tides", "limit": "2"}, '["tides 0", "tides 1"]'),
        ("search", {"limit": 1}, "error: argument query is missing"),
        ("search", {"query": "x", "far": 1}, "error: there is no argument far"),
        ("search", {"query": 7}, "error: argument query: Input should be a valid string"),
        ("search", {"query": "raise"}, "error: ValueError: no such thing"),
        ("search", {"query": "sleep"}, "error: search took more than 0.3 seconds"),
        ("weigh", {"kilos": 2}, "2 kg"),
        ("weigh", {"kilos": 200}, "error: weigh took more than 0.3 seconds"),
        ("shout", {}, "error: no tool named shout; there are: search, weigh"),
    ],
)
def test_a_call_is_checked_and_answered(name, arguments, content):
    box = Toolbox([make_tool(search), make_tool(weigh)], seconds=0.3 if "took" in content else 60.0)
    completed = asyncio.run(box.answer(ToolCall(name, arguments)))
    assert completed == {"role": "tool", "name": name, "content": content}
    assert box.num_errors == content.startswith("error")


def test_what_a_tool_may_end(tmp_path):
    def broken(reason: str) -> str:
        """Fail.

        Args:
            reason: Why.
        """
        raise EpisodeFailed(reason)

    with pytest.raises(EpisodeFailed, match="gone"):
        asyncio.run(Toolbox([make_tool(broken)]).answer(ToolCall("broken", {"reason": "gone"})))


def no_docstring(x: int):
    return x


def no_hint(x):
    """Do.

    Args:
        x: What.
    """


def any_number(*x: int):
    """Do.

    Args:
        x: What.
    """


@pytest.mark.parametrize("function", [no_docstring, no_hint, any_number, 3, print])
def test_a_function_without_a_schema_is_refused(function):
    with pytest.raises(UserError, match="a tool is a function with a docstring") as error:
        make_tool(function)
    assert len(str(error.value)) < 900


def test_calls_in_all_forms():
    text = (
        "<think>"
        + call("no")
        + "</think>"
        + call("a", x=[1])
        + (
            "<tool_call>\n<function=b>\n<parameter=x>\ntwo\nlines\n</parameter>\n"
            "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
        )
    )
    properties = {"x": {"type": "string"}, "n": {"type": "integer"}}
    tools = [
        {"type": "function", "function": {"name": "b", "parameters": {"properties": properties}}}
    ]
    assert parse_tool_calls(text, tools) == [
        ToolCall("a", {"x": [1]}),
        ToolCall("b", {"x": "two\nlines", "n": 3}),
    ]
    assert parse_tool_calls(text)[1].arguments["n"] == "3"  # no schema: text
    parameters = tools[0]["function"]["parameters"]
    parameters |= {"$defs": {"N": properties["n"]}, "properties": {"n": {"$ref": "#/$defs/N"}}}
    assert parse_tool_calls(text, tools)[1].arguments["n"] == 3
    bare = '{"name": "a", "parameters": {"x": 1}}'
    for text in (bare, f" <|python_tag|>{bare}\n", f"<think>hm</think>{bare}"):
        assert parse_tool_calls(text) == [ToolCall("a", {"x": 1})]
        assert strip_tool_calls(text.partition("</think>")[2] or text) == ""
    for text in (f"{bare} it is", '{"name": "Ann", "age": 3}', "{oops}", "{}", "[1]"):
        assert parse_tool_calls(text) == [] and strip_tool_calls(text) == text
    assert split_thinking("so it is</think>\nYes", opened=True) == ("so it is", "\nYes")
    assert split_thinking("not done", opened=True) == ("not done", "")


DEFINITIONS = {
    "Point": {"type": "object"},
    "Maybe": {"type": ["integer", "null"]},
    "Loop": {"$ref": "#/$defs/Loop"},
}
MANY = {"Many": {"anyOf": [{"type": "integer"}, *[{"$ref": "#/$defs/Many"}] * 3]}}
"""Every definition is looked up once, or this would take 3 to the power of the greatest depth."""
NULLABLE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "text, schema, value",
    [
        *(
            (text, {"type": "string"}, text)
            for text in ("12345", "1e5", "true", "null", '{"a": 1}')
        ),
        ("12345", {}, "12345"),
        ("12345", None, "12345"),
        ("12345", {"type": "integer"}, 12345),
        ("12.0", {"type": "integer"}, 12),
        ("12.5", {"type": "integer"}, "12.5"),
        ("1e5", {"type": "number"}, 1e5),
        ("7", {"type": "boolean"}, "7"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("[1]", {"type": "object"}, "[1]"),
        ("null", {"type": "string", "nullable": True}, None),
        ("None", NULLABLE, None),
        ("5", NULLABLE, 5),
        ("3.0", NULLABLE, 3),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e400", {"type": ["number", "null"]}, "1e400"),
        ('{"a": 1}', {"$ref": "#/$defs/Point", "$defs": DEFINITIONS}, {"a": 1}),
        ("null", {"anyOf": [{"$ref": "#/$defs/Maybe"}], "$defs": DEFINITIONS}, None),
        ("5", {"$ref": "#/$defs/Loop", "$defs": DEFINITIONS}, "5"),
        ("5", {"$ref": "#/definitions/Maybe", "definitions": DEFINITIONS}, 5),
        ("5", {"allOf": [{"$ref": "#/$defs/Maybe"}], "$defs": DEFINITIONS}, 5),
        ("null", {"$ref": "#/$defs/Point", "nullable": True, "$defs": DEFINITIONS}, None),
        ("5", {"$ref": "#/$defs/Many", "$defs": MANY}, 5),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("[1e400]", {"type": "array"}, "[1e400]"),
        ("5", {"type": ["string", "integer"]}, "5"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"type": "odd"}, "2"),
    ],
)
def test_xml_arguments_are_typed_by_their_schema(text, schema, value):
    result = read_value(text, schema)
    assert (type(result), result) == (type(value), value)
