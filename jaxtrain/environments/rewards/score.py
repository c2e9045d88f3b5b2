"""Rewards of a group of completions: all functions concurrently, with counts of failures."""

import asyncio
import copy
import os
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.environments.rewards.load import BUILTIN
from jaxtrain.environments.rewards.pool import WorkerPool, WorkerReply
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed, pause_before
from jaxtrain.generation.episodes import Episode
from jaxtrain.text_safety import escape_control_chars

AGAIN = ("error", "timeout", "crash")
"""Kinds of replies after which a retry may succeed, for instance of a judge over HTTP."""
MOST_WORKERS = 8
"""Limit of the default number of processes, each of which imports what its functions need."""

Scores = list[dict[str, float | None]]


class Rewards:
    """Reward functions of a run; `counters` counts calls and failures by function and kind."""

    def __init__(self, functions: Sequence[RewardConfig], workers: int = 2, retries: int = 0):
        """retries: additional attempts of a call after a failure that may be temporary."""
        self.functions = list(functions)
        self.retries = retries
        self.weights = {function.label: function.weight for function in functions}
        self.env_weight = 1.0
        """Factor of rewards that the environment gives."""
        self.keys = {entry.label: f"rewards.{index}" for index, entry in enumerate(functions)}
        self.counters: Counter[str] = Counter()
        self.pool = WorkerPool(workers)

    def only(self, names: Sequence[str] | None) -> "Rewards":
        """Return a view with the functions of these names (None: all); it shares the pool of
        workers and the counters."""
        subset = copy.copy(self)
        if names is not None:
            subset.functions = [function for function in self.functions if function.label in names]
        return subset

    def using(self, functions: Sequence[RewardConfig], key: str) -> "Rewards":
        """Return a view in which these functions alone count; `key` names them in messages."""
        view = copy.copy(self)
        view.functions = list(functions)
        view.weights = {function.label: function.weight for function in functions}
        view.keys, view.env_weight = {function.label: key for function in functions}, 0.0
        return view

    def check(self) -> None:
        """Look up every function in a worker; UserError if one cannot be imported."""
        for function in self.functions:
            reply = self.pool.call(function.function or "", None, function.timeout)
            if reply.kind != "ok":
                raise UserError(f"rewards, function {function.function!r}: {reply.value}")

    async def score(self, episodes: Sequence[Episode], row: Mapping[str, Any]) -> Scores:
        """Return {name: number or None} for each episode of a row (a group).

        None: the function does not apply. Rewards of the environment are included. Raises
        EpisodeFailed if a function failed, so that nothing trains on partial rewards.
        """
        arguments = {
            **{name: [value] * len(episodes) for name, value in row.items()},
            "prompts": [episode.prompt for episode in episodes],
            "completions": [episode.completion for episode in episodes],
            "completion_ids": [episode.drawn_tokens for episode in episodes],
        }
        columns = await asyncio.gather(
            *(self.call(function, arguments) for function in self.functions)
        )
        labels = [function.label for function in self.functions]
        return [
            {**episode.all_rewards, **dict(zip(labels, values, strict=True))}
            for episode, *values in zip(episodes, *columns, strict=True)
        ]

    async def call(self, function: RewardConfig, arguments: dict[str, Any]) -> list[float | None]:
        """Call a function, with retries if they may help; raises EpisodeFailed."""
        options = {_parameter(name): value for name, value in function.options.items()}
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(pause_before(attempt))
            reply = await asyncio.to_thread(self._ask, function, {**arguments, **options})
            self.counters[f"rewards/{function.label}/calls"] += 1
            if reply.kind == "ok":
                return reply.value
            self.counters[f"rewards/{function.label}/{reply.kind}"] += 1
            if reply.kind not in AGAIN:
                break
        raise self._explain(function, reply)

    def _ask(self, function: RewardConfig, arguments: dict[str, Any]) -> WorkerReply:
        """Call a function once, blocking; arguments that cannot be pickled are an error."""
        try:
            return self.pool.call(function.function or "", arguments, function.timeout)
        except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            return WorkerReply("error", f"{type(error).__name__}: {error}"[:500])

    def _explain(self, function: RewardConfig, reply: WorkerReply) -> EpisodeFailed:
        """Build the failure of the episodes whose rewards a call could not compute."""
        raised = escape_control_chars(str(reply.value).partition(":")[0][:60])
        reasons = {
            "error": f"raised {raised}",
            "timeout": "timed out",
            "crash": "ended its process",
            "not_finite": "is NaN or infinite",
            "user": "was not understood",
        }
        key = f"{self.keys[function.label]} (function {function.function!r})"
        return EpisodeFailed(
            f"reward {function.label} {reasons[reply.kind]}",
            cause=escape_control_chars(f"{key}: {reply.value}"),
            trace=reply.trace,
            again=False,
            mistake=reply.kind == "user",
        )

    def total(self, scores: Mapping[str, float | None]) -> float | None:
        """Return the weighted sum of the scores that are not None; None if all are (TRL's nansum,
        except that all-missing stays missing)."""
        present = {name: value for name, value in scores.items() if value is not None}
        if not present:
            return None
        return sum(
            self.weights.get(name, self.env_weight) * value for name, value in present.items()
        )

    def close(self) -> None:
        """Stop the workers."""
        self.pool.close()


def _parameter(option: str) -> str:
    """Map options.column to the parameter column_name of built-ins, so that the data may have a
    column called `column`."""
    return "column_name" if option == "column" else option


def open_rewards(
    functions: Sequence[RewardConfig], workers: int | None = None, retries: int = 0
) -> Rewards:
    """Start the workers and look up every function; UserError if one does not exist. workers: as
    `rollout.reward_workers`."""
    functions = [
        function.model_copy(
            update={"options": reveal(function.options, f"rewards.{index}.options")}
        )
        for index, function in enumerate(functions)
        if function.model is None
    ]
    rewards = Rewards(functions, workers or choose_workers(functions), retries)
    try:
        rewards.check()
    except BaseException:
        rewards.close()
        raise
    return rewards


def choose_workers(functions: Sequence[RewardConfig]) -> int:
    """Return the default of `rollout.reward_workers`.

    A mathematical answer takes milliseconds to compare, and most answers of a round end together,
    so a single process would keep the GPU waiting. A user's function may hold a model or count its
    calls: it gets a single process.
    """
    if any(function.function not in BUILTIN for function in functions):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST_WORKERS, (cores or 1) - 1))
