"""From a reward's name to its function, and one call of it with what TRL users expect.

A reward function takes lists with one entry per completion and returns a list of numbers or None:

    def short(completions, **columns):
        return [1.0 if len(text_of(c)) < 100 else 0.0 for c in completions]

`completions` are texts, or message lists where the prompts are conversations. Every column of the
row comes along as a list, and `prompts`, `completion_ids`; a function without `**columns` gets
those that it names. Coroutine functions are awaited.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.rewards import math_answer, python_tests, texts

BUILTIN: dict[str, Callable[..., Any]] = {
    "math": math_answer.math,
    "exact_match": texts.exact_match,
    "format": texts.format,
    "regex": texts.regex,
    "length": texts.length,
    "json_schema": texts.json_schema,
    "python_tests": python_tests.python_tests,
}


def find_function(name: str) -> Callable[..., Any]:
    """The function that `rewards.N.function` names; UserError where there is none."""
    if name in BUILTIN:
        return BUILTIN[name]
    module_name, colon, attribute = name.rpartition(":")
    if not colon:  # TRL's form, package.module.function
        module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise UserError(
            f"rewards: there is no built-in reward {name!r}; choose one of"
            f" {', '.join(sorted(BUILTIN))}, or give package.module:function or file.py:function"
        )
    module = import_file(Path(module_name)) if module_name.endswith(".py") else None
    if module is None:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"rewards: {name!r} cannot be imported ({error}); the folder that holds it must be"
                " the working directory or on PYTHONPATH"
            ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"rewards: {module_name} has no function {attribute!r}")
    return function


def import_file(path: Path) -> Any:
    """The module that a Python file is, imported once per process."""
    if not path.is_file():
        raise UserError(f"rewards: the file {path} does not exist")
    name = f"jaxtrain_reward_{path.resolve().stem}_{abs(hash(str(path.resolve())))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # any file that ends in .py has one
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
    """The function's numbers for one group; NaN counts as None. UserError for another shape."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = dict(arguments)
    else:
        names = {parameter.name for parameter in parameters}
        taken = {name: value for name, value in arguments.items() if name in names}
    found = function(**taken)
    if inspect.isawaitable(found):
        found = asyncio.run(await_it(found))
    count = len(arguments["completions"])
    if not hasattr(found, "__len__") or len(found) != count:
        raise UserError(
            f"the reward function returned {found!r:.80}; it must return a list of {count}, one"
            " number or None per completion"
        )
    return [read_number(value) for value in found]


async def await_it(awaitable: Any) -> Any:
    """What any awaitable gives (asyncio.run takes coroutines only)."""
    return await awaitable


def read_number(value: Any) -> float | None:
    """A reward as float; None for None and NaN; UserError for what is no number."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the reward function returned {value!r:.80} for a completion; it must be a number or"
            " None"
        ) from None
    if math.isinf(number):
        raise UserError("the reward function returned an infinite number for a completion")
    return None if math.isnan(number) else number
