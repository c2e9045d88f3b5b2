"""Work of a model in numbers, read from its shapes without allocating anything."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.adapters.storage import count_weights
from jaxtrain.core.optimizer import is_vector
from jaxtrain.layers.linear import ExpertLinear, Linear
from jaxtrain.models.parameters import Shapes, split_model


@dataclasses.dataclass(frozen=True)
class ParameterArray:
    """A parameter as it is stored."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical, of parallel.rules."""
    itemsize: int
    travels: float
    """Bytes an entry when a layer is gathered: in the compute dtype, or as packed."""
    trained: bool
    unpacked: float = 0.0
    """Bytes that an entry becomes in the compute dtype, where it is packed."""
    slots: float = 8.0
    """Bytes an entry of the optimizer's state, where it is trained."""


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A model, its adapter and how it is computed."""

    arrays: tuple[ParameterArray, ...]
    layers: int
    hidden: int
    dense: float
    """Weights that multiply a token, experts aside."""
    dense_again: float
    """Of these, what a layer that is computed again multiplies by: neither the head nor what the
    backward pass needs no result of, the last matrix of a feed-forward."""
    dense_trained: float
    """Of these the trained."""
    experts: float
    """Weights of experts that multiply a token."""
    experts_trained: float
    expert_layers: int
    experts_per_token: int
    outputs: float
    """Entries a token of what all Linears of all layers give."""
    mixed: float
    """Entries a token of what all layers' mixers give, before their output Linear."""
    heads: int
    """What the tensor axis has to divide."""
    num_experts: int
    remat: str
    mixing: Callable[[int], float]
    """FLOPs of the forward pass of one document of so many tokens beside those of weights."""


def read_work(
    plain: Any,
    model: Any,
    shapes: Shapes,
    trained: Collection[str],
    *,
    remat: str,
    dtype: Any,
    slots: float = 8.0,
) -> StepWork:
    """Read the work of two abstract models: `plain` without an adapter, and `model` of `shapes` as
    it is trained. trained: paths of its parameters. slots: bytes of optimizer state per entry of
    these."""
    layout, mix = read_layout(plain), model.stack.mixing_flops
    count: dict[str, float] = dict.fromkeys(
        ("dense", "dense_again", "dense_trained", "experts", "experts_trained"), 0.0
    )
    for node_path, node in nnx.iter_graph(model):
        if node_path[:1] == ("vision",):
            continue  # multiplies patches, not tokens
        is_head = node is getattr(model, "head_table", None)
        share = 1.0 if is_head else getattr(node, "token_share", 0.0)
        group = "experts" if isinstance(node, ExpertLinear) else "dense"
        once = is_head or node_path[-1:] == ("down",) or group == "experts"
        for name, value in split_model(node)[0].items() if share else ():
            path = ".".join(map(str, (*node_path, name)))
            if not is_vector(path):
                weights = share * count_weights(path, value)
                count[group] += weights
                count[f"{group}_trained"] += weights if path in trained else 0.0
                count["dense_again"] += 0.0 if once else weights
    return StepWork(
        arrays=tuple(read_arrays(model, shapes, trained, dtype, slots)),
        layers=len(model.stack.specs),
        hidden=model.embed.embedding.get_value().shape[-1],
        heads=count_heads(model),
        remat=remat,
        mixing=functools.cache(lambda tokens: float(mix(tokens - np.arange(tokens)))),
        **count,
        **layout,
    )


def read_arrays(
    model: Any, shapes: Shapes, trained: Collection[str], dtype: Any, slots: float
) -> Iterator[ParameterArray]:
    """Return all parameters of a model."""
    computed = float(jnp.dtype(dtype).itemsize)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        if name not in shapes:
            continue
        shape, stored = tuple(shapes[name].shape), jnp.dtype(shapes[name].dtype)
        axes = variable.get_metadata().get("axes") or (None,) * len(shape)
        packed = not jnp.issubdtype(stored, jnp.floating) or stored.itemsize == 1
        travels = float(stored.itemsize) if packed else computed
        # Two weights of four bits share a uint8.
        unpacked = packed * computed * (2 if stored == jnp.uint8 else 1)
        yield ParameterArray(
            shape, tuple(axes), stored.itemsize, travels, name in trained, unpacked, slots
        )


def read_layout(plain: Any) -> dict[str, Any]:
    """Return what StepWork needs to know of the layers' Linears."""
    outputs = mixed = 0.0
    experts, chosen, expert_layers = 1, 1, 0
    for path, node in nnx.iter_graph(plain):
        if not isinstance(node, Linear) or path[:1] == ("vision",):
            continue
        shape, axes = node.kernel.get_value().shape, node.kernel.get_metadata()["axes"]
        many = shape[0] if axes[0] == "layers" else 1
        if isinstance(node, ExpertLinear):
            experts, chosen = shape[-3], round(node.token_share * shape[-3])
            outputs += many * chosen * shape[-1]
            expert_layers += many if path[-1] == "down" else 0
        else:
            outputs += many * shape[-1]
            mixed += many * shape[-2] if "heads" in axes[-2:-1] else 0
    return {
        "outputs": outputs,
        "mixed": mixed,
        "num_experts": experts,
        "experts_per_token": chosen,
        "expert_layers": expert_layers,
    }


def count_heads(model: Any) -> int:
    """The largest number that divides the heads of all layers."""
    counts = []
    for _, mixer in model.stack.mixers():
        names = ("num_heads", "num_key_heads")
        counts += [count for name in names if isinstance(count := getattr(mixer, name, None), int)]
    return math.gcd(*counts) or 1
