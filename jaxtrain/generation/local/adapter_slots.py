"""Adapters in slots of a sampler's model, so that rows of all of them are drawn in one batch.

    adapter ── load ──> a free slot of each of its matrices ──> requests name the slot
                             │
    larger rank, other matrices: slots grow, which compiles the sampler's programs anew

A slot is written while others are drawn with. Adapters that have no slot (DoRA, experts, tables)
are models of their own: shared_base.py.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxtrain.adapters.slotted import AdapterSlot, SlottedLoRA
from jaxtrain.adapters.spec import Adapter, LoRASpec
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.distributed.sharding import state_program
from jaxtrain.generation.engine import Completion, Likely, Sampling
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.requests import Requests
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.layers.linear import ExpertLinear, Linear
from jaxtrain.layers.mixer import Mixer
from jaxtrain.layers.mla import LatentAttention
from jaxtrain.layers.mlp import MLP
from jaxtrain.models.parameters import Params, Rebuild, split_model

MIN_RANK = 8
"""Slots have at least this rank, so that few adapters make them grow."""


class Factors(NamedTuple):
    """Correction of one matrix: s (x A) B."""

    a: Any
    """[in, R]."""
    b: Any
    """[R, out]."""
    scale: Any
    """[]."""


class AdapterSlots:
    """Slots for adapters of one base; `load` runs in the thread that draws, or before it draws."""

    def __init__(self, sampler: Requests, count: int):
        """sampler: with the weights of the base. count: adapters that are loaded at once."""
        self.sampler, self.count = sampler, count
        self.model = sampler.model
        """The base with what the slots hold."""
        self._free = list(range(1, count + 1))
        self._numbers = itertools.count(1)
        self._base: Any = self.model
        self._nodes: dict[str, Any] = {}
        """Modules of the base by path; none where rows have no slots."""
        if isinstance(sampler, LocalSampler) and self.model.exact is None:
            self._nodes = name_nodes(self.model)
        self._slots: dict[str, Factors] = {}
        """Of all slots: a [in, S, R], b [S, R, out], scale [S]; by the path of their Linear."""
        self._rebuild: Rebuild | None = None
        """Builds the model of the slots' arrays."""

    @property
    def is_open(self) -> bool:
        """True if any adapter has a form for slots."""
        return bool(self._nodes)

    @property
    def has_room(self) -> bool:
        """True if a slot is free."""
        return bool(self._free)

    def takes(self, adapter: Adapter, trained: Params) -> bool:
        """Return True if an adapter has a form for slots. trained: what it trains."""
        return self._read_factors(adapter, trained) is not None

    def load(self, adapter: Adapter, trained: Params) -> AdapterSlot | None:
        """Write an adapter to a free slot, and return it; None if it has no form for one, or none
        is free. trained: what the adapter trains."""
        new = self._read_factors(adapter, trained)
        if new is None or not self._free:
            return None
        # Removed once it is written: where memory runs out, the slot stays free.
        index = self._free[0]
        with self.sampler.on_mesh():
            self._grow(new)
            padded = {path: pad_factors(new.get(path), all_) for path, all_ in self._slots.items()}
            self._slots = write_slot(self._slots, np.int32(index - 1), padded)
        parts = {
            f"{path}.adapter.{part}": value
            for path, all_ in self._slots.items()
            for part, value in all_._asdict().items()
        }
        assert self._rebuild is not None, "the slots have grown"
        self.model = self._rebuild(parts)
        self._free.remove(index)
        self.sampler.renew(self.model)
        return AdapterSlot(index, next(self._numbers))

    def free(self, slot: AdapterSlot) -> None:
        """Return a slot that no request is drawn with to those for other adapters."""
        self._free.append(slot.index)

    def _read_factors(self, adapter: Adapter, trained: Params) -> dict[str, Factors] | None:
        """Return the factors of an adapter by the paths of its Linears, as these use them; None if
        it has no form for a slot."""
        new: dict[str, Factors] = {}
        if adapter.full or adapter.rows or not (adapter.slots and self._nodes):
            return None
        for path, spec in adapter.slots.items():
            names = self._find_linears(path, spec)
            if names is None:
                return None
            a, b = (np.asarray(trained[f"{path}.adapter.{part}"]) for part in "ab")
            for row, name in enumerate(names):
                dtype = self._nodes[name].dtype
                new[name] = Factors(
                    a[row].astype(dtype), b[row].astype(dtype), np.float32(spec.scale)
                )
        # What other rows get of this slot is multiplied by 0, which an infinity would survive.
        values = (x.astype(np.float32) for factors in new.values() for x in factors)
        return new if all(np.isfinite(x).all() for x in values) else None

    def _find_linears(self, path: str, spec: LoRASpec) -> list[str] | None:
        """Return the paths of a matrix in the layers that have it, one by one; None if one of them
        is no Linear that reads every token of its rows."""
        root, _, inner = path.partition(".")
        kind, _, inner = inner.partition(".")
        if root != "stack" or spec.dora:
            return None
        layers = [i for i, layer in enumerate(self.model.stack.specs) if layer.kind == kind]
        chosen = layers if spec.layers is None else [layers[index] for index in spec.layers]
        names = [f"stack.layers.{layer}.{inner}" for layer in chosen]
        return names if names and all(map(self._has_slots, names)) else None

    def _has_slots(self, name: str) -> bool:
        linear = self._nodes.get(name)
        layer = self._nodes.get(name.rpartition(".")[0])
        plain = isinstance(linear, Linear) and not isinstance(linear, ExpertLinear)
        # Latent attention multiplies by parts of its matrices, the same for all rows.
        return plain and isinstance(layer, Mixer | MLP) and not isinstance(layer, LatentAttention)

    def _grow(self, new: Mapping[str, Factors]) -> None:
        """Make room for the matrices and the ranks of an adapter."""
        ranks = [MIN_RANK, *(len(factors.b) for factors in new.values())]
        ranks += [all_.a.shape[-1] for all_ in self._slots.values()]
        S, R = self.count, max(ranks)
        if new.keys() <= self._slots.keys() and R == max(ranks[len(new) + 1 :]):
            return
        params, copy = split_model(self._base)
        model: Any = copy(params)
        nodes, slots = name_nodes(model), {}
        for path in {**self._slots, **new}:
            shape = new[path] if path in new else self._slots[path]
            D, F, dtype = shape.a.shape[0], shape.b.shape[-1], shape.a.dtype
            grown = Factors(
                np.zeros((D, S, R), dtype), np.zeros((S, R, F), dtype), np.zeros(S, np.float32)
            )
            if path in self._slots:
                for x, old in zip(grown, self._slots[path], strict=True):
                    x[tuple(map(slice, old.shape))] = np.asarray(old)
            slots[path] = place_slots(grown)
            nodes[path].adapter = SlottedLoRA(*slots[path])
        self._slots, rebuild = slots, split_model(model)[1]
        self._rebuild = lambda parts: rebuild({**params, **parts})


def name_nodes(model: Any) -> dict[str, Any]:
    """Return the modules of a model by path."""
    return {".".join(map(str, path)): node for path, node in nnx.iter_graph(model)}


def pad_factors(factors: Factors | None, slots: Factors) -> Factors:
    """Return the factors of a matrix in the size of its slots; None: factors of zero."""
    (D, _, R), F = slots.a.shape, slots.b.shape[-1]
    padded = Factors(
        np.zeros((D, R), slots.a.dtype), np.zeros((R, F), slots.b.dtype), np.zeros((), np.float32)
    )
    if factors is not None:
        for x, value in zip(padded, factors, strict=True):
            x[tuple(map(slice, np.shape(value)))] = value
    return padded


@state_program()
def place_slots(slots: Any) -> Any:
    """Return the slots on the devices, in the sharding that `write_slot` returns."""
    return slots


@state_program()
def write_slot(slots: dict[str, Factors], index: jax.Array, new: dict[str, Factors]) -> Any:
    """Return the slots with one of them, int32 [], replaced."""
    return {
        path: Factors(
            all_.a.at[:, index].set(new[path].a),
            all_.b.at[index].set(new[path].b),
            all_.scale.at[index].set(new[path].scale),
        )
        for path, all_ in slots.items()
    }


class AdapterEngine:
    """An engine whose requests are drawn with the adapter of a slot, in one batch with all others
    of the engine."""

    def __init__(self, engine: LocalEngine, slots: AdapterSlots, slot: AdapterSlot):
        self.engine, self.slots, self.slot = engine, slots, slot

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
        """Continue a prompt; see LocalEngine.generate."""
        request = self.engine.open_request(prompt, sampling, stop_ids, index, images)
        request.adapter = self.slot
        return await self.engine.answer(request, likely, watch)

    @property
    def reports_likely(self) -> bool:
        """True if the most probable tokens of a place can be had."""
        return self.engine.reports_likely

    async def score(
        self, tokens: Sequence[int], images: PlacedImages | None = None
    ) -> tuple[list[float], list[Likely]]:
        """Return the log-probs of a text; see LocalEngine.score."""
        return await self.engine.score(tokens, images, self.slot)

    def load(self) -> tuple[int, int]:
        """Return no numbers: the engine counts the requests of all its adapters."""
        return 0, 0

    def prefix_tokens(self) -> tuple[int, int]:
        """Return no numbers: the engine counts the tokens of all its adapters."""
        return 0, 0

    async def close(self) -> None:
        """Free the slot, once no request is drawn with it."""
        self.slots.free(self.slot)
