"""Rewards: every function on a group of completions, side by side, with counts of what failed."""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.errors import UserError
from jaxtrain.rewards.pool import Reply, WorkerPool
from jaxtrain.rollout.types import Episode

PATIENCE = 20
"""Calls of one function in a row that may raise before the run stops: that is a broken function,
not a bad completion. Hanging and crashing calls are counted, but never stop a run."""

Scores = list[dict[str, float | None]]


class Rewards:
    """The reward functions of a run; `counters` says how often which of them failed, and how."""

    def __init__(
        self,
        functions: Sequence[RewardConfig],
        workers: int = 2,
        say: Callable[[str], None] = print,
    ):
        self.functions = list(functions)
        self.weights = {function.label: function.weight for function in functions}
        self.counters: Counter[str] = Counter()
        self.pool = WorkerPool(workers)
        self.say = say
        self.failed_in_a_row: Counter[str] = Counter()
        self.told: set[tuple[str, str]] = set()

    def only(self, names: Sequence[str] | None) -> "Rewards":
        """The same with the functions of these names alone (None: all): one pool of workers, one
        count of failures."""
        some = copy.copy(self)
        if names is not None:
            some.functions = [one for one in self.functions if one.label in names]
        return some

    def check(self) -> None:
        """Look up every function in a worker; UserError where one cannot be imported."""
        for function in self.functions:
            reply = self.pool.call(function.function, None, function.timeout)
            if reply.kind != "ok":
                raise UserError(f"rewards, function {function.function!r}: {reply.value}")

    async def score(self, episodes: Sequence[Episode], row: Mapping[str, Any]) -> Scores:
        """{name: number or None} for each episode of one row (a group).

        None: the function had nothing to say, or failed; the counters tell which. What the
        environment gave itself is among them. Raises UserError for a mistake in a function's
        options, its columns or its result, and when a function has raised PATIENCE times in a row.
        """
        arguments = {
            **{name: [value] * len(episodes) for name, value in row.items()},
            "prompts": [episode.prompt for episode in episodes],
            "completions": [episode.completion for episode in episodes],
            "completion_ids": [episode.drawn_tokens for episode in episodes],
        }
        found = await asyncio.gather(*(self.call(one, arguments) for one in self.functions))
        labels = [one.label for one in self.functions]
        return [
            {**episode.all_rewards, **dict(zip(labels, values, strict=True))}
            for episode, *values in zip(episodes, *found, strict=True)
        ]

    async def call(self, one: RewardConfig, arguments: dict[str, Any]) -> list[float | None]:
        """One function's numbers; all None where it failed."""
        options = {_parameter(name): value for name, value in one.options.items()}
        reply = await asyncio.to_thread(
            self.pool.call, one.function, {**arguments, **options}, one.timeout
        )
        self.counters[f"rewards/{one.label}/calls"] += 1
        if reply.kind == "ok":
            self.failed_in_a_row[one.label] = 0
            return reply.value
        self.note(one, reply)
        return [None] * len(arguments["completions"])

    def note(self, one: RewardConfig, reply: Reply) -> None:
        """Count a failure; say it once; stop the run where it is no accident."""
        if reply.kind == "user":
            raise UserError(f"rewards, {one.label}: {reply.value}")
        self.counters[f"rewards/{one.label}/{reply.kind}"] += 1
        self.failed_in_a_row[one.label] += reply.kind == "error"
        if self.failed_in_a_row[one.label] >= PATIENCE:
            raise UserError(
                f"reward function {one.function!r} has raised {PATIENCE} times and never returned"
                f" in between, last: {reply.value}; mend it"
            )
        if (one.label, reply.kind) not in self.told:
            self.told.add((one.label, reply.kind))
            self.say(
                f"reward {one.label!r}: {reply.kind}: {reply.value}; its value is missing for this"
                " group. This is said once, and counted"
            )

    def total(self, scores: Mapping[str, float | None]) -> float | None:
        """Weighted sum of what is there; None where every function had nothing to say (TRL's
        nansum, with all-missing kept missing)."""
        there = {name: value for name, value in scores.items() if value is not None}
        if not there:
            return None
        return sum(self.weights.get(name, 1.0) * value for name, value in there.items())

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def _parameter(option: str) -> str:
    """options.column reaches the built-ins as column_name, so that a data column called `column`
    stays possible."""
    return "column_name" if option == "column" else option


def open_rewards(
    functions: Sequence[RewardConfig], workers: int = 2, say: Callable[[str], None] = print
) -> Rewards:
    """Start the workers and look up every function; UserError where one does not exist."""
    functions = [
        one.model_copy(update={"options": reveal(one.options, f"rewards.{place}.options")})
        for place, one in enumerate(functions)
    ]
    rewards = Rewards(functions, workers, say)
    try:
        rewards.check()
    except BaseException:
        rewards.close()
        raise
    return rewards
