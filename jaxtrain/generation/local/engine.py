"""LocalEngine: a sampler for coroutines; its chunks are drawn in a separate thread.

    coroutine ── generate ─┐                    thread "sampler"
    coroutine ── generate ─┼─ add ─> requests ─> LocalSampler.step ─> ended ─> futures
    coroutine ── generate ─┘   ^         (a chunk of all rows)           │
                               └────────── the next turn ────────────────┘

While a chunk is drawn the event loop runs tools, rewards and other episodes. Before the next one it
waits until no coroutine is about to add a request, so that turns are batched together.
"""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxtrain.adapters.slotted import NO_ADAPTER, AdapterSlot
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.engine import Completion, EpisodeFailed, Likely, Sampling
from jaxtrain.generation.local.requests import Request, Requests
from jaxtrain.generation.local.scoring import find_likely, score_text
from jaxtrain.generation.version_tracker import find_listener

PATIENCE = 3
"""Rounds of the event loop without a new request after which no coroutine is about to add one."""


class LocalEngine:
    """`engine.Engine` in the training process; see the module's docstring."""

    reads_images = True

    def __init__(self, sampler: Requests, thread: ThreadPoolExecutor | None = None):
        """thread: shared by several engines, so that their chunks alternate; its creator ends
        it."""
        self.sampler = sampler
        self._shared = thread
        self._asked = 0
        self._counted: Acceptance | None = None
        self._futures: dict[Request, asyncio.Future] = {}
        self._unbegun: dict[Request, Callable[[int], None]] = {}
        """Callbacks that receive the version that draws a request's first token."""
        self._watched: dict[Request, Callable[[Completion], None]] = {}
        self._serving: asyncio.Task | None = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def version(self) -> int:
        """Return the version of the weights that draw the next chunk."""
        return self.sampler.version

    def use(self, model: Any, version: int) -> None:
        """Sample from these weights from the next chunk on; from any thread."""
        self.sampler.use(model, version)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
        likely: int = 0,
        watch: Callable[[Completion], None] | None = None,
        images: PlacedImages | None = None,
    ) -> Completion:
        """Continue a prompt, batched with all other requests; see engine.Engine.

        likely: they come from a pass over the whole answer, by the weights of that time. watch:
        receives the answer so far, in the event loop, each time that it has grown. images: of the
        prompt.

        A draw depends on (sampling.seed, index, length of the prompt, prompt, weights) alone.
        Raises EpisodeFailed for a prompt that leaves no room for an answer.
        """
        request = self.open_request(prompt, sampling, stop_ids, index, images)
        return await self.answer(request, likely, watch)

    def open_request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int],
        index: int,
        images: PlacedImages | None,
    ) -> Request:
        """Return a request for `answer`; see `generate`."""
        if len(prompt) >= self.sampler.max_len:
            raise EpisodeFailed("the conversation fills the model's longest row")
        number = draw_number(index, len(prompt))
        return self.sampler.request(list(prompt), sampling, stop_ids, number, images=images)

    async def answer(
        self, request: Request, likely: int, watch: Callable[[Completion], None] | None
    ) -> Completion:
        """Draw a request, batched with all others; see `generate`."""
        loop = asyncio.get_running_loop()
        future = self._futures[request] = loop.create_future()
        if (listener := find_listener()) is not None:
            self._unbegun[request] = listener
        if watch is not None:
            request.streamed = True
            self._watched[request] = watch
        self.sampler.add(request)
        self._asked += 1
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        try:
            answer = await future
        finally:
            self._unbegun.pop(request, None)
            self._watched.pop(request, None)
            # Cancelled while it was drawn: its row must not run on.
            if self._futures.pop(request, None) is not None:
                self.sampler.abort(request)
        if not likely:
            return answer
        # A constraint has followed the answer: a new one begins before it.
        images, ends = request.images, request.ends
        undrawn = self.sampler.request(request.prompt, request.sampling, ends, images=images)
        undrawn.adapter = request.adapter
        work = partial(find_likely, self.sampler, undrawn, answer, likely)
        return answer._replace(likely=await loop.run_in_executor(self._executor(), work))

    @property
    def reports_likely(self) -> bool:
        """True if the most probable tokens of a place can be had."""
        return self.sampler.predicts_next

    async def score(
        self,
        tokens: Sequence[int],
        images: PlacedImages | None = None,
        adapter: AdapterSlot = NO_ADAPTER,
    ) -> tuple[list[float], list[Likely]]:
        """Return `score_text` of a text, computed between chunks."""
        work = partial(score_text, self.sampler, tokens, images, adapter=adapter)
        return await asyncio.get_running_loop().run_in_executor(self._executor(), work)

    async def close(self) -> None:
        """End the thread; waiting requests fail."""
        for request, future in list(self._futures.items()):
            self.sampler.abort(request)
            if not future.done():
                future.set_exception(EpisodeFailed("the engine was closed"))
        if self._serving is not None:
            await self._serving
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def counters(self) -> dict[str, float]:
        """Return acceptance numbers of a draft since the last call; empty without one."""
        total = self.sampler.acceptance
        if total is None:
            return {}
        new, self._counted = total.since(self._counted), total.since(None)
        return new.metrics()

    def load(self) -> tuple[int, int]:
        """Return the numbers of requests that are drawn, and that wait for a row."""
        waiting = min(self.sampler.num_waiting, len(self._futures))
        return len(self._futures) - waiting, waiting

    def prefix_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens of all prompts so far, and of those that were not read
        again, since an earlier answer had read them."""
        return self.sampler.prefix_tokens()

    def _executor(self) -> ThreadPoolExecutor:
        """Return the thread in which the device works."""
        if self._thread is None and self._shared is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampler")
        thread = self._shared or self._thread
        assert thread is not None
        return thread

    async def _serve(self) -> None:
        """Draw chunks until there is no work."""
        thread, loop = self._executor(), asyncio.get_running_loop()
        while True:
            # Coroutines that just got an answer may add their next turn within a few rounds of the
            # event loop; a chunk started too early would leave them out.
            quiet, seen = 0, -1
            while quiet < PATIENCE:
                await asyncio.sleep(0)
                quiet = quiet + 1 if self._asked == seen else 0
                seen = self._asked
            if not self.sampler.busy:
                return
            try:
                ended = await loop.run_in_executor(thread, self.sampler.step)
            # The rows were donated to the failed call, so no request can continue.
            except BaseException as error:
                for future in self._futures.values():
                    if not future.done():
                        future.set_exception(error)
                self.sampler.drop_all()
                return
            for request in [started for started in self._unbegun if started.versions]:
                self._unbegun.pop(request)(request.versions[0])
            for request, watch in self._watched.items():
                if request.tokens and not request.aborted:
                    watch(request.completion)
            for request in ended:
                future = self._futures.pop(request, None)
                if future is not None and not future.done():
                    future.set_result(request.completion)


def draw_number(index: int, length: int) -> int:
    """Return 31 bits from an episode's number and its length so far, so that every turn has new
    noise."""
    return zlib.crc32(f"{index} {length}".encode()) & 0x7FFFFFFF
