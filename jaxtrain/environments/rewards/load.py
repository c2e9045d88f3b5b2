"""Reward functions by name, and their calling convention, which is TRL's.

A reward function takes lists with one entry per completion and returns a list of numbers or None:

    def short(completions, **columns):
        return [1.0 if len(text_of(c)) < 100 else 0.0 for c in completions]

`completions` are texts, or message lists if the prompts are conversations. Every column of the row
is passed as a list, and `prompts` and `completion_ids`; a function without `**columns` receives
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
    "choice": "jaxtrain.environments.rewards.benchmarks:choice",
    "ifeval": "jaxtrain.environments.rewards.benchmarks:ifeval",
    "exact_match": "jaxtrain.environments.rewards.texts:exact_match",
    "format": "jaxtrain.environments.rewards.texts:format",
    "regex": "jaxtrain.environments.rewards.texts:regex",
    "length": "jaxtrain.environments.rewards.texts:length",
    "json_schema": "jaxtrain.environments.rewards.texts:json_schema",
    "python_tests": "jaxtrain.environments.rewards.python_tests:python_tests",
    "vllm_reward": "jaxtrain.environments.rewards.vllm_reward:vllm_reward",
}


class NonFiniteReward(Exception):
    """A reward is NaN or infinite."""


def find_function(name: str) -> Callable[..., Any]:
    """Return the function that `rewards.N.function` names; UserError if there is none."""
    return plugins.find("rewards", name, BUILTIN, key="rewards.function")


def call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
    """Call the function for a group; UserError for another shape, NonFiniteReward for NaN."""
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
    """Await any awaitable, because asyncio.run accepts coroutines only."""
    return await awaitable


def read_number(value: Any) -> float | None:
    """Return a reward as float, or None for None. Raises UserError for values that are not numbers,
    NonFiniteReward for NaN and infinity."""
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
