"""The trainer's weights where and as the local sampler reads them.

trainer: float32, cut over fsdp, on all processes
   │  rollouts: cast or put in 8 bits, copied, whole on a mesh (data, tensor) of the devices that
   │            sample
   └  evaluation: as they are; of several processes, copies on the devices of process 0
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.attach import split_trained
from jaxtrain.adapters.spec import Adapter
from jaxtrain.adapters.storage import STORAGES, find_stored
from jaxtrain.core.bundle import ModelBundle, abstract_params
from jaxtrain.distributed.gather import gather_params
from jaxtrain.distributed.mesh import Device, is_main_process, make_mesh
from jaxtrain.generation.local.slots import unstack
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.kv_cache import Stored
from jaxtrain.layers.linear import Linear
from jaxtrain.models.parameters import Params, Rebuild


def sampling_devices(bundle: ModelBundle) -> list[Device]:
    """The trainer's devices that this process has."""
    process = jax.process_index()
    return [device for device in bundle.mesh.devices.flat if device.process_index == process]


def make_sampler_mesh(devices: list[Device], trainer: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Mesh of the sampler: tensor-parallel as the trainer is, its rows over all that remains.

    Sampling reads every weight for every token, so nothing else is cut.
    """
    tensor = trainer.shape["tensor"]
    return make_mesh(devices, tensor=tensor if len(devices) % tensor == 0 else 1, data=-1)


class Copier:
    """From the trainer's parameters to the sampler's model, on `mesh`.

    Kernels and embeddings come in the dtype in which their layer computes, which rounds them as
    the layer would; `weights` "int8" has the kernels of all Linears, those of experts among them,
    stored as `adapter.quantize` does, anew at each call. What is trained is always copied, because
    the next optimizer step donates it.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        mesh: jax.sharding.Mesh,
        weights: Literal["default", "int8"] = "default",
        cache: Stored = "default",
    ):
        """cache: how the model keeps keys and values."""
        sampled_bundle = bundle
        if weights != "default":
            adapter = bundle.adapter or Adapter({})
            assert adapter.quantize == "none", "the config refuses this"
            adapter = dataclasses.replace(adapter, quantize=weights)
            sampled_bundle = dataclasses.replace(bundle, adapter=adapter, product=None)
        shapes, self._rebuild = abstract_params(sampled_bundle, mesh)
        self._own, self.weights = sampled_bundle is not bundle, weights
        self.cache: Stored = cache
        self._stored = find_stored(shapes, weights) if self._own else set()
        self._places = {path: shape.sharding for path, shape in shapes.items()}
        dtypes = find_dtypes(self._rebuild(shapes))
        self._dtypes = {path: shape.dtype for path, shape in shapes.items()} | dtypes
        self._trained, _ = split_trained(shapes, bundle.adapter)
        self._several = jax.process_count() > 1
        self._rounding = functools.cache(self._make_rounding)

    def __call__(self, params: Params) -> Params:
        """The sampler's parameters, or of some of the trainer's some of them; {} on all processes
        but the first, which call it, too."""
        copies = {}
        for path, value in params.items():
            new = self._round(path, value)
            if self._several:
                copies |= gather_params(new, self._places)
            else:
                copies |= {name: jax.device_put(x, self._places[name]) for name, x in new.items()}
        return copies

    def build(self, copies: Params, rebuild: Rebuild) -> Any:
        """The sampler's model of its parameters; rebuild: that of the trainer's."""
        model = unstack((self._rebuild if self._own else rebuild)(copies))
        store_cache(model, self.cache)
        return model

    def _round(self, path: str, value: jax.Array) -> Params:
        """A parameter, or the parts that it is stored in, where the trainer has it or, as far as
        these are the same devices, where the sampler reads it."""
        stored = path in self._stored
        first = f"{path}.{STORAGES[self.weights].codes}" if stored else path
        moved = self._several or value.sharding.device_set != self._places[first].device_set
        if stored:
            return {f"{path}.{part}": x for part, x in self._rounding(path, moved)(value).items()}
        if value.dtype != self._dtypes[path] or (path in self._trained and not moved):
            value = self._rounding(path, moved)(value)
        return {path: value}

    def _make_rounding(self, path: str, moved: bool) -> Callable[[jax.Array], Any]:
        """One compiled function a parameter."""
        if path not in self._stored:
            out = None if moved else self._places[path]
            return jax.jit(lambda x: jnp.copy(x.astype(self._dtypes[path])), out_shardings=out)

        def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
            quantize_matrix = STORAGES[self.weights].quantize
            for _ in kernel.shape[:-2]:
                quantize_matrix = jax.vmap(quantize_matrix)
            return quantize_matrix(kernel)

        names = STORAGES[self.weights].shapes((1, 1))
        out = None if moved else {name: self._places[f"{path}.{name}"] for name in names}
        return jax.jit(quantize, out_shardings=out)


def find_dtypes(model: nnx.Module) -> dict[str, jnp.dtype]:
    """{path: dtype in which it is used} of parameters that may be rounded ahead of their use."""
    dtypes = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and node.rounds_kernel:
            dtypes[".".join(map(str, (*path, "kernel")))] = node.dtype
        elif isinstance(node, Embed):
            dtypes[".".join(map(str, (*path, "embedding")))] = node.dtype
    return dtypes


class EvaluationWeights:
    """Brings parameters to the devices that answer in an evaluation.

    One process answers on the trainer's mesh, without a copy. Of several, process 0 answers alone,
    on its own devices: all gather the parameters there.
    """

    def __init__(self, bundle: ModelBundle):
        self.copies = jax.process_count() > 1
        self.mesh, self.places = bundle.mesh, {}
        """Where process 0 samples."""
        if self.copies and is_main_process():
            self.mesh = make_mesh(jax.local_devices(), fsdp=-1)
            shapes, _ = abstract_params(dataclasses.replace(bundle, mesh=self.mesh))
            self.places = {path: shape.sharding for path, shape in shapes.items()}

    def __call__(self, params: Params) -> Params:
        """To be called by every process; {} on all but process 0."""
        return gather_params(params, self.places) if self.copies else params
