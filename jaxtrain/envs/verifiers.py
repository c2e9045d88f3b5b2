"""Tasksets of the verifiers package as a world: it plays and judges, the policy is ours.

    row {"task": 3} ──> task 3 ── Env.run_episode (a thread of its own: verifiers_stage.py)
                                     agents ── chat ──> PolicyServer ──> Engine, turn by turn
    rewards, metrics  <── traces ────┘

What is trained is what the endpoint recorded: tokens, log-probs and versions are the engine's.
"""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from jaxtrain.config import EnvConfig
from jaxtrain.envs.policy_server import PolicyServer
from jaxtrain.envs.verifiers_stage import Stage
from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Engine, Episode, EpisodeFailed, Sampling
from jaxtrain.shown import printable

LONGEST_TRACE = 1500


class Verifiers:
    """`rollout.types.Env` of a taskset. Several trainable agents of an episode share its reward:
    the mean of theirs."""

    remote = True

    def __init__(
        self, tokenizer: Any, config: EnvConfig, row_tokens: int | None = None, section: str = "env"
    ):
        """row_tokens: longest sequence. section: its key in the config."""
        self.policy = PolicyServer(tokenizer, max_model_len=row_tokens or 1 << 20)
        self.stage = Stage(config.verifiers, self.policy, config.max_turns, f"{section}.verifiers")
        self.concurrency = config.verifiers.concurrency
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._rooms = WeakKeyDictionary()

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """One episode: see the module's docstring."""
        number = row.get("task")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise UserError(
                'env.kind verifiers needs rows with the number of a task, {"task": 0}; a row has'
                f" {', '.join(sorted(map(str, row))) or 'nothing'}"
            )
        room = self._rooms.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency)
        )
        with getattr(engine, "waiting", nullcontext)():
            await asyncio.to_thread(self.stage.open)
            await room.acquire()
        trained = self.policy.begin(engine, sampling, index)
        others = self.policy.begin(engine, sampling, index)
        names = [trained.id, others.id]

        def minted(trace: Any) -> None:
            names.append(trace.id)
            self.policy.also(trained if trace.agent.trainable else others, trace.id)

        try:
            work = self.stage.play(number, minted, lambda: trained.is_full)
            played = await trained.watch(others.watch(work))
            rewards, metrics = read_verdict(played)
            episode = trained.finish()
        finally:
            room.release()
            for name in names:
                self.policy.end(name)
        episode.rewards = rewards
        episode.metrics = {**episode.metrics, **metrics}
        return episode

    def close(self) -> None:
        """End what plays."""
        self.stage.close()
        self.policy.close()


def read_verdict(played: Any) -> tuple[dict[str, float | None], dict[str, float]]:
    """(rewards, metrics) of the package's Episode: means over its trainable traces by name.

    Raises EpisodeFailed where it is no result.
    """
    if not played.ok:
        traces = [error for trace in played.traces for error in trace.errors]
        error = next(reversed([*traces, *played.errors]), None)
        kind = "no result" if error is None else error.type
        raise EpisodeFailed(
            printable(f"verifiers: {kind}"[:80]),
            cause=printable(f"env.verifiers: {error.message if error else kind}"[:LONGEST_TRACE]),
            trace=printable((error.traceback or "")[-LONGEST_TRACE:]) if error else "",
            pause=True,
            mistake=True,
        )
    rewards: dict[str, list[float]] = {}
    metrics: dict[str, list[float]] = {}
    for trace in played.traces:
        if not trace.agent.trainable:
            continue
        for name, reward in trace.rewards.items():
            found = rewards.setdefault(name, [])
            if reward is not None:
                found.append(float(reward.value))
        for name, value in trace.metrics.items():
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    return (
        {name: sum(all_) / len(all_) if all_ else None for name, all_ in rewards.items()},
        {name: sum(all_) / len(all_) for name, all_ in metrics.items()},
    )
