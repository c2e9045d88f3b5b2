"""Parameters of a ModelBundle: sharded shapes, and weights loaded, initialized or quantized.

What adapters and folders need is imported only where there is one.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.core.bundle import ModelBundle
from jaxtrain.distributed.sharding import shardings
from jaxtrain.errors import UserError
from jaxtrain.layers.fp8 import use_fp8
from jaxtrain.models import build
from jaxtrain.models.parameters import Params, Rebuild, name_path, split_model


def abstract_params(
    bundle: ModelBundle, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict[str, Any], Rebuild]:
    """Return parameter shapes with their places on the bundle's mesh, or on another, and the
    function that builds a model of such a dict.

    Nothing is allocated. The model that is rebuilt remembers how bundle.folder stored its tensors,
    so that an export keeps their dtypes.
    """
    model = build.abstract(bundle.architecture, **bundle.options)
    if bundle.product is not None:
        model = use_fp8(model, bundle.product)
    if bundle.folder is not None:
        from jaxtrain.models import loading

        model = loading.remember(model, bundle.folder)
    if bundle.adapter is not None:
        from jaxtrain.adapters.attach import attach

        model = attach(model, bundle.adapter)
    shapes, rebuild = split_model(model)
    placed = jax.tree_util.tree_leaves_with_path(shardings(nnx.state(model), mesh or bundle.mesh))
    shardings_by_path = {name_path(path): sharding for path, sharding in placed}
    adapter = bundle.adapter
    # Tables that an adapter trains in full are masters and wider than the frozen base around them.
    full = {} if adapter is None else dict.fromkeys(adapter.full, adapter.dtype)
    placed_shapes = {
        path: jax.ShapeDtypeStruct(
            shape.shape, full.get(path, shape.dtype), sharding=shardings_by_path[path]
        )
        for path, shape in shapes.items()
    }
    if adapter is None:
        return placed_shapes, rebuild
    from jaxtrain.adapters.attach import cut_layers

    return cut_layers(placed_shapes, rebuild, adapter)


def stream_base(bundle: ModelBundle, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the model without adapters, on the mesh, one at a time: loaded, or
    drawn by seed with the numbers that the whole model would get. Nothing is quantized."""
    if bundle.folder is None:
        yield from build.draw_params(bundle.architecture, seed, mesh=bundle.mesh, **bundle.options)
        return
    from jaxtrain.models import loading
    from jaxtrain.runs.base_record import require_weights

    require_weights(bundle.folder)
    yield from loading.read_params(
        bundle.folder, bundle.mesh, bundle.architecture, seed, **bundle.options
    )


def open_base(bundle: ModelBundle, seed: int) -> Params:
    """Return the weights of the model without adapters, on the mesh: loaded, or random by seed."""
    adapter = bundle.adapter
    quantize = "none" if adapter is None else adapter.quantize
    if adapter is None or quantize == "none":
        if bundle.folder is None and "part" not in bundle.options:
            # Drawn as a whole, by one program or, if it is small, by those of all small models.
            model = build.init(bundle.architecture, seed, mesh=bundle.mesh, **bundle.options)
            return split_model(model)[0]
        return dict(stream_base(bundle, seed))
    if bundle.folder is not None:
        from jaxtrain.runs.base_record import require_weights

        require_weights(bundle.folder)
    from jaxtrain.adapters.storage import find_stored, quantize_params
    from jaxtrain.huggingface.packed import open_folder
    from jaxtrain.models import loading

    # One parameter at a time is read and quantized: the whole model in floats may not fit.
    shapes = abstract_params(bundle)[0]
    options = {"by_layer": find_stored(shapes, quantize), **bundle.options}
    source = None
    if bundle.folder is not None:
        params = loading.read_params(
            bundle.folder, bundle.mesh, bundle.architecture, seed, **options
        )
        source = open_folder(bundle.folder), loading.stored_entries(bundle.architecture)
    else:
        params = build.draw_params(bundle.architecture, seed, mesh=bundle.mesh, **options)
    return quantize_params(params, shapes, quantize, source, adapter.tensors)


def open_params(bundle: ModelBundle, seed: int) -> Params:
    """Return all weights that a fresh run starts from: the base, and adapters drawn or loaded."""
    base = open_base(bundle, seed)
    if bundle.adapter is None:
        return base
    shapes, _ = split_trained(abstract_params(bundle)[0], bundle.adapter)
    # Later keys win: a table that is trained in full takes the place of the base's.
    return {**base, **start_adapter(bundle, shapes, base, seed)}


def read_start(folder: str, bundle: ModelBundle, key: str) -> Any:
    """Return the bundle's adapter with its start in another folder, which `key` names; UserError
    where that one trains anything else."""
    from jaxtrain.adapters.peft import read_adapter

    assert bundle.adapter is not None, "the config says that there is one"
    start = read_adapter(folder, bundle.architecture, bundle.adapter.dtype)
    first, second = (
        (dict(adapter.slots), adapter.full, dict(adapter.rows))
        for adapter in (start, bundle.adapter)
    )
    if first != second:
        raise UserError(
            f"{key} {folder!r} has other matrices, ranks or alphas than section adapter; all"
            " policies are alike: set adapter.rank, alpha and target to those of the folder"
        )
    return dataclasses.replace(bundle.adapter, source=start.source)


def start_adapter(
    bundle: ModelBundle, shapes: Mapping[str, Any], base: Params, seed: int
) -> Params:
    """Return what an adapter trains as it starts on this base: drawn, or read from its folder.
    shapes: of it, with shardings."""
    from jaxtrain.adapters.attach import draw_trained
    from jaxtrain.adapters.peft import load_trained

    assert bundle.adapter is not None, "the config says that there is one"
    if bundle.adapter.source is None:
        return draw_trained(dict(shapes), base, bundle.adapter, seed)
    return load_trained(dict(shapes), bundle.architecture, bundle.adapter)


def split_trained(
    params: Mapping[str, Any], adapter: Any | None, untrained: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split parameters by path, or their shapes, into (trained, frozen). Without an adapter all but
    tables, and paths that begin with one of `untrained`, are trained."""
    trained = {
        path: value
        for path, value in params.items()
        if (
            adapter.trains(path)
            if adapter is not None
            else not (is_table(value) or path.startswith(untrained))
        )
    }
    return trained, {path: value for path, value in params.items() if path not in trained}


def is_table(value: Any) -> bool:
    """Return whether a parameter, an array or its shape, holds integers such as ids, which no
    gradient reaches."""
    return jnp.issubdtype(value.dtype, jnp.integer)


def count_weights(path: str, value: Any) -> int:
    """Return the number of weights that a stored array stands for; quantized ones hold several."""
    if path.split(".")[-2:-1] != ["kernel"]:
        return value.size
    from jaxtrain.adapters import storage

    return storage.count_weights(path, value)
