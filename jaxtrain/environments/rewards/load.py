"""From a reward's name to its function, and one call of it with what TRL users expect.

A reward function takes lists with one entry per completion and returns a list of numbers or None:

    def short(completions, **columns):
        return [1.0 if len(text_of(c)) < 100 else 0.0 for c in completions]

`completions` are texts, or message lists where the prompts are conversations. Every column of the
row comes along as a list, and `prompts`, `completion_ids`; a function without `**columns` gets
those that it names. Coroutine functions are awaited.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import plugins
from jaxtrain.errors import UserError

BUILTIN = {
    "math": "jaxtrain.environments.rewards.math_answer:math",
    "exact_match": "jaxtrain.environments.rewards.texts:exact_match",
    "format": "jaxtrain.environments.rewards.texts:format",
    "regex": "jaxtrain.environments.rewards.texts:regex",
    "length": "jaxtrain.environments.rewards.texts:length",
    "json_schema": "jaxtrain.environments.rewards.texts:json_schema",
    "python_tests": "jaxtrain.environments.rewards.python_tests:python_tests",
    "vllm_reward": "jaxtrain.environments.rewards.vllm_reward:vllm_reward",
}


class NonFiniteReward(Exception):
    """A reward that is no finite number."""


def find_function(name: str) -> Callable[..., Any]:
    """The function that `rewards.N.function` names; UserError where there is none."""
    return plugins.find("rewards", name, BUILTIN, key="rewards.function")


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
    """The function's numbers for one group. UserError for another shape, NotFinite for NaN."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        taken = dict(arguments)
    else:
        names = {parameter.name for parameter in parameters}
        taken = {name: value for name, value in arguments.items() if name in names}
    scores = function(**taken)
    if inspect.isawaitable(scores):
        scores = asyncio.run(await_it(scores))
    count = len(arguments["completions"])
    if not hasattr(scores, "__len__") or len(scores) != count:
        raise UserError(
            f"the reward function returned {scores!r:.80}; it must return a list of {count}, one"
            " number or None per completion"
        )
    return [read_number(value) for value in scores]


async def await_it(awaitable: Any) -> Any:
    """What any awaitable gives (asyncio.run takes coroutines only)."""
    return await awaitable


def read_number(value: Any) -> float | None:
    """A reward as float; None for None. UserError for what is no number, NotFinite for NaN and
    infinity."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the reward function returned {value!r:.80} for a completion; it must be a number or"
            " None"
        ) from None
    if not math.isfinite(number):
        name = "NaN" if math.isnan(number) else "an infinite number"
        raise NonFiniteReward(f"it returned {name} for a completion; None is for nothing to say")
    return number
