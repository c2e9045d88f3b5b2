"""How frozen kernels are stored: in fewer bits, quantised as they are loaded."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.int8 import Int8, dequantise_int8, int8_shapes, quantise_int8
from jaxtrain.adapters.nf4 import BLOCK, NF4, dequantise_nf4, nf4_shapes, quantise_nf4
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import ExpertLinear, Linear, PreciseLinear
from jaxtrain.models.parameters import Params, Shapes


class Storage(NamedTuple):
    """A kind of storage; its parts lie at `<path of the kernel>.<part>`."""

    module: Callable[..., nnx.Module]
    """(parts, axes of the kernel) -> what sits in Linear.kernel."""
    shapes: Callable[..., dict]
    """Shape of a kernel [..., in, out] -> shapes of its parts."""
    quantise: Callable[..., dict]
    """Kernel [in, out] -> parts."""
    dequantise: Callable[..., jax.Array]
    """(parts, dtype) -> kernel."""
    codes: str
    """The part that holds the weights themselves."""
    per_byte: int
    """Weights in each byte of it."""
    multiple: int
    """What the number of inputs must be a multiple of."""


STORAGES = {
    "nf4": Storage(NF4, nf4_shapes, quantise_nf4, dequantise_nf4, "nibbles", 2, BLOCK),
    "int8": Storage(Int8, int8_shapes, quantise_int8, dequantise_int8, "codes", 1, 1),
}


def store_kernels(model: nnx.Module, kind: str) -> nnx.Module:
    """The abstract `model` with the kernels of all Linears in that storage, in place."""
    storage = STORAGES[kind]
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, Linear) or isinstance(node, PreciseLinear):
            continue
        shape = node.kernel.get_value().shape
        if isinstance(node, ExpertLinear):
            raise UserError(
                f'adapter.quantize "{kind}" does not reach the matrices of experts'
                f' ({".".join(map(str, path))}); set adapter.quantize to "none"'
            )
        if shape[-2] % storage.multiple:
            name = ".".join(map(str, path))
            raise UserError(
                f'adapter.quantize "{kind}" needs inputs in multiples of {storage.multiple};'
                f' {name} has {shape[-2]}; set adapter.quantize to "int8" or "none"'
            )
        node.kernel = storage.module(storage.shapes(shape), node.kernel.get_metadata()["axes"])
    return model


def quantise_params(params: Iterable[tuple[str, jax.Array]], shapes: Shapes, kind: str) -> Params:
    """Parameters by path in the storage that `shapes` (with shardings) name, one after the other.

    Each array may be freed once the next is asked for, so no more than one is in memory whole.
    """
    stored = {}
    for path, value in params:
        names = STORAGES[kind].shapes(value.shape) if value.ndim > 1 else ()
        if not names or not all(f"{path}.{name}" in shapes for name in names):
            stored[path] = value
            continue
        places = {name: shapes[f"{path}.{name}"].sharding for name in names}
        quantise = functools.partial(quantise_stacked, kind=kind)
        parts = jax.jit(quantise, out_shardings=places)(value)
        stored |= {f"{path}.{name}": part for name, part in parts.items()}
        jax.block_until_ready(parts)  # else the host runs ahead and memory holds several
    return stored


def quantise_stacked(kernel: jax.Array, kind: str) -> dict[str, jax.Array]:
    """The parts of a kernel [in, out] or, a layer at a time, of [L, in, out]."""
    quantise = STORAGES[kind].quantise
    return jax.lax.map(quantise, kernel) if kernel.ndim == 3 else quantise(kernel)


def count_weights(path: str, value) -> int:
    """Weights that a stored array stands for: two a byte of NF4, none for its scales."""
    *_, owner, name = ["", *path.split(".")]
    if owner != "kernel":
        return value.size
    return sum(s.per_byte * value.size for s in STORAGES.values() if s.codes == name)


@functools.partial(jax.jit, static_argnames="kind")
def round_trip(kernel: jax.Array, kind: str) -> jax.Array:
    """float32 [in, out] as its storage gives it back: what an adapter was trained beside."""
    storage = STORAGES[kind]
    return storage.dequantise(storage.quantise(kernel), jnp.float32)
