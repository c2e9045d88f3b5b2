"""Plain Python functions as tools: schemas from their signatures and docstrings, calls checked.

    def search(query: str, limit: int = 3) -> str:
        \"\"\"Look something up.

        Args:
            query: What to look for.
            limit: How many hits to return.
        \"\"\"

Whatever goes wrong in a call goes back to the model as a text that begins with "error:".
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
from jaxtrain.environments.tool_calls import ToolCall
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed

MAX_RESULT = 10_000
"""Characters of a tool's answer that the model gets to see."""
MAX_ERROR = 400
"""The same of what went wrong."""


class ToolFailed(Exception):
    """A call that gave no result; its text is what the model is told."""


@dataclass(frozen=True, eq=False)
class Tool:
    """A function that the model may call."""

    name: str
    schema: dict[str, Any]
    """As chat templates want it: {"type": "function", "function": {"name", "parameters", ...}}."""
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel]
    """Checks the arguments of a call, and makes them what the signature says."""

    async def __call__(self, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The function's result; it may be a coroutine function, and else has a thread of its own.

        Raises ToolFailed, for the model to read; EpisodeFailed and RunStopped pass.
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
        except (Exception, SystemExit) as error:  # the border: whatever foreign code may raise
            raise ToolFailed(f"{type(error).__name__}: {error}") from error


class Toolbox:
    """The tools of a conversation by name, and how often they were called."""

    def __init__(self, tools: Iterable[Tool] = (), seconds: float = 30.0):
        """seconds: that a call may take."""
        self.tools = {tool.name: tool for tool in tools}
        self.seconds = seconds
        self.num_calls = self.num_errors = 0

    def add(self, tool: Tool) -> None:
        """One more; UserError where another one has its name."""
        if self.tools.setdefault(tool.name, tool) is not tool:
            raise UserError(f"two tools are called {tool.name!r}; rename one of the functions")

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """For the chat template."""
        return [tool.schema for tool in self.tools.values()]

    async def answer(self, call: ToolCall) -> dict[str, Any]:
        """The message that answers a call."""
        self.num_calls += 1
        try:
            content = _to_text(await self._run(call))
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
    """A function, or a bound method, as a tool. UserError where its signature and docstring do not
    say what a model has to know."""
    # Slow to import, and needed by nobody without tools.
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
    schema["function"].pop("return", None)  # what no model is told
    return Tool(name, schema, function, arguments)


def load_tools(names: Sequence[str], key: str = "env.tools") -> list[Tool]:
    """The functions that a config names, "file.py:function" or "package.module:function"."""
    toolbox = Toolbox()
    for number, name in enumerate(names):
        toolbox.add(make_tool(plugins.find("tools", name, {}, key=f"{key}.{number}")))
    return list(toolbox.tools.values())


def _argument_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """A model of the arguments; fields are numbered, since pydantic reserves some names."""
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
    """What is wrong with the arguments, in one line."""
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
    """What a function returns that may block, and may never return: its thread ends no later than
    the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return  # it took too long, and nobody waits any more
        future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(**values)
        except StopIteration as stop:  # no future can carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except BaseException as raised:
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            pass  # the loop is closed: the run has ended

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await future


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return shorten(value, MAX_RESULT)
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(f"its result cannot be written as JSON: {error}") from None
    return shorten(text, MAX_RESULT)


def shorten(text: str, limit: int) -> str:
    """At most so many characters of a text, and how many more there were."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more)"
