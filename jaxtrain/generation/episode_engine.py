"""Engine as an episode sees it: the policy that plays, and the run's other policies.

    env.run(row, engine, ...)   engine.generate(...)                     the policy that plays
                                engine.others["solver"].generate(...)    another trained one
                                engine.others["judge"].reply(...)        a frozen one
                                with engine.waiting(): ...               time that is not the env's

A run opens one EpisodeEngine for all of its policies (`with_policies`, `combine_engines`) and
closes it. Every episode plays with a view of it (`open_view`), which notes the versions that draw
its tokens, refuses media tokens in prompts, and measures how long the episode has been busy.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxtrain.data.media_tokens import MediaTokens, find_media
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, Engine, FrozenPolicy, PolicyReply, Sampling
from jaxtrain.generation.version_tracker import VersionTracker, listen


class WaitClock:
    """Clock of an episode: whether it waits for something outside of its environment."""

    def __init__(self) -> None:
        self.waiting = 0
        """Waits under way: an episode may have several, with asyncio.gather."""
        self.busy_since = time.monotonic()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count the time within this context as none of the environment's."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.busy_since = time.monotonic()


@dataclass(frozen=True, eq=False)
class EpisodeScope:
    """Settings and state of one episode; all engines that it uses share them."""

    index: int = 0
    """Number of the episode."""
    tracker: VersionTracker | None = None
    """Records versions; None if they are not needed."""
    media: MediaTokens = field(default_factory=dict)
    """Tokens that no prompt may hold."""
    clock: WaitClock = field(default_factory=WaitClock)


class EpisodeEngine:
    """`Engine` with the run's other policies at its side."""

    def __init__(
        self,
        engine: Engine,
        policies: Mapping[str, Any] | None = None,
        *,
        scope: EpisodeScope | None = None,
    ):
        """policies: engines and frozen policies by name. scope: of the episode that it is a view
        for; None: it is the run's own, which closes them all."""
        self._engine, self._members, self._scope = engine, dict(policies or {}), scope
        self._others = {**getattr(engine, "others", {}), **self._members}

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
        likely: int = 0,
        images: PlacedImages | None = None,
    ) -> Completion:
        """Continue a prompt; raises UserError for images that the engine does not read, and for
        media tokens without images."""
        scope = self._scope
        options: dict[str, Any] = {"likely": likely} if likely else {}
        if images is not None:
            if not self.reads_images:
                raise UserError(
                    "a prompt has images, and the engine reads text alone; set rollout.engine to"
                    ' "local"'
                )
            options["images"] = images
        if scope is None:
            return await self._engine.generate(prompt, sampling, stop_ids, index, **options)
        text = prompt if images is None else np.asarray(prompt)[images.slot < 0]
        if scope.media and (problem := find_media(text, scope.media)):
            raise UserError(problem)
        # Before the request: a group may be given up as too old while its first tokens are drawn.
        note = None if scope.tracker is None else scope.tracker.add(scope.index)
        with scope.clock.pause():
            with nullcontext() if note is None else listen(note):
                completion = await self._engine.generate(
                    prompt, sampling, stop_ids, index, **options
                )
            if note is not None:
                # Of engines that reported nothing while they drew, and of answers that were drawn
                # by several versions: the oldest one decides whether they can be trained.
                note(min((v for v in completion.versions if v >= 0), default=-1))
        return completion

    @property
    def reports_likely(self) -> bool:
        """True if `generate` takes `likely`; engines from elsewhere may not."""
        return getattr(self._engine, "reports_likely", False)

    @property
    def reads_images(self) -> bool:
        """True if `generate` takes `images`."""
        return getattr(self._engine, "reads_images", False)

    @property
    def others(self) -> dict[str, Any]:
        """The run's other policies by name; waiting for them is not environment time."""
        scope = self._scope
        if scope is None:
            return self._others
        return {
            name: TimedPolicy(policy, scope.clock)
            if isinstance(policy, FrozenPolicy)
            else EpisodeEngine(policy, scope=scope)
            for name, policy in self._others.items()
        }

    def waiting(self) -> Any:
        """Return a context for environments: what they wait for within it (a place in a queue,
        servers that start) does not count against env.step_timeout."""
        return nullcontext() if self._scope is None else self._scope.clock.pause()

    @property
    def version(self) -> int:
        """Version of the policy that it samples from now."""
        return self._engine.version

    def counters(self) -> dict[str, float]:
        """Counters of all policies."""
        counters = dict(self._engine.counters())
        for policy in self._members.values():
            counters |= policy.counters()
        return counters

    async def close(self) -> None:
        """Close all policies; a view closes nothing, since other episodes still use them."""
        if self._scope is None:
            for policy in (self._engine, *self._members.values()):
                await policy.close()

    def __getattr__(self, name: str) -> Any:
        """Forward, in views, what an engine of a plugin offers beyond the protocol.

        The run's own object must not: it would seem to be a KeepsVersions, and what `keep` returns
        has no other policies.
        """
        if name.startswith("_") or self._scope is None:
            raise AttributeError(name)
        return getattr(self._engine, name)


class TimedPolicy:
    """A frozen policy as an episode sees it."""

    def __init__(self, policy: FrozenPolicy, clock: WaitClock):
        self._policy, self._clock = policy, clock

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """Return its next turn."""
        with self._clock.pause():
            return await self._policy.reply(messages, index)


def open_view(engine: Engine, **scope: Any) -> EpisodeEngine:
    """Return a view of any engine with these fields of EpisodeScope; of a view, one that also keeps
    what the first was made with."""
    if isinstance(engine, EpisodeEngine) and engine._scope is not None:
        return EpisodeEngine(engine._engine, scope=replace(engine._scope, **scope))
    return EpisodeEngine(engine, scope=EpisodeScope(**scope))


def combine_engines(engines: Mapping[str, Engine]) -> EpisodeEngine:
    """Return the engines of several policies as that of the first, with all of them beside it."""
    first, *_ = engines
    combined = EpisodeEngine(
        engines[first], {name: engine for name, engine in engines.items() if name != first}
    )
    combined._others = dict(engines)  # the first one is found by its name, too
    return combined


def with_policies(engine: Engine, policies: Mapping[str, Any]) -> Engine:
    """Return the engine combined with others; the engine itself if there are none."""
    return EpisodeEngine(engine, policies) if policies else engine
