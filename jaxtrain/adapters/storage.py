"""How frozen kernels are stored: in fewer bits, quantised as they are loaded."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.adapters.nf4 import BLOCK, NF4, PARTS, dequantise_nf4, nf4_shapes, quantise_nf4
from jaxtrain.errors import UserError
from jaxtrain.layers.linear import Linear
from jaxtrain.parameters import Params


def store_nf4(model: nnx.Module) -> nnx.Module:
    """The abstract `model` with the kernels of all Linears in NF4, in place."""
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, Linear):
            continue
        shape = node.kernel.get_value().shape
        if shape[-2] % BLOCK:
            name = ".".join(map(str, path))
            raise UserError(
                f'adapter.quantize "nf4" needs inputs in multiples of {BLOCK}; {name} has'
                f' {shape[-2]}; set adapter.quantize to "none"'
            )
        node.kernel = NF4(nf4_shapes(shape), node.kernel.get_metadata()["axes"])
    return model


def quantise_params(params: Iterable[tuple[str, jax.Array]], shapes: Params) -> Params:
    """Parameters by path in the storage that `shapes` (with shardings) name, one after the other.

    Each array may be freed once the next is asked for, so no more than one is in memory whole.
    """
    stored = {}
    for path, value in params:
        if f"{path}.nibbles" not in shapes:
            stored[path] = value
            continue
        places = {name: shapes[f"{path}.{name}"].sharding for name in PARTS}
        parts = jax.jit(quantise_stacked, out_shardings=places)(value)
        stored |= {f"{path}.{name}": part for name, part in parts.items()}
        jax.block_until_ready(parts)  # else the host runs ahead and memory holds several
    return stored


def quantise_stacked(kernel: jax.Array) -> dict[str, jax.Array]:
    """quantise_nf4 of [in, out] or, a layer at a time, of [L, in, out]."""
    return jax.lax.map(quantise_nf4, kernel) if kernel.ndim == 3 else quantise_nf4(kernel)


def count_weights(path: str, value) -> int:
    """Weights that a stored array stands for: two a byte of NF4, none for its scales."""
    *_, owner, name = ["", *path.split(".")]
    if owner != "kernel":
        return value.size
    return 2 * value.size if name == "nibbles" else 0


@jax.jit
def round_trip(kernel: jax.Array) -> jax.Array:
    """float32 [in, out] as NF4 gives it back: what an adapter was trained beside."""
    return dequantise_nf4(quantise_nf4(kernel), jnp.float32)
