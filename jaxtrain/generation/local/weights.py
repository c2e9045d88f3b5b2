"""Copies of the trainer's weights in the layout that the local sampler reads.

trainer: float32, sharded over fsdp, on all processes
   │  rollouts: cast or quantized to 8 bits, copied, whole on a mesh (data, tensor) of the devices
   │            that sample
   └  evaluation: unchanged; with several processes, copies on the devices of process 0
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.spec import Adapter
from jaxtrain.adapters.storage import STORAGES, find_stored
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params, split_trained
from jaxtrain.distributed.gather import gather_params
from jaxtrain.distributed.mesh import Device, is_main_process, make_mesh
from jaxtrain.generation.local.slots import unstack
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.kv_cache import Stored
from jaxtrain.layers.linear import Linear
from jaxtrain.models.parameters import Params, Rebuild


def sampling_devices(bundle: ModelBundle) -> list[Device]:
    """Return the trainer's devices that belong to this process."""
    process = jax.process_index()
    return [device for device in bundle.mesh.devices.flat if device.process_index == process]


def make_sampler_mesh(devices: list[Device], trainer: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return the sampler's mesh: tensor-parallel like the trainer's, the rest of the devices split
    its rows.

    Sampling reads every weight for every token, so nothing else is sharded.
    """
    tensor = trainer.shape["tensor"]
    return make_mesh(devices, tensor=tensor if len(devices) % tensor == 0 else 1, data=-1)


class Copier:
    """Converts the trainer's parameters to the sampler's model, on `mesh`.

    Kernels and embeddings get the dtype in which their layer computes, which rounds them as the
    layer would; `weights` "int8" stores the kernels of all Linears, experts included, as
    `adapter.quantize` does, anew at each call. Trained parameters are always copied, because the
    next optimizer step donates them.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        mesh: jax.sharding.Mesh,
        weights: Literal["default", "int8"] = "default",
        cache: Stored = "default",
    ):
        """cache: how the model stores keys and values."""
        sampled_bundle = bundle
        if weights != "default":
            adapter = bundle.adapter or Adapter({})
            assert adapter.quantize == "none", "the config refuses this"
            adapter = dataclasses.replace(adapter, quantize=weights)
            sampled_bundle = dataclasses.replace(bundle, adapter=adapter, product=None)
        # The sampler's own layout: of the trainer's only the shapes are needed, and no memory.
        shapes, self._rebuild = abstract_params(sampled_bundle, mesh)
        self._own_layout, self.weights = sampled_bundle is not bundle, weights
        self.cache: Stored = cache
        self._stored = find_stored(shapes, weights) if self._own_layout else set()
        self._shardings = {path: shape.sharding for path, shape in shapes.items()}
        dtypes = find_dtypes(self._rebuild(shapes))
        self._dtypes = {path: shape.dtype for path, shape in shapes.items()} | dtypes
        self._trained, _ = split_trained(shapes, bundle.adapter)
        self._multiprocess = jax.process_count() > 1
        self._rounding = functools.cache(self._make_rounding)

    def __call__(self, params: Params) -> Params:
        """Return the sampler's parameters for all, or some, of the trainer's.

        Every process must call it; returns {} on all but the first.
        """
        copies = {}
        for path, value in params.items():
            new = self._round(path, value)
            if self._multiprocess:
                # Parameter by parameter, so that no more than one is held twice.
                copies |= gather_params(new, self._shardings)
            else:
                copies |= {
                    name: jax.device_put(x, self._shardings[name]) for name, x in new.items()
                }
        return copies

    def build(self, copies: Params, rebuild: Rebuild) -> Any:
        """Return the sampler's model of its parameters. rebuild: that of the trainer's."""
        model = unstack((self._rebuild if self._own_layout else rebuild)(copies))
        store_cache(model, self.cache)
        return model

    def _round(self, path: str, value: jax.Array) -> Params:
        """Return a parameter, or the arrays that store it, on the trainer's devices or, if they are
        the same, already in the sampler's layout."""
        stored = path in self._stored
        first = f"{path}.{STORAGES[self.weights].codes}" if stored else path
        # A compiled function cannot change devices: it then leaves the result where the trainer has
        # it, and device_put, or the gathering, moves it.
        moved = self._multiprocess or value.sharding.device_set != self._shardings[first].device_set
        if stored:
            return {f"{path}.{part}": x for part, x in self._rounding(path, moved)(value).items()}
        # A trained parameter that stays on its devices must be copied even if nothing changes:
        # device_put would return the trainer's own array, which the next step donates. A frozen one
        # is shared with the trainer.
        if value.dtype != self._dtypes[path] or (path in self._trained and not moved):
            value = self._rounding(path, moved)(value)
        return {path: value}

    def _make_rounding(self, path: str, moved: bool) -> Callable[[jax.Array], Any]:
        """Compile one function per parameter."""
        if path not in self._stored:
            out = None if moved else self._shardings[path]
            return jax.jit(lambda x: jnp.copy(x.astype(self._dtypes[path])), out_shardings=out)

        def quantize(kernel: jax.Array) -> dict[str, jax.Array]:
            # Quantization is defined for one matrix; leading axes are layers and experts.
            quantize_matrix = STORAGES[self.weights].quantize
            for _ in kernel.shape[:-2]:
                quantize_matrix = jax.vmap(quantize_matrix)
            return quantize_matrix(kernel)

        names = STORAGES[self.weights].shapes((1, 1))
        out = None if moved else {name: self._shardings[f"{path}.{name}"] for name in names}
        return jax.jit(quantize, out_shardings=out)


def find_dtypes(model: nnx.Module) -> dict[str, jnp.dtype]:
    """Return {path: dtype in which it is used} of parameters that may be rounded in advance."""
    dtypes = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and node.rounds_kernel:
            dtypes[".".join(map(str, (*path, "kernel")))] = node.dtype
        elif isinstance(node, Embed):
            dtypes[".".join(map(str, (*path, "embedding")))] = node.dtype
    return dtypes


class EvaluationWeights:
    """Brings parameters to the devices that answer in an evaluation.

    A single process answers on the trainer's mesh, without a copy. Of several, process 0 answers
    alone, on its own devices, and all take part in gathering the parameters there.
    """

    def __init__(self, bundle: ModelBundle):
        self.copies = jax.process_count() > 1
        self.mesh, self.shardings = bundle.mesh, {}
        """Mesh and shardings on which process 0 samples."""
        if self.copies and is_main_process():
            # Sharded, as the whole model may not fit into one device.
            self.mesh = make_mesh(jax.local_devices(), fsdp=-1)
            shapes, _ = abstract_params(dataclasses.replace(bundle, mesh=self.mesh))
            self.shardings = {path: shape.sharding for path, shape in shapes.items()}

    def __call__(self, params: Params) -> Params:
        """Return the parameters; called by every process, {} on all but process 0."""
        return gather_params(params, self.shardings) if self.copies else params
