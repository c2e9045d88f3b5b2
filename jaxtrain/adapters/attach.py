"""Attach adapters to a model, draw their parameters, split these from the frozen ones, detach."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.adapters.lora import DoRA, LoRA, column_norms
from jaxtrain.adapters.rows import TokenRows
from jaxtrain.adapters.spec import Adapter, LoRASpec
from jaxtrain.adapters.storage import store_kernels
from jaxtrain.errors import UserError
from jaxtrain.layers.embed import Embed
from jaxtrain.layers.linear import ExpertLinear, Linear
from jaxtrain.layers.router import Router
from jaxtrain.models.parameters import Params, Rebuild, Shapes

PARTS = ("a", "b", "magnitude")


def attach(model: nnx.Module, adapter: Adapter) -> nnx.Module:
    """Fill the slots of the abstract `model` (shapes for parameters), in place.

    Raises UserError if a kernel cannot be stored as requested.
    """
    remaining = dict(adapter.slots)
    for path, node in list(nnx.iter_graph(model)):
        has_slot = isinstance(node, Linear | Router)
        slot = remaining.pop(".".join(map(str, path)), None) if has_slot else None
        if slot is not None:
            salt = zlib.crc32(".".join(map(str, path)).encode())
            node.adapter = make_adapter(node, slot, adapter.dtype, adapter.dropout, salt)
        name = ".".join(map(str, path))
        if isinstance(node, Embed) and name in adapter.rows:
            shape = (len(adapter.rows[name]), node.embedding.get_value().shape[1])
            rows = jax.ShapeDtypeStruct(shape, jnp.dtype(adapter.dtype))
            node.adapter = TokenRows(rows, adapter.rows[name])
    assert not remaining, f"no such Linear: {sorted(remaining)}"
    if adapter.quantize == "none":
        return model
    return store_kernels(model, adapter.quantize, adapter.tensors)


def make_adapter(
    linear: Linear | Router, slot: LoRASpec, dtype: str, dropout: float = 0.0, salt: int = 0
) -> LoRA:
    """Build the shapes of an adapter for a Linear or a router, which may be a stack of layers (and
    of experts)."""
    *lead, num_in, num_out = linear.kernel.get_value().shape
    if slot.dora and isinstance(linear, ExpertLinear | Router):
        raise UserError(
            'adapter.kind "dora" has no form for routers and the matrices of experts; set it to'
            ' "lora", or leave them out of adapter.target ("attention")'
        )
    if dropout and isinstance(linear, ExpertLinear | Router):
        raise UserError(
            f"adapter.dropout {dropout} has no form for routers and the matrices of experts; set"
            ' it to 0, or leave them out of adapter.target ("attention")'
        )

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *sizes), jnp.dtype(dtype))

    a, b = shape(num_in, slot.rank), shape(slot.rank, num_out)
    axes = linear.kernel.get_metadata()["axes"]
    if slot.dora:
        return DoRA(a, b, shape(num_out), slot.scale, axes, dropout, salt)
    return LoRA(a, b, slot.scale, axes, dropout, salt)


def cut_layers(
    shapes: Shapes, rebuild: Rebuild, adapter: Adapter
) -> tuple[dict[str, Any], Rebuild]:
    """Return shapes of all parameters with those of the layers alone that have an adapter, and
    `rebuild` of such parameters: the other layers of the stack get factors of zero, and a length
    that DoRA takes for their own."""
    parts = ((path, slot, part) for path, slot in adapter.slots.items() for part in PARTS)
    layers = {
        f"{path}.adapter.{part}": slot.layers
        for path, slot, part in parts
        if slot.layers is not None and f"{path}.adapter.{part}" in shapes
    }
    if not layers:
        return dict(shapes), rebuild
    full = {name: shapes[name] for name in layers}
    cut = {
        name: jax.ShapeDtypeStruct(
            (len(layers[name]), *shape.shape[1:]), shape.dtype, sharding=shape.sharding
        )
        for name, shape in full.items()
    }

    def fill(name: str, value: Any) -> Any:
        if isinstance(value, jax.ShapeDtypeStruct):
            return full[name]
        rows = np.full(full[name].shape[0], len(layers[name]))
        rows[list(layers[name])] = np.arange(len(layers[name]))
        empty = jnp.inf if name.endswith(".magnitude") else 0
        padding = jnp.full((1, *value.shape[1:]), empty, value.dtype)
        return jnp.concatenate([value, padding])[rows]

    def rebuild_filled(values: Params) -> Any:
        return rebuild({**values, **{name: fill(name, values[name]) for name in layers}})

    return {**shapes, **cut}, rebuild_filled


def without_adapters(model: nnx.Module) -> nnx.Module:
    """Return `model` without adapters: the reference policy of preference and RL methods.

    In place, so only for a model that was just rebuilt. Parameters trained in full stay trained.
    """
    for _, node in list(nnx.iter_graph(model)):
        if isinstance(node, Linear | Router | Embed):
            node.adapter = nnx.data(None)
    return model


def draw_trained(shapes: Shapes, base: Params, adapter: Adapter, seed: int) -> Params:
    """Return the initial trained parameters; the model computes what its base computes.

    shapes: of all trained parameters, with shardings; base: the base's parameters. A is uniform in
    +-1/sqrt(in) as in PEFT, B zero, the magnitude the norm of W's columns; rows of tables are the
    table's. The numbers depend on seed and path, not on the mesh.
    """
    needed = {path: base[path] for path in adapter.full}
    for path, slot in adapter.slots.items():
        if slot.dora:
            needed[f"{path}.kernel"] = base[f"{path}.kernel"]
    needed |= {f"{path}.embedding": base[f"{path}.embedding"] for path in adapter.rows}

    def draw(key: jax.Array, base: Params) -> Params:
        rows = {
            f"{path}.adapter.rows": base[f"{path}.embedding"][jnp.asarray(ids)]
            for path, ids in adapter.rows.items()
        }
        return {
            path: rows[path].astype(shape.dtype)
            if path in rows
            else _start(path, shape, key, base, adapter.slots)
            for path, shape in shapes.items()
        }

    places = {path: shape.sharding for path, shape in shapes.items()}
    return jax.jit(draw, out_shardings=places)(jax.random.key(seed), needed)


def _start(
    path: str,
    shape: jax.ShapeDtypeStruct,
    key: jax.Array,
    base: Params,
    slots: Mapping[str, LoRASpec],
) -> jax.Array:
    owner, _, name = path.rpartition(".adapter.")
    if not owner:
        return base[path].astype(shape.dtype)
    layers = slots[owner].layers
    if name == "b":
        return jnp.zeros(shape.shape, shape.dtype)
    if name == "a":
        key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        bound = 1 / math.sqrt(shape.shape[-2])
        return jax.random.uniform(key, shape.shape, shape.dtype, -bound, bound)
    kernel = base[f"{owner}.kernel"]
    kernel = kernel if layers is None else kernel[jnp.asarray(layers)]
    none_a = jnp.zeros((*kernel.shape[:-1], 1), shape.dtype)
    none_b = jnp.zeros((*kernel.shape[:-2], 1, kernel.shape[-1]), shape.dtype)
    return column_norms(kernel, none_a, none_b, 1.0).astype(shape.dtype)
