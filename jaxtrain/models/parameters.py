"""Split a model into named arrays and rebuild it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

Params = dict[str, jax.Array]
Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Parameters without their values, with shardings where somebody places them."""
Rebuild = Callable[[Params], Any]
"""What makes the model of its parameters; its users call the methods of its own class."""


def split_model(model: nnx.Module) -> tuple[dict[str, Any], Rebuild]:
    """Return (parameters by dotted path, function that rebuilds the model around such a dict).

    The parameters are arrays, or shapes of an abstract (`nnx.eval_shape`) model. Everything
    after this point, from the optimizer to the checkpoint, knows parameters by path and the model
    as a pure function of them.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [name_path(path) for path, _ in leaves]
    assert len(set(paths)) == len(paths), "two parameters share a path"

    def rebuild(values: Params) -> Any:
        state = jax.tree_util.tree_unflatten(structure, [values[path] for path in paths])
        return nnx.merge(graph, state, rest)

    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True)), rebuild


def name_path(path: tuple) -> str:
    """ "layers.attention.query.kernel" from a jax key path."""
    keys = (getattr(part, "key", getattr(part, "idx", None)) for part in path)
    return ".".join(str(key) for key in keys if key is not None)
