"""The turns of saved weights at one sampler, without a model."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest

from jaxtrain.adapters.slotted import NO_ADAPTER
from jaxtrain.generation.local.shared_base import MAX_LAYOUTS
from jaxtrain.training_api import samplers as samplers_module
from jaxtrain.training_api.samplers import Samplers
from jaxtrain.training_api.trainer import LoRASpec


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_weights_are_set_again_after_a_client_that_hung_up_meanwhile(thread):
    going, started = threading.Event(), threading.Event()
    engine = SimpleNamespace(sampler=SimpleNamespace(model="base"), model="base")

    def use(model, version):
        started.set()
        going.wait(10)
        engine.model = model

    engine.use = use
    samplers = Samplers(None, engine, thread)
    samplers._open = lambda path: f"model of {path}"

    async def hold(path):
        async with samplers.turn(path):
            return engine.model

    async def run():
        first = asyncio.ensure_future(hold("a"))
        await asyncio.to_thread(started.wait, 10)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        going.set()
        await asyncio.wrap_future(thread.submit(started.wait))  # the thread has gone on
        return [await hold(path) for path in (None, "b", "b", None)]

    assert asyncio.run(run()) == ["base", "model of b", "model of b", "base"]


def test_an_adapter_that_waits_for_a_slot_is_overtaken_by_none(thread):
    engine = SimpleNamespace(sampler=SimpleNamespace(model="base"), use=lambda *weights: None)
    samplers = Samplers(None, engine, thread)
    samplers.slots = SimpleNamespace(
        is_open=True, has_room=True, model="base", load=lambda *adapter: NO_ADAPTER
    )
    samplers.slots.free = lambda slot: setattr(samplers.slots, "has_room", True)
    roles = SimpleNamespace(bundle=SimpleNamespace(adapter=None))
    samplers._read = lambda path: (SimpleNamespace(roles=roles), None)
    samplers._has_slot = lambda path: True
    order, ends = [], {}

    def load(path, load=samplers._load):
        loaded = load(path)
        samplers.slots.has_room = False
        return loaded

    samplers._load = load

    async def hold(name):
        async with samplers.turn(name[0]):
            order.append(name)
            await ends.setdefault(name, asyncio.Event()).wait()

    async def run():
        tasks = []
        for name in ("a1", "a2", "b1", "a3"):
            tasks.append(asyncio.ensure_future(hold(name)))
            await asyncio.sleep(0.05)
        assert order == ["a1", "a2"]
        for name in ("a1", "a2", "b1"):
            ends[name].set()
            await asyncio.sleep(0.05)
        assert order == ["a1", "a2", "b1", "a3"]
        hung_up = asyncio.ensure_future(hold("c1"))
        await asyncio.sleep(0.05)
        hung_up.cancel()
        tasks.append(asyncio.ensure_future(hold("a4")))
        await asyncio.sleep(0.05)
        assert order[-1] == "a4", "the slot's own adapter goes on once nobody waits"
        ends["a3"].set(), ends["a4"].set()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_layouts_of_few_kinds_of_adapters_stay(thread, monkeypatch):
    laid_out = []

    def lay_out(build, params, frozen, base):
        laid_out.append(params)
        return SimpleNamespace(assemble=lambda params, frozen: params)

    monkeypatch.setattr(samplers_module, "lay_out", lay_out)
    engine = SimpleNamespace(sampler=SimpleNamespace(model="base"))
    samplers = Samplers(None, engine, thread)
    base = SimpleNamespace(mesh=jax.make_mesh((1,), ("data",)))
    roles = SimpleNamespace(rebuild=lambda trained: None, trained=None)
    for rank in (*range(1, 31), 30, 1):
        kind = SimpleNamespace(base=base, roles=roles, lora=LoRASpec(rank), frozen=None)
        samplers.keep(str(rank), kind, rank)
        assert samplers._open(str(rank)) == rank
    assert laid_out == [*range(1, 31), 1]
    assert len(samplers._layouts.by_kind) == MAX_LAYOUTS


def test_weights_that_take_the_name_of_deleted_ones_are_set(thread):
    engine = SimpleNamespace(sampler=SimpleNamespace(model="base"))
    engine.use = lambda model, version: setattr(engine, "model", model)
    samplers = Samplers(None, engine, thread)
    samplers._open = lambda path: samplers._cache[path][1]

    async def run():
        sampled = []
        for params in ("earlier", "earlier", "later"):
            if params not in sampled:
                thread.submit(samplers.keep, "a", None, params).result()
            async with samplers.turn("a"):
                sampled.append(engine.model)
        return sampled

    assert asyncio.run(run()) == ["earlier", "earlier", "later"]
