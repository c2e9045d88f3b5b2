"""Samples from any saved weights by one engine, which holds the weights of one model at a time.

    base, and adapters in its slots ── drawn together ──┐
    all weights of another model ───────────────────────┴── take turns

Requests for what it holds are drawn together; those for others wait until it is idle. They take
turns in the order in which they came, so no weights wait forever. Adapters that have no slot take
turns, too.
"""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.adapters.slotted import AdapterSlot
from jaxtrain.generation.engine import Completion, Likely
from jaxtrain.generation.local.adapter_slots import AdapterEngine, AdapterSlots
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.shared_base import LayoutCache, lay_out
from jaxtrain.generation.local.slots import unstack
from jaxtrain.training_api.trainer import ModelKind
from jaxtrain.training_api.weights_store import WeightsStore

CACHE_SIZE = 4
"""Sets of weights that stay in memory after they were saved or read, and adapters that are drawn
with at once."""
UNKNOWN = "?"
"""No path: the engine's weights while they are replaced."""


@dataclass
class LoadedAdapter:
    """Adapter in a slot."""

    slot: AdapterSlot
    users: int = 0
    """Requests that are drawn with it; changed by the event loop alone."""


class Samplers:
    """Engine, and the weights that it may hold."""

    def __init__(self, store: WeightsStore, engine: LocalEngine, thread: ThreadPoolExecutor):
        """engine: with the weights of the base. thread: the one that launches device work."""
        self.store, self.engine, self.thread = store, engine, thread
        self.current: str | None = None
        """Path of the weights that the engine holds; None: the base with its slots; UNKNOWN."""
        self._base = engine.sampler.model
        self.slots = AdapterSlots(engine.sampler, CACHE_SIZE)
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        """Adapters in slots by path; that of the last request comes last."""
        self._stale: list[LoadedAdapter] = []
        """Those whose path has other weights now; the device's thread frees their slots."""
        self._cache: OrderedDict[str, tuple[ModelKind, Any]] = OrderedDict()
        self._layouts = LayoutCache()
        self._waiting: deque[tuple[int, str | None]] = deque()
        self._tickets, self._versions = itertools.count(), itertools.count(1)
        self._running = 0
        self._unslotted: tuple[int, str | None] | None = None
        """Ticket that waits for a slot; those behind it wait, or it might wait forever."""
        self._free = asyncio.Condition()

    def keep(self, path: str, kind: ModelKind, params: Any) -> None:
        """Keep the weights of a path in memory; called by the device's thread."""
        if path == self.current:  # other weights had this name until they were deleted
            self.current = UNKNOWN
        if path in self._loaded:
            self._stale.append(self._loaded.pop(path))
        self._cache[path] = (kind, params)
        self._cache.move_to_end(path)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)

    @asynccontextmanager
    async def turn(self, path: str | None) -> AsyncIterator[LocalEngine | AdapterEngine]:
        """Hold the engine with these weights. UserError for weights that do not exist."""
        loop = asyncio.get_running_loop()
        name = path if self.slots.is_open else None
        if name is not None and name not in self._loaded:
            has_slot = await loop.run_in_executor(self.thread, self._has_slot, name)
            name = name if has_slot else None
        adapter, weights = None, path if name is None else None
        ticket = next(self._tickets), weights
        async with self._free:
            self._waiting.append(ticket)
            try:
                await self._free.wait_for(lambda: self._may_start(ticket))
                if weights != self.current:
                    # A client that hangs up cancels the wait but not the thread: the next turn must
                    # set its weights again.
                    self.current = UNKNOWN
                    await loop.run_in_executor(self.thread, self._use, weights)
                while name is not None and adapter is None:
                    adapter = await loop.run_in_executor(self.thread, self._load, name)
                    if adapter is None:  # requests are drawn with every slot
                        self._unslotted = ticket
                        await self._free.wait()
                self._running += 1
                if adapter is not None:
                    adapter.users += 1
            finally:
                if self._unslotted == ticket:
                    self._unslotted = None
                self._waiting.remove(ticket)
                self._free.notify_all()
        try:
            engine = self.engine
            yield engine if adapter is None else AdapterEngine(engine, self.slots, adapter.slot)
        finally:
            async with self._free:
                self._running -= 1
                if adapter is not None:
                    adapter.users -= 1
                self._free.notify_all()

    def _may_start(self, ticket: tuple[int, str | None]) -> bool:
        if self._unslotted is not None:
            return False
        if not self._running:
            return self._waiting[0] == ticket
        before = itertools.takewhile(lambda waiting: waiting != ticket, self._waiting)
        return ticket[1] == self.current and all(path == self.current for _, path in before)

    def _use(self, path: str | None) -> None:
        model = self.slots.model if path is None else self._open(path)
        self.engine.use(model, next(self._versions))
        # Here and not in the event loop: `keep` of this thread may replace the weights next.
        self.current = path

    def _read(self, path: str) -> tuple[ModelKind, Any]:
        """Return the kind and the parameters of a path."""
        if path not in self._cache:
            saved = self.store.find(path, "sampler_weights", "model_path")
            kind = self.store.base.kind(saved.lora)
            self.keep(path, kind, self.store.read_params(saved.folder, kind))
        return self._cache[path]

    def _has_slot(self, path: str) -> bool:
        """Return True if a path holds an adapter that has a form for slots."""
        kind, params = self._read(path)
        adapter = kind.roles.bundle.adapter
        return adapter is not None and self.slots.takes(adapter, params)

    def _load(self, path: str) -> LoadedAdapter | None:
        """Return the adapter of a path in a slot, perhaps that of one that nobody draws with; None
        if there is no such slot."""
        if path in self._loaded:
            self._loaded.move_to_end(path)
            return self._loaded[path]
        for loaded in [loaded for loaded in self._stale if not loaded.users]:
            self._stale.remove(loaded)
            self.slots.free(loaded.slot)
        idle = [key for key, loaded in self._loaded.items() if not loaded.users]
        if idle and not self.slots.has_room:
            self.slots.free(self._loaded.pop(idle[0]).slot)
        if not self.slots.has_room:
            return None
        kind, params = self._read(path)
        slot = self.slots.load(kind.roles.bundle.adapter, params)
        assert slot is not None, "_has_slot has seen these weights"
        loaded = self._loaded[path] = LoadedAdapter(slot)
        return loaded

    def _open(self, path: str) -> Any:
        """Return the sampler's model of a path."""
        kind, params = self._read(path)
        with jax.set_mesh(kind.base.mesh):
            build = kind.roles.rebuild(kind.roles.trained)
            if not kind.lora.rank:
                return unstack(build(params))
            layout = self._layouts.get(
                kind.lora, lambda: lay_out(build, params, kind.frozen, self._base)
            )
            return layout.assemble(params, kind.frozen)


class PathEngine:
    """Engine with the weights of one path, for `serving.Answerer`."""

    def __init__(self, samplers: Samplers, path: str):
        self.samplers, self.path = samplers, path

    async def generate(self, *args: Any, **options: Any) -> Completion:
        """Continue a prompt in this path's turn; see LocalEngine.generate."""
        async with self.samplers.turn(self.path) as engine:
            return await engine.generate(*args, **options)

    @property
    def reports_likely(self) -> bool:
        """True if the most probable tokens of a place can be had."""
        return self.samplers.engine.reports_likely

    async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[Likely]]:
        """Return the log-probs of a text; see LocalEngine.score."""
        async with self.samplers.turn(self.path) as engine:
            return await engine.score(tokens)

    def prefix_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens of prompts; see LocalEngine.prefix_tokens."""
        return self.samplers.engine.prefix_tokens()

    def load(self) -> tuple[int, int]:
        """Return the numbers of requests that are drawn, and that wait for a row."""
        return self.samplers.engine.load()
