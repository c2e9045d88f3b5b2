"""The trainer's weights where and as the local sampler reads them.

trainer: float32, cut over fsdp, on all processes
   │  rollouts: cast, copied, whole on a mesh (data, tensor) of the devices that sample
   └  evaluation: as they are; of several processes, copies on the devices of process 0
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.attach import split_trained
from jaxtrain.core.assemble import Parts, abstract_params
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.linear import Linear
from jaxtrain.models.parameters import Params
from jaxtrain.parallel.gather import gather_params
from jaxtrain.parallel.mesh import Device, is_main_process, make_mesh


def sampling_devices(parts: Parts) -> list[Device]:
    """The trainer's devices that this process has."""
    here = jax.process_index()
    return [device for device in parts.mesh.devices.flat if device.process_index == here]


def make_sampler_mesh(devices: list[Device], trainer: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Mesh of the sampler: tensor-parallel as the trainer is, its rows over all that remains.

    Sampling reads every weight for every token, so nothing else is cut.
    """
    tensor = trainer.shape["tensor"]
    return make_mesh(devices, tensor=tensor if len(devices) % tensor == 0 else 1, data=-1)


def make_copier(parts: Parts, mesh: jax.sharding.Mesh) -> Callable[[Params], Params]:
    """A function from the trainer's parameters to the sampler's, on `mesh`; {} on all processes
    but the first, which call it, too.

    Kernels and embeddings come in the dtype in which their layer computes, which rounds them as
    the layer would. What is trained is always copied, because the next optimizer step donates it.
    """
    shapes, rebuild = abstract_params(parts, mesh)
    places = {path: shape.sharding for path, shape in shapes.items()}
    dtypes = {path: shape.dtype for path, shape in shapes.items()} | find_dtypes(rebuild(shapes))
    trained, _ = split_trained(shapes, parts.adapter)
    several = jax.process_count() > 1

    def moves(value: jax.Array, path: str) -> bool:
        return several or value.sharding.device_set != places[path].device_set

    @functools.cache
    def rounding(path: str, moved: bool):
        """One compiled function a parameter."""
        out = None if moved else places[path]
        return jax.jit(lambda x: jnp.copy(x.astype(dtypes[path])), out_shardings=out)

    def copy(params: Params) -> Params:
        found = {}
        for path, value in params.items():
            moved = moves(value, path)
            if value.dtype != dtypes[path] or (path in trained and not moved):
                value = rounding(path, moved)(value)
            if several:
                found |= gather_params({path: value}, places)
            else:
                found[path] = jax.device_put(value, places[path])
        return found

    return copy


def find_dtypes(model: nnx.Module) -> dict[str, jnp.dtype]:
    """{path: dtype in which it is used} of parameters that may be rounded ahead of their use."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and node.rounds_kernel:
            found[".".join(map(str, (*path, "kernel")))] = node.dtype
        elif isinstance(node, Embed):
            found[".".join(map(str, (*path, "embedding")))] = node.dtype
    return found


class EvaluationWeights:
    """Brings parameters to the devices that answer in an evaluation.

    One process answers on the trainer's mesh, without a copy. Of several, process 0 answers alone,
    on its own devices: all gather the parameters there.
    """

    def __init__(self, parts: Parts):
        self.copies = jax.process_count() > 1
        self.mesh, self.places = parts.mesh, {}
        """Where process 0 samples."""
        if self.copies and is_main_process():
            self.mesh = make_mesh(jax.local_devices(), fsdp=-1)
            shapes, _ = abstract_params(dataclasses.replace(parts, mesh=self.mesh))
            self.places = {path: shape.sharding for path, shape in shapes.items()}

    def __call__(self, params: Params) -> Params:
        """To be called by every process; {} on all but process 0."""
        return gather_params(params, self.places) if self.copies else params
