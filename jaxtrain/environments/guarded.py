"""Border between a run and an environment: whatever goes wrong there is a failed episode.

    guarded.run ─> task: env.run(row, engine) ──> a valid Episode with finite rewards
          │            └─ engine.generate         the engine's time is not the environment's
          └─ time-outs: of the whole episode, of what the environment does between two answers

Everything is raised as EpisodeFailed, with the key and the name of the environment.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import EnvConfig
from jaxtrain.data.chat.template import TemplateFailed
from jaxtrain.data.media_tokens import MediaTokens
from jaxtrain.environments.factory import open_env
from jaxtrain.errors import Interrupted, RunStopped, UnusableRow, UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episode_engine import WaitClock, open_view
from jaxtrain.generation.episodes import Env, Episode, as_game
from jaxtrain.text_safety import escape_control_chars

PASSED_ON = (EpisodeFailed, RunStopped, Interrupted)
"""Errors that an environment may raise; they are no failures of its code."""


class GuardedEnv:
    """`Env` that only raises EpisodeFailed, and what the engine raises to end a run."""

    def __init__(
        self,
        env: Env,
        name: str,
        timeout: float | None = None,
        step_timeout: float | None = None,
        media: MediaTokens | None = None,
    ):
        """name: "env.kind 'single_turn'". timeout: seconds of an episode; step_timeout: seconds
        from one answer of the engine to the next request, or the end. media: tokens that no prompt
        may hold."""
        self.env, self.name = env, name
        self.timeout, self.step_timeout = timeout, step_timeout
        self.media = media or {}

    @property
    def remote(self) -> bool:
        """True if it plays in servers, which a dry run must neither start nor use."""
        return getattr(self.env, "remote", False)

    def close(self) -> None:
        """Close servers, connections and processes of the environment."""
        if (close := getattr(self.env, "close", None)) is not None:
            close()

    def counters(self) -> dict[str, float]:
        """Return what the environment has counted so far, by the names of metrics."""
        counters = getattr(self.env, "counters", None)
        return {} if counters is None else counters()

    def inspect(
        self, rows: Iterable[Mapping[str, Any]], log: Callable[[str], None], wait: bool = True
    ) -> None:
        """Check, before a run, that servers of the environment can play such rows; raises
        UserError. wait: for servers that do not answer yet."""
        if (inspect := getattr(self.env, "inspect", None)) is not None:
            inspect(rows, log, wait)

    async def run(
        self, row: dict[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play an episode; raises EpisodeFailed."""
        clock = WaitClock()
        view = open_view(engine, media=self.media, clock=clock)
        task = asyncio.ensure_future(self._play(self.env.run(row, view, sampling, index)))
        try:
            await self._wait(task, clock)
        finally:
            task.cancel()
        episode = as_game(task.result())
        if problem := find_problem(episode):
            raise self._failed(problem, problem)
        for played in (episode, *episode.others):
            leave_out_unscored(played)
        return episode

    async def _play(self, work: Coroutine[Any, Any, Episode]) -> Episode:
        """Await the environment's coroutine; what it raises becomes EpisodeFailed."""
        try:
            return await work
        except PASSED_ON:
            raise
        except (UserError, TemplateFailed) as error:
            mistake = not isinstance(error, UnusableRow | TemplateFailed)
            raise self._failed(
                "a row that cannot be played", str(error), again=False, mistake=mistake
            ) from None
        except plugins.FAILURES as error:  # the border: whatever foreign code may raise
            reason = f"environment raised {type(error).__name__}"
            text, trace = plugins.describe(error), plugins.trace(error)
            raise self._failed(reason, text, trace=trace, pause=True) from error

    async def _wait(self, task: asyncio.Task, clock: WaitClock) -> None:
        """Wait until the task is done; raises EpisodeFailed after a time-out."""
        end = math.inf if self.timeout is None else time.monotonic() + self.timeout
        step = math.inf if self.step_timeout is None else self.step_timeout
        while not task.done():
            time_now = time.monotonic()
            if time_now >= end:
                self._give_up(task, f"env.timeout {self.timeout:g}")
            if not clock.waiting and time_now >= clock.busy_since + step:
                self._give_up(task, f"env.step_timeout {self.step_timeout:g}")
            # While it waits for the engine, a step can time out `step` seconds from now at the
            # earliest; looking again then, nothing has to wake this coroutine in between.
            due = min(end - time_now, step if clock.waiting else clock.busy_since + step - time_now)
            await asyncio.wait({task}, timeout=None if due == math.inf else due)
        if task.cancelled():
            raise self._failed("environment was cancelled", "its task was cancelled from within")

    def _give_up(self, task: asyncio.Task, key: str) -> None:
        frames = task.get_stack(limit=1)
        location = f" in {frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
        raise self._failed("environment timed out", f"it took longer than {key} seconds{location}")

    def _failed(self, reason: str, text: str, **options: Any) -> EpisodeFailed:
        cause = escape_control_chars(f"{self.name}: {text}")
        return EpisodeFailed(escape_control_chars(reason), cause=cause, **options)


def find_problem(episode: Any) -> str:
    """Return what is wrong with what an environment returned, in a few words; empty if nothing."""
    if not isinstance(episode, Episode):
        return f"environment returned a {type(episode).__name__}, which is no Episode"
    for further in episode.others:
        if problem := find_problem(further):
            return problem
    for sequence in episode.sequences:
        lists = sequence.tokens, sequence.sampled, sequence.logprobs, sequence.versions
        if len(set(map(len, lists))) > 1:
            return "environment returned lists of different lengths"
        drawn = [value for value, s in zip(sequence.logprobs, sequence.sampled, strict=True) if s]
        if drawn and all(value != value for value in drawn):
            return "every log-prob is NaN"
    for name, value in [pair for rewards in env_rewards(episode) for pair in rewards.items()]:
        if value is None:
            continue
        if isinstance(value, str) or not hasattr(value, "__float__"):
            return f"reward {name} is no number"
        if not math.isfinite(value):
            return f"reward {name} is {'NaN' if value != value else 'infinite'}"
    return ""


def leave_out_unscored(episode: Episode) -> None:
    """Turn drawn tokens whose log-prob is NaN into context, which is not trained."""
    for sequence in episode.sequences:
        for position, value in enumerate(sequence.logprobs):
            if value != value:
                sequence.logprobs[position], sequence.sampled[position] = 0.0, False


def env_rewards(episode: Episode) -> list[dict[str, Any]]:
    """Return the rewards that an environment gave, of the episode and of its turns."""
    return [episode.rewards, *episode.turn_rewards]


def open_guarded(
    config: EnvConfig,
    tokenizer: Any,
    row_tokens: int | None = None,
    section: str = "env",
    media: MediaTokens | None = None,
    folder: str | None = None,
    row_patches: int | None = None,
) -> GuardedEnv:
    """Open an environment as factory.open_env does, guarded; the caller closes it."""
    key, name = ("kind", config.kind) if config.path is None else ("path", config.path)
    env = open_env(config, tokenizer, row_tokens, section, folder, row_patches)
    return GuardedEnv(env, f"{section}.{key} {name!r}", config.timeout, config.step_timeout, media)
