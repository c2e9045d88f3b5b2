"""Storage of frozen kernels in fewer bits, quantized as they are loaded."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters import mxfp4
from jaxtrain.adapters.int8 import Int8, dequantize_int8, int8_shapes, quantize_int8
from jaxtrain.adapters.nf4 import (
    BLOCK,
    NF4,
    TensorPart,
    dequantize_nf4,
    nf4_shapes,
    quantize_nf4,
    quantize_together,
)
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import ParameterEntry
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.layers.linear import ExpertLinear, Linear, PreciseLinear
from jaxtrain.models.parameters import Params, Shapes


class Storage(NamedTuple):
    """A kind of storage; its parts have the paths `<path of the kernel>.<part>`."""

    module: Callable[..., nnx.Module]
    """(parts, axes of the kernel) -> module in place of Linear.kernel."""
    shapes: Callable[..., dict]
    """Shape of a kernel [..., in, out] -> shapes of its parts. This and `module` take a TensorPart,
    too, of a kernel that is quantized with others."""
    quantize: Callable[..., dict]
    """Kernel [in, out] -> parts."""
    dequantize: Callable[..., jax.Array]
    """(parts, dtype) -> kernel."""
    codes: str
    """The part that holds the weights themselves."""
    per_byte: int
    """Weights in each byte of it."""
    multiple: int
    """The number of inputs must be a multiple of this."""
    experts_only: bool = False
    """True if only the matrices of experts are stored so."""
    read: Callable[..., dict | None] = lambda files, op, shapes: None
    """(folder, op of a kernel, {part: shape}) -> the parts of a stacked kernel that a folder holds
    in this very storage, or None."""


Tensors = Mapping[str, TensorPart]
"""By the path of a Linear: of kernels that are quantized with the others of their tensor."""
NO_TENSORS: Tensors = MappingProxyType({})

NF4_STORAGE = Storage(NF4, nf4_shapes, quantize_nf4, dequantize_nf4, "nibbles", 2, BLOCK)
STORAGES = {
    "nf4": NF4_STORAGE,
    "nf4_fused": NF4_STORAGE,
    "int8": Storage(Int8, int8_shapes, quantize_int8, dequantize_int8, "codes", 1, 1),
    "mxfp4": Storage(
        mxfp4.MXFP4Kernel,
        mxfp4.mxfp4_shapes,
        mxfp4.quantize_mxfp4,
        mxfp4.dequantize_mxfp4,
        "blocks",
        2,
        mxfp4.BLOCK,
        experts_only=True,
        read=mxfp4.read_mxfp4,
    ),
}


def store_kernels(model: nnx.Module, kind: str, tensors: Tensors = NO_TENSORS) -> nnx.Module:
    """Replace the kernels of all Linears of the abstract `model` by their storage, in place.
    tensors: for "nf4_fused"."""
    storage, count = STORAGES[kind], 0
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, Linear) or isinstance(node, PreciseLinear) or path[0] == "vision":
            continue  # a tower is small, and what it loses is lost for all layers behind it
        if storage.experts_only and not isinstance(node, ExpertLinear):
            continue
        shape, name = node.kernel.get_value().shape, ".".join(map(str, path))
        if shape[-2] % storage.multiple:
            raise UserError(
                f'adapter.quantize "{kind}" needs inputs in multiples of {storage.multiple};'
                f' {name} has {shape[-2]}; set adapter.quantize to "int8" or "none"'
            )
        part_args = (tensors[name],) if name in tensors else ()
        axes = node.kernel.get_metadata()["axes"]
        node.kernel = storage.module(storage.shapes(shape, *part_args), axes, *part_args)
        count += 1
    if not count:
        raise UserError(
            f'adapter.quantize "{kind}" stores the matrices of experts, and this model has none;'
            ' set adapter.quantize to "nf4", "int8" or "none"'
        )
    return model


def find_stored(shapes: Shapes, kind: str) -> set[str]:
    """Return the paths of the kernels in that storage, given the shapes of all parameters."""
    end = f".{STORAGES[kind].codes}"
    return {path.removesuffix(end) for path in shapes if path.endswith(f".kernel{end}")}


def quantize_params(
    params: Iterable[tuple[str, jax.Array | Iterator[jax.Array]]],
    shapes: Shapes,
    kind: str,
    source: tuple[SafetensorsFolder, Mapping[str, ParameterEntry]] | None = None,
    tensors: Tensors = NO_TENSORS,
) -> Params:
    """Return parameters by path in the storage of `shapes` (with shardings), converted one at a
    time.

    A value that is an iterator over its layers is in memory one layer at a time; any other may be
    freed once the next is requested. source: the folder that the parameters come from, with their
    entries: parts stored there in the same format are read as they are. tensors: for "nf4_fused";
    each is in memory one layer at a time.
    """
    stored, kernel_paths = {}, find_stored(shapes, kind)
    waiting: dict[str, dict[str, Any]] = {}
    members = _find_members(kernel_paths, tensors)
    for path, value in params:
        if path not in kernel_paths:
            stored[path] = value
            continue
        if part := tensors.get(path.removesuffix(".kernel")):
            kernels = waiting.setdefault(part.tensor, {})
            kernels[path] = value
            if kernels.keys() == members[part.tensor]:
                stored |= _quantize_tensor(waiting.pop(part.tensor), shapes, tensors)
            continue
        names = [name for name in STORAGES[kind].shapes((0, 0)) if f"{path}.{name}" in shapes]
        part_shapes = {name: shapes[f"{path}.{name}"] for name in names}
        places = {name: shape.sharding for name, shape in part_shapes.items()}
        files, entries = source or (None, {})
        as_is = (
            STORAGES[kind].read(files, entries[path].op, part_shapes) if path in entries else None
        )
        if as_is is not None:
            arrays = as_is
        elif isinstance(value, jax.Array):
            arrays = jax.device_put(quantize_stacked(value, kind), places)
            # Else the host runs ahead, and several whole kernels are in memory at once.
            jax.block_until_ready(arrays)
        else:
            quantized = (quantize_stacked(kernel, kind) for kernel in value)
            arrays = _write_layers(quantized, part_shapes, places)
        stored |= {f"{path}.{name}": array for name, array in arrays.items()}
    assert not waiting, f"not all of {list(waiting)} came"
    return stored


def _find_members(kernel_paths: Iterable[str], tensors: Tensors) -> dict[str, set[str]]:
    """Return {tensor: paths of the kernels that are parts of it}."""
    members: dict[str, set[str]] = {}
    for path in kernel_paths:
        if part := tensors.get(path.removesuffix(".kernel")):
            members.setdefault(part.tensor, set()).add(path)
    return members


def _quantize_tensor(kernels: Mapping[str, Any], shapes: Shapes, tensors: Tensors) -> Params:
    """Quantize stacked kernels, arrays or iterators over layers, that form one tensor in each
    layer."""
    part_shapes = {
        f"{path}.{name}": shapes[f"{path}.{name}"]
        for path in kernels
        for name in nf4_shapes((0, 0))
    }
    chosen = tuple(tensors[path.removesuffix(".kernel")] for path in kernels)

    @jax.jit
    def quantize(layer: Sequence[jax.Array]) -> dict[str, jax.Array]:
        quantized = zip(kernels, quantize_together(layer, chosen), strict=True)
        return {
            f"{path}.{name}": array for path, arrays in quantized for name, array in arrays.items()
        }

    layers = zip(*kernels.values(), strict=True)
    places = {name: shape.sharding for name, shape in part_shapes.items()}
    return _write_layers(map(quantize, layers), part_shapes, places)


def _write_layers(
    layers: Iterable[Mapping[str, jax.Array]], shapes: Shapes, places: dict
) -> dict[str, jax.Array]:
    """Return stacked arrays, writing each layer as it comes."""

    def empty() -> dict[str, jax.Array]:
        return {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=places)
    def write(parts, index, layer):
        return {
            name: jax.lax.dynamic_update_index_in_dim(part, layer[name], index, 0)
            for name, part in parts.items()
        }

    parts = jax.jit(empty, out_shardings=places)()
    for index, layer in enumerate(layers):
        parts = jax.block_until_ready(write(parts, index, layer))
    return parts


# Jitted at the top level, so that it compiles once for all kernels of a shape.
@functools.partial(jax.jit, static_argnames="kind")
def quantize_stacked(kernel: jax.Array, kind: str) -> dict[str, jax.Array]:
    """Quantize a kernel [in, out], or [..., in, out] one matrix at a time."""
    quantize = STORAGES[kind].quantize
    if kernel.ndim == 2:
        return quantize(kernel)
    return jax.lax.map(functools.partial(quantize_stacked, kind=kind), kernel)


def count_weights(path: str, value) -> int:
    """Count the weights of a stored array: two a byte of NF4, none for its scales."""
    *_, owner, name = ["", *path.split(".")]
    if owner != "kernel":
        return value.size
    return {s.codes: s.per_byte for s in STORAGES.values()}.get(name, 0) * value.size


@functools.partial(jax.jit, static_argnames="kind")
def round_trip(kernel: jax.Array, kind: str) -> jax.Array:
    """Return float32 [in, out] of a kernel after storage, as the adapter saw it in training."""
    storage = STORAGES[kind]
    return storage.dequantize(storage.quantize(kernel), jnp.float32)
