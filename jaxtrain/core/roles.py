"""The models of a run, by role: the trained one and all others.

    role          weights     where they are                       in a checkpoint
    policy        "trained"   state.params, and frozen with an     its trained part
                              adapter: the base
    teacher       "own"       frozen["teacher/..."]                never: read at every start
    reference     "start"     frozen["reference/..."]              never: read at every start
    reference     "moving"    state.copies["reference/..."]        all of it
    reference     "bare"      the trained ones without adapters    -

A trained role's integer tables, such as ids, and without an adapter what else is not trained, such
as a tower, are in state.copies, too: no optimizer changes them, and a checkpoint contains them.

All parameters of a run are one flat dict: the trained role's under their paths, another role's
with its name and a slash as prefix. The step differentiates only the trained parameters.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import OptimConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.optimizer import build_optimizer
from jaxtrain.core.weights import (
    abstract_params,
    open_base,
    open_params,
    read_start,
    split_trained,
    start_adapter,
    stream_base,
)
from jaxtrain.distributed.mesh import HOST_MEMORY
from jaxtrain.models.parameters import Params, Rebuild

Weights = Literal["trained", "own", "start", "moving", "bare"]
Models = Mapping[str, Any]
"""{role: model}, the first argument of a loss."""


@dataclass(frozen=True)
class Role:
    """A model that a method works with."""

    bundle: ModelBundle
    """Architecture, mesh, folder, adapter. A copy of the trained model shares its bundle."""
    weights: Weights = "trained"
    """trained: by the optimizer, all or the adapter. own: other weights, never changed. start: the
    trained model's at the start. moving: a copy of these that `Task.after_round` changes. bare: the
    trained model's current ones without its adapter."""
    in_loss: bool = True
    """Whether the loss receives this model; False for one that only `Task.prepare` uses."""
    dtype: str | None = None
    """Storage dtype of floats in a copy of the start; None: that of the trained model."""
    on_host: bool = False
    """Whether weights that only `Task.prepare` uses wait in pinned memory of the hosts, and are
    copied to the devices for each use; of own and start."""
    tables: Callable[[], Mapping[str, Any]] | None = None
    """For the trained role: return {path: array} of tables that depend on the data; called on every
    process when a run begins."""


class Roles:
    """Shapes, weights and models of all roles; exactly one of them is trained."""

    def __init__(self, roles: Mapping[str, Role]):
        trained = [name for name, role in roles.items() if role.weights == "trained"]
        assert len(trained) == 1, f"exactly one role trains, not {trained or 'none'}"
        self.roles, self.trained = dict(roles), trained[0]
        self.bundle = self.roles[self.trained].bundle
        shapes, rebuild = abstract_params(self.bundle)
        adapter, untrained = self.bundle.adapter, self.bundle.untrained
        self.trained_shapes, self.frozen_shapes = split_trained(shapes, adapter, untrained)
        self.copy_shapes: Params = {}
        if adapter is None:
            # Part of a checkpoint, so that an export needs no other folder, while an adapter's base
            # is read again from its folder.
            self.copy_shapes, self.frozen_shapes = self.frozen_shapes, {}
        self._rebuild: dict[str, Rebuild] = dict.fromkeys(self.roles, rebuild)
        for name, role in self.roles.items():
            match role.weights:
                case "own":
                    role_shapes, self._rebuild[name] = abstract_params(role.bundle)
                    self.frozen_shapes |= prefix(name, move_shapes(role_shapes, role.on_host))
                case "start":
                    stored: dict[str, Any] = {
                        path: jax.ShapeDtypeStruct(
                            shape.shape, stored_as(shape.dtype, role.dtype), sharding=shape.sharding
                        )
                        for path, shape in self.trained_shapes.items()
                    }
                    self.frozen_shapes |= prefix(name, move_shapes(stored, role.on_host))
                case "moving":
                    self.copy_shapes |= prefix(name, self.trained_shapes)
                case "bare":
                    # The trained arrays themselves, so that there is nothing to place, save or
                    # publish.
                    from jaxtrain.adapters.attach import without_adapters

                    self._rebuild[name] = lambda params: without_adapters(rebuild(params))

    def open(self, seed: int, *, trained: bool = True) -> tuple[Params, Params, Params]:
        """Return (trained, frozen, copies) at the start of a fresh run, loaded or initialized.

        trained=False, for a run that goes on from a checkpoint: only what no checkpoint holds. Then
        trained weights are not even read, so that resuming needs no more memory than training.
        """
        copied = {name for name, role in self.roles.items() if role.weights == "start"}
        adapter, untrained = self.bundle.adapter, self.bundle.untrained
        # A copy of the start lies in no checkpoint: a resumed run reads or draws the starting
        # weights again for it, though not to train them.
        if trained or copied:
            start, frozen = split_trained(open_params(self.bundle, seed), adapter, untrained)
        elif adapter is not None:
            start, frozen = split_trained(open_base(self.bundle, seed), adapter)
        else:
            start, frozen = {}, {}
        copies: Params = {}
        if adapter is None:
            copies, frozen = (self._fill(frozen) if trained else {}), {}
        for name, role in self.roles.items():
            match role.weights:
                case "own":
                    frozen |= prefix(name, _open_own(role, seed))
                case "start":
                    # On the host nothing shares the buffers that the step donates.
                    copy = _copy(start, role.dtype, donated=trained and not role.on_host)
                    frozen |= prefix(name, to_host(copy) if role.on_host else dict(copy))
                case "moving" if trained:
                    # The step donates the state, two leaves of which must not share a buffer.
                    copies |= prefix(name, jax.tree.map(jnp.copy, start))
        return (start if trained else {}), frozen, copies

    def draw_again(self, weights: Params, seed: int, folder: str | None, key: str) -> Params:
        """Initialize the trained weights of a further adapter on the base in `weights`, which also
        contains the first adapter. folder: as for weights.read_start."""
        bundle = self.bundle
        assert bundle.adapter is not None, "several policies are adapters"
        if folder is not None:
            bundle = dataclasses.replace(bundle, adapter=read_start(folder, bundle, key))
        return start_adapter(bundle, self.trained_shapes, weights, seed)

    def _fill(self, tables: Params) -> Params:
        """Fill the trained role's tables with values from the data."""
        fill = self.roles[self.trained].tables
        arrays = {} if fill is None else fill()
        assert arrays.keys() <= tables.keys(), f"no such table: {sorted(arrays)}"
        filled = {path: np.asarray(array) for path, array in arrays.items()}
        return tables | {
            path: jax.make_array_from_callback(
                # Every process has all numbers and gives each of its devices the part that lies
                # there.
                tables[path].shape,
                tables[path].sharding,
                lambda index, path=path: filled[path][index].astype(tables[path].dtype),
            )
            for path in filled
        }

    def params(self, role: str, weights: Params) -> Params:
        """Select a role's parameters from all weights, by their paths within the role."""
        trained_params = {path: value for path, value in weights.items() if "/" not in path}
        role_prefix = f"{role}/"
        role_params = {
            p[len(role_prefix) :]: value
            for p, value in weights.items()
            if p.startswith(role_prefix)
        }
        return (
            # A copy has its own trained part alone and shares the frozen base.
            role_params if self.roles[role].weights == "own" else {**trained_params, **role_params}
        )

    def rebuild(self, role: str) -> Rebuild:
        """Return the function that builds the role's model from its parameters."""
        return self._rebuild[role]

    def build(self, weights: Params) -> Models:
        """Build the models that a loss receives; gradients reach only the trained one."""
        models = {}
        for name, role in self.roles.items():
            if role.in_loss:
                params = self.params(name, weights)
                # A "bare" role is made of the trained arrays: without this the loss would train
                # through it.
                params = params if name == self.trained else jax.lax.stop_gradient(params)
                models[name] = self._rebuild[name](params)
        return models


def open_optimizer(
    optim: OptimConfig,
    schedule: optax.Schedule,
    roles: Roles,
    build: Callable[[Params], Models] | None = None,
) -> tuple[optax.GradientTransformation, Callable[[Params], Models]]:
    """Return (optimizer of the trained role, `build`, by default that of the roles, without
    gradients of what optim.unfrozen_parameters leaves out)."""
    shapes: Any = roles.trained_shapes
    build = build or roles.build
    if not optim.lr_groups and not optim.unfrozen_parameters:
        return build_optimizer(optim, schedule, shapes), build
    from jaxtrain.core.parameter_groups import read_groups

    groups = read_groups(optim, roles.bundle, shapes)
    return build_optimizer(optim, schedule, shapes, groups), groups.stop(build)


@dataclass(frozen=True)
class ModelSnapshot:
    """The models of a run at a given step, to evaluate, publish and export."""

    roles: Roles
    weights: Params
    """Parameters of all roles."""
    step: int

    def params(self, role: str | None = None) -> Params:
        """Return the parameters of a role on the devices, by default the trained one's. Those of a
        role on the host are copied by each call, and freed when the caller drops them."""
        role = role or self.roles.trained
        params = self.roles.params(role, self.weights)
        return to_devices(params) if self.roles.roles[role].on_host else params

    def model(self, role: str | None = None) -> Any:
        """Build the role's model around its parameters."""
        return self.roles.rebuild(role or self.roles.trained)(self.params(role))


def stored_as(dtype: Any, storage_dtype: str | None) -> Any:
    """Return the storage dtype of an array of `dtype`: `storage_dtype` for floats, if set."""
    return storage_dtype if storage_dtype and jnp.issubdtype(dtype, jnp.floating) else dtype


def prefix(role: str, params: Params) -> Params:
    """Put parameters behind the role's name, as they are stored among those of all roles."""
    return {f"{role}/{path}": value for path, value in params.items()}


def to_devices(params: Params) -> Params:
    """Copy parameters from the memory of the hosts to the devices, each where it lies."""
    return {
        path: jax.device_put(value, value.sharding.with_memory_kind("device"))
        for path, value in params.items()
    }


def to_host(params: Iterable[tuple[str, Any]]) -> Params:
    """Copy parameters to the memory of their hosts, one at a time: if they are read or drawn as
    they come, the devices never hold more than one."""
    moved = {}
    for path, value in params:
        sharding = value.sharding.with_memory_kind(HOST_MEMORY)
        moved[path] = jax.block_until_ready(jax.device_put(value, sharding))
        del value  # before the next one is made
    return moved


def _open_own(role: Role, seed: int) -> Params:
    """Return the weights of a role with other weights than the trained one, where they wait."""
    if not role.on_host:
        return open_params(role.bundle, seed)
    if role.bundle.adapter is None:
        return to_host(stream_base(role.bundle, seed))
    return to_host(open_params(role.bundle, seed).items())


def _copy(start: Params, dtype: str | None, *, donated: bool) -> Iterator[tuple[str, Any]]:
    """Yield copies of the starting weights, possibly in another dtype. donated: the training step
    donates them, so that a copy must not share their buffers."""
    for path, value in start.items():
        stored = stored_as(value.dtype, dtype)
        if stored != value.dtype:
            yield path, value.astype(stored)
        else:
            yield path, jnp.copy(value) if donated else value


def move_shapes(shapes: Mapping[str, Any], on_host: bool) -> dict[str, Any]:
    """Return shapes as `to_host` places their parameters, if they lie on the host."""
    if not on_host:
        return dict(shapes)
    return {
        path: jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=shape.sharding.with_memory_kind(HOST_MEMORY)
        )
        for path, shape in shapes.items()
    }
