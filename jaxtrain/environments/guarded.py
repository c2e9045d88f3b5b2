"""The border between a run and somebody's environment: whatever happens there is a failed episode.

    guarded.run ─> task: env.run(row, engine) ──> an Episode that is one, with finite rewards
          │            └─ engine.generate         the engine's time is not the environment's
          └─ time-outs: of the whole episode, of what the environment does between two answers

What goes wrong is raised as EpisodeFailed, with the key and the name of the environment.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import EnvConfig
from jaxtrain.data.media_tokens import MediaTokens, find_media
from jaxtrain.environments.factory import open_env
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import (
    Completion,
    Engine,
    EpisodeFailed,
    FrozenPolicy,
    PolicyReply,
    Sampling,
)
from jaxtrain.generation.episodes import Env, Episode, as_game
from jaxtrain.text_safety import escape_control_chars

ENDS = (EpisodeFailed, RunStopped, Interrupted)
"""What an environment may raise for the engine, and what is no failure of its own."""


class GuardedEnv:
    """An `Env` that only raises EpisodeFailed, and what the engine raises to end a run."""

    def __init__(
        self,
        env: Env,
        name: str,
        timeout: float | None = None,
        step_timeout: float | None = None,
        media: MediaTokens | None = None,
    ):
        """name: "env.kind 'single_turn'". timeout: seconds of an episode; step_timeout: seconds
        from one answer of the engine to the next question, or the end. media: tokens that no prompt
        may hold."""
        self.env, self.name = env, name
        self.timeout, self.step_timeout = timeout, step_timeout
        self.media = media or {}

    @property
    def remote(self) -> bool:
        """Whether it plays in servers, which nobody should start or ask just to try something."""
        return getattr(self.env, "remote", False)

    def close(self) -> None:
        """Let go of what the environment holds: servers, connections, processes."""
        if (close := getattr(self.env, "close", None)) is not None:
            close()

    def counters(self) -> dict[str, float]:
        """What the environment has counted so far, by the names of metrics."""
        counters = getattr(self.env, "counters", None)
        return {} if counters is None else counters()

    def inspect(
        self, rows: Iterable[Mapping[str, Any]], log: Callable[[str], None], wait: bool = True
    ) -> None:
        """Before a run: ask servers that the environment plays in whether they can play such rows;
        UserError. wait: for those that are not there yet."""
        if (inspect := getattr(self.env, "inspect", None)) is not None:
            inspect(rows, log, wait)

    async def run(
        self, row: dict[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """See episodes.Env."""
        watched = WatchedEngineBase(engine, self.media)
        task = asyncio.ensure_future(self._play(self.env.run(row, watched, sampling, index)))
        try:
            await self._wait(task, watched)
        finally:
            task.cancel()
        episode = as_game(task.result())
        if problem := find_problem(episode):
            raise self._failed(problem, problem)
        return episode

    async def _play(self, work: Coroutine[Any, Any, Episode]) -> Episode:
        """Await it; what it raises becomes EpisodeFailed."""
        try:
            return await work
        except ENDS:
            raise
        except UserError as error:
            raise self._failed(
                "a row that cannot be played", str(error), again=False, mistake=True
            ) from None
        except (Exception, SystemExit) as error:  # the border: whatever foreign code may raise
            reason = f"environment raised {type(error).__name__}"
            text, trace = plugins.describe(error), plugins.trace(error)
            raise self._failed(reason, text, trace=trace, pause=True) from error

    async def _wait(self, task: asyncio.Task, watched: "WatchedEngineBase") -> None:
        """Until the task is done; raises EpisodeFailed after a time-out."""
        end = math.inf if self.timeout is None else time.monotonic() + self.timeout
        step = math.inf if self.step_timeout is None else self.step_timeout
        while not task.done():
            now = time.monotonic()
            if now >= end:
                self._give_up(task, f"env.timeout {self.timeout:g}")
            if not watched.asking and now >= watched.since + step:
                self._give_up(task, f"env.step_timeout {self.step_timeout:g}")
            left = min(end - now, step if watched.asking else watched.since + step - now)
            await asyncio.wait({task}, timeout=None if left == math.inf else left)
        if task.cancelled():
            raise self._failed("environment was cancelled", "its task was cancelled from within")

    def _give_up(self, task: asyncio.Task, key: str) -> None:
        frames = task.get_stack(limit=1)
        place = f" in {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
        raise self._failed("environment timed out", f"it took longer than {key} seconds{place}")

    def _failed(self, reason: str, text: str, **options: Any) -> EpisodeFailed:
        cause = escape_control_chars(f"{self.name}: {text}")
        return EpisodeFailed(escape_control_chars(reason), cause=cause, **options)


class WatchedEngineBase:
    """An engine that knows whether it is being asked, and since when it is not."""

    def __init__(self, engine: Engine, media: MediaTokens):
        self._engine, self._media = engine, media
        self.asking = 0
        self.since = time.monotonic()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """See engine.Engine."""
        if self._media and (problem := find_media(prompt, self._media)):
            raise UserError(problem)
        with self.waiting():
            return await self._engine.generate(prompt, sampling, stop_ids, index)

    @property
    def others(self) -> dict[str, Any]:
        """The run's other policies by name; the time that they take is none of the world's."""
        found = getattr(self._engine, "others", {})
        return {
            name: WatchedSpeaker(one, self)
            if isinstance(one, FrozenPolicy)
            else WatchedEngine(one, self, self._media)
            for name, one in found.items()
        }

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For environments: what is waited for within it (a place in somebody's queue, servers that
        start) does not count as a step of theirs."""
        self.asking += 1
        try:
            yield
        finally:
            self.asking -= 1
            self.since = time.monotonic()

    @property
    def version(self) -> int:
        """See engine.Engine."""
        return self._engine.version

    def counters(self) -> dict[str, float]:
        """See engine.Engine."""
        return self._engine.counters()

    async def close(self) -> None:
        """Nothing to close: the engine is everybody's."""

    def __getattr__(self, name: str) -> Any:
        """What else an engine of one's own may offer."""
        return getattr(self._engine, name)


class WatchedEngine(WatchedEngineBase):
    """Another trained policy of an episode that is watched."""

    def __init__(self, engine: Engine, watched: WatchedEngineBase, media: MediaTokens):
        super().__init__(engine, media)
        self.waiting = watched.waiting


class WatchedSpeaker:
    """A frozen policy of an episode that is watched."""

    def __init__(self, speaker: FrozenPolicy, watched: WatchedEngineBase):
        self._speaker, self._watched = speaker, watched

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """See engine.FrozenPolicy."""
        with self._watched.waiting():
            return await self._speaker.reply(messages, index)


def find_problem(episode: Any) -> str:
    """What is wrong with what an environment returned, in a few words; empty: nothing."""
    if not isinstance(episode, Episode):
        return f"environment returned a {type(episode).__name__}, which is no Episode"
    for other in episode.others:
        if problem := find_problem(other):
            return problem
    for one in episode.sequences:
        lengths = {len(one.tokens), len(one.sampled), len(one.logprobs), len(one.versions)}
        if len(lengths) > 1:
            return "environment returned lists of different lengths"
        if any(value != value for value in one.logprobs):
            return "a log-prob is NaN"
    for name, value in [pair for one in given_rewards(episode) for pair in one.items()]:
        if value is None:
            continue
        if isinstance(value, str) or not hasattr(value, "__float__"):
            return f"reward {name} is no number"
        if not math.isfinite(value):
            return f"reward {name} is {'NaN' if value != value else 'infinite'}"
    return ""


def given_rewards(episode: Episode) -> list[dict[str, Any]]:
    """The dicts of rewards that an environment gave: of the episode, and of its turns."""
    return [episode.rewards, *episode.turn_rewards]


def open_guarded(
    config: EnvConfig,
    tokenizer: Any,
    row_tokens: int | None = None,
    section: str = "env",
    media: MediaTokens | None = None,
    folder: str | None = None,
) -> GuardedEnv:
    """As open.open_env, behind its border; media: as for Guarded. Close it in the end."""
    key, name = ("kind", config.kind) if config.path is None else ("path", config.path)
    env = open_env(config, tokenizer, row_tokens, section, folder)
    return GuardedEnv(env, f"{section}.{key} {name!r}", config.timeout, config.step_timeout, media)
