"""The trainer's weights as the local sampler wants them: rounded once, whole, on its own mesh.

    trainer: float32, cut over fsdp ... ──cast, copy, place──> sampler: compute dtype, (data, tensor)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.attach import split_trained
from jaxtrain.assemble import Parts, abstract_params
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.linear import Linear
from jaxtrain.parallel.mesh import make_mesh
from jaxtrain.parameters import Params


def make_sampler_mesh(devices: list[jax.Device], trainer: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Mesh of the sampler: tensor-parallel as the trainer is, its rows over all that remains.

    Sampling reads every weight for every token, so nothing else is cut.
    """
    tensor = trainer.shape["tensor"]
    return make_mesh(devices, tensor=tensor if len(devices) % tensor == 0 else 1, data=-1)


def make_copier(parts: Parts, mesh: jax.sharding.Mesh) -> Callable[[Params], Params]:
    """A function from the trainer's parameters to the sampler's, on `mesh`.

    Kernels and embeddings come in the dtype in which their layer computes, which rounds them as
    the layer would. What is trained is always copied, because the next optimizer step donates it.
    """
    shapes, rebuild = abstract_params(parts, mesh)
    dtypes = {path: shape.dtype for path, shape in shapes.items()} | find_dtypes(rebuild(shapes))
    trained, _ = split_trained(shapes, parts.adapter)

    def copy_one(path: str, value: jax.Array) -> jax.Array:
        place, dtype = shapes[path].sharding, dtypes[path]
        moves = value.sharding.device_set != place.device_set
        if value.dtype != dtype or (path in trained and not moves):
            out = None if moves else place
            value = jax.jit(lambda x: jnp.copy(x.astype(dtype)), out_shardings=out)(value)
        return jax.device_put(value, place)

    return lambda params: {path: copy_one(path, value) for path, value in params.items()}


def find_dtypes(model: nnx.Module) -> dict[str, jnp.dtype]:
    """{path: dtype in which it is used} of the parameters that may be rounded ahead of their use."""
    found = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Linear) and node.rounds_kernel:
            found[".".join(map(str, (*path, "kernel")))] = node.dtype
        elif isinstance(node, Embed):
            found[".".join(map(str, (*path, "embedding")))] = node.dtype
    return found
