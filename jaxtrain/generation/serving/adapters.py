"""Adapters by name beside their base, and vLLM's routes that load and unload them.

base ──┬── with adapters in slots ── its engine: rows of all of them in one batch ──┐
       └── with another adapter ──── an engine of its own ── one thread: chunks ────┘ alternate
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from aiohttp import web

from jaxtrain.adapters.peft import read_adapter
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, split_trained, start_adapter
from jaxtrain.environments.endpoint_app import Route, read_json
from jaxtrain.environments.request_fields import RequestRefused, refuse
from jaxtrain.errors import UserError
from jaxtrain.generation.local.adapter_slots import AdapterEngine, AdapterSlots
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.shared_base import LayoutCache, lay_out
from jaxtrain.generation.serving.answerer import Answerer, ServedModel
from jaxtrain.models.parameters import Params
from jaxtrain.text_safety import show

MAX_TEXT = 4096
"""Characters of a name or a path in a request."""
DTYPE = "float32"
"""Dtype of an adapter's matrices, as where its PEFT folder is opened as a model."""


class AdapterLoader:
    """Opens PEFT folders as models beside their base."""

    def __init__(
        self,
        bundle: ModelBundle,
        params: Params,
        engine: LocalEngine,
        slots: AdapterSlots,
        open_engine: Callable[[Any], LocalEngine],
    ):
        """bundle, params: of the base. engine: of the base. slots: of its sampler. open_engine:
        opens an engine that draws from a model. UserError for a base that is an adapter itself."""
        if bundle.adapter is not None:
            raise UserError(
                "adapters are served beside a whole model, and this one is an adapter itself; name"
                " its base as MODEL and the adapter with --lora NAME=FOLDER"
            )
        self.bundle, self.params, self.engine, self.slots = bundle, params, engine, slots
        self.open_engine, self.base_model = open_engine, engine.sampler.model
        self._layouts = LayoutCache()

    def load(self, name: str, folder: str, parent: str) -> ServedModel:
        """Return an adapter as a model; UserError for a folder that is no adapter of the base."""
        architecture = self.bundle.architecture
        adapter = dataclasses.replace(read_adapter(folder, architecture, DTYPE), dropout=0.0)
        bundle = dataclasses.replace(self.bundle, adapter=adapter)
        shapes, build = abstract_params(bundle)
        trained_shapes, frozen_shapes = split_trained(shapes, adapter)
        trained = start_adapter(bundle, trained_shapes, self.params, 0)
        if (slot := self.slots.load(adapter, trained)) is not None:
            engine = AdapterEngine(self.engine, self.slots, slot)
            return ServedModel(name, engine, "step-0", folder, parent)
        frozen = {path: self.params[path] for path in frozen_shapes}
        kind = (frozenset(adapter.slots.items()), adapter.full, repr(sorted(adapter.rows.items())))
        with jax.set_mesh(self.bundle.mesh):
            layout = self._layouts.get(
                kind, lambda: lay_out(build, trained, frozen, self.base_model, adapter.full)
            )
            model = layout.assemble(trained, frozen)
        return ServedModel(name, self.open_engine(model), "step-0", folder, parent)


class AdapterRoutes:
    """vLLM's routes by which requests load and unload adapters."""

    def __init__(
        self,
        answerer: Answerer,
        loader: AdapterLoader,
        thread: ThreadPoolExecutor,
        max_adapters: int,
    ):
        """thread: launches the device's work. max_adapters: adapters that are loaded at once."""
        self.answerer, self.loader, self.thread = answerer, loader, thread
        self.max_adapters = max_adapters
        self._base = next(iter(answerer.models))
        self._loading = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("POST", "/v1/load_lora_adapter", self._load),
            Route("POST", "/v1/unload_lora_adapter", self._unload),
        ]

    async def _load(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        name, folder = read_text(body, "lora_name"), read_text(body, "lora_path")
        if not name.isprintable():
            raise RequestRefused(400, f"lora_name {show(name, 60)} must be printable", "lora_name")
        async with self._loading:
            models = self.answerer.models
            loaded = [model for model in models.values() if model.parent]
            if name in models and not (body.get("load_inplace") and models[name].parent):
                raise RequestRefused(
                    400,
                    f"lora_name {show(name, 60)} is loaded already; unload it first, or set"
                    " load_inplace",
                    "lora_name",
                )
            if name not in models and len(loaded) >= self.max_adapters:
                refuse(
                    f"{self.max_adapters} adapters are loaded already, the most that --max-loras"
                    " allows"
                )
            work = self.loader.load, name, folder, self._base
            try:
                model = await asyncio.get_running_loop().run_in_executor(self.thread, *work)
            except UserError as error:
                raise RequestRefused(400, f"lora_path: {error}", "lora_path") from None
            old = models.get(name)
            models[name] = model
        if old is not None:
            self.answerer.unload(old)
            close_when_idle(old)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = read_text(await read_json(request), "lora_name")
        model = self.answerer.models.get(name)
        if model is None or model.parent is None:
            raise RequestRefused(404, f"lora_name {show(name, 60)} is not loaded", "lora_name")
        del self.answerer.models[name]
        self.answerer.unload(model)
        close_when_idle(model)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def close_when_idle(model: ServedModel) -> None:
    """Free an adapter's slot, or close its engine, after the answers that it is drawing."""
    engine: Any = model.engine
    model.replace(lambda: asyncio.ensure_future(engine.close()), "unloaded")


def read_text(body: Mapping[str, Any], field: str) -> str:
    """Return a field that holds a text; RequestRefused for any other value."""
    value = body.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise RequestRefused(
            400,
            f"{field} must be a text of 1 to {MAX_TEXT} characters, found {show(value, 60)}",
            field,
        )
    return value
