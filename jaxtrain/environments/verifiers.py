"""Tasksets of the verifiers package as environments: it plays and judges with our policy.

    row {"task": 3} ──> task 3 ── Env.run_episode (in a separate thread: verifiers_thread.py)
                                     agents ── chat ──> PolicyServer ──> Engine, turn by turn
    an Episode each   <── traces ────┘

The endpoint's record is trained: tokens, log-probs and versions are the engine's. Each run of a
trainable agent is a trace with its own rewards and becomes an Episode; runs of other agents are
recorded but not returned.
"""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from jaxtrain.config import EnvConfig
from jaxtrain.data.chat.omissions import Kwargs
from jaxtrain.environments.episode_record import EpisodeRecord
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.verifiers_thread import VerifiersEnvironment
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episodes import Episode
from jaxtrain.text_safety import escape_control_chars

LONGEST_TRACE = 1500


class Verifiers:
    """`episodes.Env` of a taskset."""

    remote = True

    def __init__(
        self, tokenizer: Any, config: EnvConfig, row_tokens: int | None = None, section: str = "env"
    ):
        """row_tokens: longest sequence. section: key in the config."""
        self.policy = PolicyServer(tokenizer, max_model_len=row_tokens or 1 << 20)
        self.stage = VerifiersEnvironment(
            config.verifiers, self.policy, config.max_turns, f"{section}.verifiers"
        )
        self.concurrency = config.verifiers.concurrency
        self.policies = config.verifiers.policies
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._rooms = WeakKeyDictionary()

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> list[Episode]:
        """Play a game: see the module's docstring."""
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
        kwargs = row.get("chat_template_kwargs")
        game = VerifiersGame(self.policy, engine, sampling, index, self.policies, kwargs)
        try:
            work = self.stage.play(number, game.mint, game.is_full)
            return game.finish(await game.whole.watch(work), len(self.stage.roles) > 1)
        finally:
            room.release()
            game.close()

    def close(self) -> None:
        """Stop the environment and the policy endpoint."""
        self.stage.close()
        self.policy.close()


class VerifiersGame:
    """Records of an episode of the package, one per trace."""

    def __init__(
        self,
        policy: PolicyServer,
        engine: Engine,
        sampling: Sampling,
        index: int,
        policies: Mapping[str, str],
        kwargs: Kwargs = None,
    ):
        """Create it in the engine's event loop. policies: names in section policies, by agent.
        kwargs: variables of the chat template."""
        self.policy, self.engine, self.sampling, self.index = policy, engine, sampling, index
        self.policies, self.kwargs = policies, kwargs
        self.whole = policy.begin(engine, sampling, index)
        """Record that fails if any of them fails."""
        self.records: dict[str, EpisodeRecord] = {}

    def mint(self, trace: Any) -> None:
        """Register a new trace; called from any thread before its agent's first request."""
        engine, name = self.engine, self.policies.get(trace.agent.name)
        if name is not None:
            policies = getattr(engine, "others", {})
            if not hasattr(policies.get(name), "generate"):
                self.whole.loop.call_soon_threadsafe(self.whole.fail, _no_policy(name, policies))
                return
            engine = policies[name]
        self.records[trace.id] = self.policy.begin(
            engine, self.sampling, self.index, trace.id, self.whole, self.kwargs
        )

    def is_full(self) -> bool:
        """Return True if an agent was refused because its conversation fills a row."""
        return any(record.is_full for record in self.records.values())

    def finish(self, played: Any, several: bool) -> list[Episode]:
        """Return the Episodes of trainable traces with turns, each with the rewards of its trace.

        A trace without rewards has None for each name. several: True if Episodes name their agent.
        Raises EpisodeFailed if the package has no result, or no turn was sampled.
        """
        check_verdict(played)
        traces = [t for t in played.traces if t.agent.trainable and t.id in self.records]
        spoke = [trace for trace in traces if self.records[trace.id].num_turns] or traces[:1]
        episodes = [self.records[trace.id].finish() for trace in spoke]
        if not episodes:
            raise EpisodeFailed("no agent of it is trainable", again=False, mistake=True)
        names = dict.fromkeys(name for trace in spoke for name in trace.rewards)
        for trace, episode in zip(spoke, episodes, strict=True):
            rewards, metrics = read_verdict(trace)
            episode.rewards = rewards or dict.fromkeys(names)
            episode.metrics |= metrics
            episode.agent = trace.agent.name if several else ""
            episode.policy = self.policies.get(trace.agent.name, "")
        return episodes

    def close(self) -> None:
        """Refuse further turns of all records."""
        for name in (self.whole.id, *self.records):
            self.policy.end(name)


def _no_policy(name: str, policies: Mapping[str, Any]) -> UserError:
    trained = sorted(policy for policy, engine in policies.items() if hasattr(engine, "generate"))
    return UserError(
        f"env.verifiers.policies names {name!r}; trained in section policies:"
        f" {', '.join(trained) or 'none'} (a frozen one is a client of its own: agents.NAME.client)"
    )


def check_verdict(played: Any) -> None:
    """Raise EpisodeFailed if the package's Episode has no result."""
    if not played.ok:
        traces = [error for trace in played.traces for error in trace.errors]
        error = next(reversed([*traces, *played.errors]), None)
        kind = "no result" if error is None else error.type
        raise EpisodeFailed(
            escape_control_chars(f"verifiers: {kind}"[:80]),
            cause=escape_control_chars(
                f"env.verifiers: {error.message if error else kind}"[:LONGEST_TRACE]
            ),
            trace=escape_control_chars((error.traceback or "")[-LONGEST_TRACE:]) if error else "",
            pause=True,
            mistake=True,
        )


def read_verdict(trace: Any) -> tuple[dict[str, float | None], dict[str, float]]:
    """Return (rewards, as score x weight, and metrics) of a trace by name."""
    rewards = trace.rewards.items()
    return (
        {name: None if reward is None else float(reward.value) for name, reward in rewards},
        {name: float(value) for name, value in trace.metrics.items() if value is not None},
    )
