"""Models of adapters in a sampler's layout, over the arrays of one base.

base, layer by layer ──────────────┬──> model of adapter A
adapter A ── laid out by a program ┘
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from jaxtrain.generation.local.slots import unstack
from jaxtrain.models.parameters import Params, Rebuild, split_model

ADAPTER = ".adapter."
MAX_LAYOUTS = 8
"""Kinds of adapters whose layouts, with their programs, stay in memory."""


class AdapterLayout(NamedTuple):
    """Layout of models with adapters that are alike: same matrices, ranks and alphas."""

    base: Params
    """What they share, layer by layer."""
    rebuild: Rebuild
    select: Callable[[Params, Params], Params]
    """(what the adapter trains, the other parameters) -> the adapter, laid out."""

    def assemble(self, trained: Params, frozen: Params) -> Any:
        """Return the model of an adapter."""
        return self.rebuild({**self.base, **self.select(trained, frozen)})


def lay_out(
    build: Callable[[Params], Any],
    trained: Params,
    frozen: Params,
    base_model: Any,
    full: Collection[str] = (),
) -> AdapterLayout:
    """Return the layout of adapters like this one. build: makes a model of all parameters.
    base_model: the sampler's model of the base. full: tables that the adapter has in place of the
    base's.

    An adapter changes neither the layout of the base nor its numbers, so all models use the arrays
    of `base_model`; a second copy lives until this returns.
    """
    shared, _ = split_model(base_model)
    combined, rebuild = split_model(unstack(build({**frozen, **trained})))

    def select(trained: Params, frozen: Params) -> Params:
        laid_out, _ = split_model(build({**frozen, **trained}).unstack())
        return {path: value for path, value in laid_out.items() if ADAPTER in path or path in full}

    base = {
        path: shared[path] if is_alike(shared.get(path), value) else value
        for path, value in combined.items()
        if not (ADAPTER in path or path in full)
    }
    return AdapterLayout(base, rebuild, jax.jit(select))


class LayoutCache:
    """The layouts of the MAX_LAYOUTS kinds of adapters that were used last."""

    def __init__(self):
        self.by_kind: OrderedDict[Any, AdapterLayout] = OrderedDict()

    def get(self, kind: Any, make: Callable[[], AdapterLayout]) -> AdapterLayout:
        """Return the layout of a kind, which is made if it is not in memory."""
        if kind not in self.by_kind:
            self.by_kind[kind] = make()
            if len(self.by_kind) > MAX_LAYOUTS:
                self.by_kind.popitem(last=False)
        self.by_kind.move_to_end(kind)
        return self.by_kind[kind]


def is_alike(first: jax.Array | None, second: jax.Array) -> bool:
    """Return whether two arrays have the same shape, dtype and place."""
    return first is not None and (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.sharding.is_equivalent_to(second.sharding, second.ndim)
    )
