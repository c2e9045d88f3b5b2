"""Rewards: every function on a group of completions, side by side, with counts of what failed."""

import asyncio
import copy
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config.rewards import RewardConfig
from jaxtrain.config.secrets import reveal
from jaxtrain.environments.rewards.pool import WorkerPool, WorkerReply
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed, pause_before
from jaxtrain.generation.episodes import Episode
from jaxtrain.text_safety import escape_control_chars

AGAIN = ("error", "timeout", "crash")
"""Kinds of replies after which another try, a moment later, may succeed: a judge over HTTP."""

Scores = list[dict[str, float | None]]


class Rewards:
    """The reward functions of a run; `counters` says how often which of them failed, and how."""

    def __init__(
        self,
        functions: Sequence[RewardConfig],
        workers: int = 2,
        retries: int = 0,
    ):
        """retries: further tries of a call that failed in a way that may pass."""
        self.functions = list(functions)
        self.retries = retries
        self.weights = {function.label: function.weight for function in functions}
        self.keys = {one.label: f"rewards.{index}" for index, one in enumerate(functions)}
        self.counters: Counter[str] = Counter()
        self.pool = WorkerPool(workers)

    def only(self, names: Sequence[str] | None) -> "Rewards":
        """The same with the functions of these names alone (None: all): one pool of workers, one
        count of failures."""
        subset = copy.copy(self)
        if names is not None:
            subset.functions = [function for function in self.functions if function.label in names]
        return subset

    def check(self) -> None:
        """Look up every function in a worker; UserError where one cannot be imported."""
        for function in self.functions:
            reply = self.pool.call(function.function or "", None, function.timeout)
            if reply.kind != "ok":
                raise UserError(f"rewards, function {function.function!r}: {reply.value}")

    async def score(self, episodes: Sequence[Episode], row: Mapping[str, Any]) -> Scores:
        """{name: number or None} for each episode of one row (a group).

        None: the function had nothing to say. What the environment gave itself is among them.
        Raises EpisodeFailed where a function failed, so that nothing is trained on half a verdict.
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
        """One function's numbers, asked for again where that may help; raises EpisodeFailed."""
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
        """One call, which may block; what cannot be sent to another process is an error."""
        try:
            return self.pool.call(function.function or "", arguments, function.timeout)
        except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            return WorkerReply("error", f"{type(error).__name__}: {error}"[:500])

    def _explain(self, function: RewardConfig, reply: WorkerReply) -> EpisodeFailed:
        """What became of a call, as the failure of the episodes that it should have judged."""
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
        """Weighted sum of what is there; None where every function had nothing to say (TRL's
        nansum, with all-missing kept missing)."""
        present = {name: value for name, value in scores.items() if value is not None}
        if not present:
            return None
        return sum(self.weights.get(name, 1.0) * value for name, value in present.items())

    def close(self) -> None:
        """End the workers."""
        self.pool.close()


def _parameter(option: str) -> str:
    """options.column reaches the built-ins as column_name, so that a data column called `column`
    stays possible."""
    return "column_name" if option == "column" else option


def open_rewards(functions: Sequence[RewardConfig], workers: int = 2, retries: int = 0) -> Rewards:
    """Start the workers and look up every function; UserError where one does not exist."""
    functions = [
        function.model_copy(
            update={"options": reveal(function.options, f"rewards.{index}.options")}
        )
        for index, function in enumerate(functions)
        if function.model is None
    ]
    rewards = Rewards(functions, workers, retries)
    try:
        rewards.check()
    except BaseException:
        rewards.close()
        raise
    return rewards
