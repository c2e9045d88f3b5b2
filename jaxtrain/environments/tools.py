"""Python functions as tools: schemas from signatures and docstrings, and checked calls.

    def search(query: str, limit: int = 3) -> str:
        \"\"\"Look something up.

        Args:
            query: What to look for.
            limit: How many hits to return.
        \"\"\"

Errors of a call are returned to the model as a text that begins with "error:".
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import pydantic

from jaxtrain import plugins
from jaxtrain.data.images.reader import KINDS, PAYLOAD
from jaxtrain.data.packing.tree import Image
from jaxtrain.environments.tool_calls import ToolCall
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed

MAX_RESULT = 10_000
"""Characters of a tool's result that the model sees."""
MAX_ERROR = 400
"""Characters of an error that the model sees."""


class ToolFailed(Exception):
    """A call gave no result; the message is returned to the model."""


@dataclass(frozen=True, eq=False)
class Tool:
    """Function that the model can call."""

    name: str
    schema: dict[str, Any]
    """Schema for chat templates: {"type": "function", "function": {"name", "parameters", ...}}."""
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel]
    """Validates the arguments of a call and converts them to the types of the signature."""

    async def __call__(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Call the function, in a thread unless it is a coroutine function, and return its result.

        Raises ToolFailed with a message for the model; EpisodeFailed and RunStopped propagate.
        """
        try:
            parsed = self.arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            raise ToolFailed(_explain(error)) from None
        values = {
            str(field.alias): getattr(parsed, name)
            for name, field in self.arguments.model_fields.items()
            if name in parsed.model_fields_set
        }
        try:
            if inspect.iscoroutinefunction(self.function):
                return await asyncio.wait_for(self.function(**values), seconds)
            return await asyncio.wait_for(_in_thread(self.function, values), seconds)
        except TimeoutError:
            raise ToolFailed(f"{self.name} took more than {seconds:g} seconds") from None
        except (EpisodeFailed, RunStopped):
            raise
        except plugins.FAILURES as error:  # user code may raise anything
            raise ToolFailed(f"{type(error).__name__}: {error}") from error


class Toolbox:
    """Tools of a conversation by name, with counts of calls and errors."""

    def __init__(self, tools: Iterable[Tool] = (), seconds: float = 30.0):
        """seconds: time limit of a call."""
        self.tools = {tool.name: tool for tool in tools}
        self.seconds = seconds
        self.num_calls = self.num_errors = 0

    def add(self, tool: Tool) -> None:
        """Add a tool; UserError if another one has its name."""
        if self.tools.setdefault(tool.name, tool) is not tool:
            raise UserError(f"two tools are called {tool.name!r}; rename one of the functions")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas for the chat template."""
        return [tool.schema for tool in self.tools.values()]

    async def answer(self, call: ToolCall) -> dict[str, Any]:
        """Execute a call and return the tool message that answers it."""
        self.num_calls += 1
        try:
            content = _to_content(await self._run(call))
        except ToolFailed as failure:
            self.num_errors += 1
            content = f"error: {shorten(str(failure), MAX_ERROR)}"
        return {"role": "tool", "name": call.name, "content": content}

    async def _run(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ToolFailed(call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            names = ", ".join(self.tools) or "none"
            raise ToolFailed(f"no tool named {call.name[:100]}; there are: {names}")
        return await tool(call.arguments, self.seconds)


def make_tool(function: Callable[..., Any]) -> Tool:
    """Build a tool from a function or bound method; UserError if its signature and docstring do not
    define a schema."""
    # Slow to import, and only needed with tools.
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    name = getattr(function, "__name__", type(function).__name__)
    needs = (
        "; a tool is a function with a docstring that says what it does and, under `Args:`, what"
        " each argument is, and with a type hint for each argument"
    )
    try:
        schema = get_json_schema(function)
        arguments = _argument_model(name, function)
    except (
        DocstringParsingException,
        TypeHintParsingException,
        pydantic.errors.PydanticUserError,
        TypeError,
        NameError,
        ValueError,
    ) as error:
        raise UserError(f"tool {name!r} has no schema: {shorten(str(error), 300)}{needs}") from None
    schema["function"].pop("return", None)  # not part of the schema for models
    return Tool(name, schema, function, arguments)


def load_tools(names: Sequence[str], key: str = "env.tools") -> list[Tool]:
    """Load the functions that a config names, "file.py:function" or "package.module:function"."""
    toolbox = Toolbox()
    for number, name in enumerate(names):
        toolbox.add(make_tool(plugins.find("tools", name, {}, key=f"{key}.{number}")))
    return list(toolbox.tools.values())


def _argument_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """Build a model of the arguments; fields are numbered, since pydantic reserves some names."""
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"its argument {parameter.name!r} cannot be given by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        hint = hints.get(parameter.name, Any)
        fields[f"argument_{number}"] = (hint, pydantic.Field(default, alias=parameter.name))
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return pydantic.create_model(name, __config__=config, **fields)


def _explain(error: pydantic.ValidationError) -> str:
    """Describe invalid arguments in one line."""
    problems = []
    for problem in error.errors(include_url=False, include_context=False)[:5]:
        path = ".".join(str(part)[:50] for part in problem["loc"]) or "arguments"
        match problem["type"]:
            case "missing":
                problems.append(f"argument {path} is missing")
            case "extra_forbidden":
                problems.append(f"there is no argument {path}")
            case _:
                problems.append(f"argument {path}: {problem['msg']}")
    return "; ".join(problems)


async def _in_thread(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a function that may block, in a daemon thread, so that one that never returns does not
    keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def resolve(value: Any, error: BaseException | None) -> None:
        if future.done():
            return  # the call timed out, and its future was canceled
        future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(**values)
        except StopIteration as stop:  # a future cannot carry StopIteration
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        try:
            loop.call_soon_threadsafe(resolve, value, error)
        except RuntimeError:
            pass  # the loop is closed: the run has ended

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await future


def _to_content(value: Any) -> str | list[Any]:
    """Return a result as text, or as a list of parts of a content if it is one with an image."""
    if isinstance(value, str):
        return shorten(value, MAX_RESULT)
    if isinstance(value, list) and all(isinstance(x, dict) and "type" in x for x in value):
        if any(map(_holds_image, value)):
            return [_shorten_part(part) for part in value]
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(f"its result cannot be written as JSON: {error}") from None
    return shorten(text, MAX_RESULT)


def _holds_image(part: dict[str, Any]) -> bool:
    """Return True for a part of a content whose image is in it, not behind a path or a URL, which
    results of searches have, too."""
    if part["type"] not in KINDS:
        return False
    values = [part.get(key) for key in PAYLOAD]
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return bool(part.get("base64")) or any(
        isinstance(value, bytes | bytearray | memoryview | Image)
        or (isinstance(value, str) and value[:5].lower() == "data:")
        for value in values
    )


def _shorten_part(part: dict[str, Any]) -> dict[str, Any]:
    text = part.get("text")
    return {**part, "text": shorten(text, MAX_RESULT)} if isinstance(text, str) else part


def shorten(text: str, limit: int) -> str:
    """Cut a text to `limit` characters and append the number of characters removed."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more)"
