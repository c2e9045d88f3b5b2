"""LocalEngine: the trainer's own weights as an Engine, for coroutines on the loop thread.

    coroutine ── generate ─┐
    coroutine ── generate ─┼─ wait until nobody else is ready to ask ─> LocalSampler.generate
    coroutine ── generate ─┘                                            (blocks, many rows at once)

Turns of different episodes meet in one batch whenever they wait at the same time.
"""

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

from jaxtrain.rollout.local import LocalSampler
from jaxtrain.rollout.types import Completion, EpisodeFailed, Sampling

PATIENCE = 3
"""Rounds of the event loop without a new request after which nobody else is about to ask."""


class LocalEngine:
    """Batches the requests of waiting coroutines; see the module's docstring."""

    def __init__(self, sampler: LocalSampler):
        self.sampler = sampler
        self.version = -1
        self._waiting: list[tuple[list[int], Sampling, tuple[int, ...], int, asyncio.Future]] = []
        self._flush: asyncio.Task | None = None

    def use(self, model: Any, version: int) -> None:
        """Sample from these weights from now on."""
        self.sampler.use(model)
        self.version = version

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """Continue a prompt together with whoever else waits; see types.Engine.

        A draw depends on (sampling.seed, index, length of the prompt, prompt, weights) alone.
        Raises EpisodeFailed for a prompt that leaves no room for an answer.
        """
        if len(prompt) >= self.sampler.max_len:
            raise EpisodeFailed("the conversation fills the model's longest row")
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((list(prompt), sampling, tuple(stop_ids), index, future))
        if self._flush is None or self._flush.done():
            self._flush = loop.create_task(self._serve())
        return await future

    async def close(self) -> None:
        """Nothing to let go of; requests that still wait fail."""
        for *_, future in self._waiting:
            if not future.done():
                future.set_exception(EpisodeFailed("the engine was closed"))
        self._waiting = []

    def counters(self) -> dict[str, float]:
        """Nothing can go wrong that is worth counting."""
        return {}

    async def _serve(self) -> None:
        """Answer everything that waits, in as few batches as there are kinds of request."""
        while self._waiting:
            quiet, seen = 0, 0
            while quiet < PATIENCE:
                await asyncio.sleep(0)
                quiet = quiet + 1 if len(self._waiting) == seen else 0
                seen = len(self._waiting)
            taken, self._waiting = self._waiting, []
            while taken:
                _, sampling, stops, _, _ = taken[0]
                same = [request for request in taken if request[1:3] == (sampling, stops)]
                taken = [request for request in taken if request[1:3] != (sampling, stops)]
                self._answer([r for r in same if not r[4].done()], sampling, stops)

    def _answer(self, requests: list, sampling: Sampling, stops: tuple[int, ...]) -> None:
        prompts = [prompt for prompt, *_ in requests]
        draws = [draw_number(index, len(prompt)) for prompt, _, _, index, _ in requests]
        try:
            answers = self.sampler.generate(prompts, sampling, stops, draws)
        except BaseException as error:
            for *_, future in requests:
                if not future.done():
                    future.set_exception(error)
            return
        for (*_, future), answer in zip(requests, answers, strict=True):
            versions = [self.version] * len(answer.tokens)
            future.set_result(answer._replace(versions=versions))


def draw_number(index: int, length: int) -> int:
    """31 bits from an episode's number and how far it has come, so that turns draw anew."""
    return zlib.crc32(f"{index} {length}".encode()) & 0x7FFFFFFF


class LocalPublisher:
    """Hands the trainer's weights to the local engine: no copy, so no cost."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine

    def publish(self, version: int, params: Any, rebuild: Any) -> dict[str, float]:
        """Sample from `params` from now on, until the next optimizer step donates them."""
        self.engine.use(rebuild(params), version)
        return {}

    def sleep(self) -> None:
        """Nothing to give back: the weights are the trainer's."""

    def close(self) -> None:
        """Nothing to close."""
