"""One optimizer step as a pure function: exact under accumulation and on any mesh.

Denominators are summed over the whole step, inside the compiled program, before any microstep runs;
microsteps add up sums, never means. So A microsteps of B rows give the update of one batch of A*B
rows, whatever the number of trained tokens in each.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.batch import Batch
from jaxtrain.core.losses.balance import LOADS, count_real
from jaxtrain.distributed.sharding import fit
from jaxtrain.errors import UserError
from jaxtrain.layers.noise import row_rng_bits
from jaxtrain.models.parameters import Params

HOST, SPACE = "pinned_host", jax.memory.Space


class State(NamedTuple):
    """Everything that training changes, and all that a checkpoint must hold besides the data's
    cursor."""

    step: jax.Array
    """int32 number of updates made."""
    params: Params
    """Trained parameters by path, in the masters' dtype; frozen ones are no part of it."""
    opt_state: Any
    """The optimizer's own state, sharded like the parameters."""
    copies: Params = {}
    """Moving copies of the trained parameters, "role/path"; the step leaves them as they are."""

    def tree(self) -> dict[str, Any]:
        """The state as a checkpoint names its arrays: "params/...", "reference/..."."""
        arrays = {"step": self.step, "params": self.params, "opt_state": self.opt_state}
        return {**arrays, **self.copies}

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> "State":
        """The state that `tree` made this of."""
        arrays = {name: tree[name] for name in ("step", "params", "opt_state")}
        copies = {name: value for name, value in tree.items() if name not in arrays}
        return cls(**arrays, copies=copies)


class StepNoise(NamedTuple):
    """What a step draws for the tokens that it trains."""

    seed: int
    give: Callable[[Any, jax.Array], Any]
    """(what `build` made, rng_bits uint32 [B] of the rows) -> the same, to be run in training; see
    layers.noise."""


class StepOutput(NamedTuple):
    """Small arrays to be read on the host, one step late."""

    metrics: dict[str, tuple[jax.Array, jax.Array]]
    """(sum, weight) pairs over the whole step; "loss" among them."""
    grad_norm: jax.Array
    """Global norm before clipping."""
    micro_loss: jax.Array
    """[A] share of each microstep in the loss: tells which one was not finite."""
    finite: jax.Array
    """False: loss or gradients were not finite, here or in the step before, and the state was left
    as it was."""


def abstract_state(
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    copies: Mapping[str, Any] | None = None,
    offload: bool = False,
) -> State:
    """Shapes and places of a State; params, copies: arrays or ShapeDtypeStructs with shardings.
    offload: the optimizer's slots lie in the pinned memory of the hosts; UserError where there is
    none.

    An optimizer slot of a parameter's path and shape lies where the parameter does, one whose last
    axis is shorter (scales of blocks) as near to that as it divides; the rest is replicated.
    """
    sample = next(iter(params.values())).sharding
    replicated = jax.sharding.NamedSharding(sample.mesh, jax.sharding.PartitionSpec())

    if offload:
        require_host_memory(sample.mesh)

    def place(path, slot):
        names = [str(getattr(part, "key", "")) for part in path]
        owner = next((params[name] for name in reversed(names) if name in params), None)
        if owner is None or not slot.shape or owner.shape[:-1] != slot.shape[:-1]:
            sharding = replicated
        else:
            sharding = fit(owner.sharding, slot.shape)
            sharding = sharding.with_memory_kind(HOST) if offload else sharding
        return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=sharding)

    slots = jax.eval_shape(optimizer.init, params)
    shapes = {path: shape_of(value) for path, value in params.items()}
    tree = {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        "params": shapes,
        "opt_state": jax.tree_util.tree_map_with_path(place, slots),
    }
    return State.of_tree({**tree, **(copies or {})})


def require_host_memory(mesh: jax.sharding.Mesh) -> None:
    """UserError where a device cannot reach pinned memory of its host."""
    for device in mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise UserError(
                f"optim.offload needs devices that reach pinned memory of their host;"
                f" {device.device_kind} has {', '.join(kinds)}: remove it"
            )


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    copies: Params | None = None,
    offload: bool = False,
) -> State:
    """The state before the first step; offload: as for abstract_state."""
    shapes = abstract_state(params, optimizer, offload=offload)
    places = jax.tree.map(lambda shape: shape.sharding, shapes.opt_state)
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=shapes.step.sharding)()
    opt_state = jax.jit(optimizer.init, out_shardings=places)(params)
    return State(step, params, opt_state, copies or {})


def mix_copies(state: State, role: str, share: float) -> State:
    """The state with `share` of its parameters mixed into a role's copy (arXiv 2404.09656)."""
    mixed = {
        f"{role}/{path}": ((1.0 - share) * copy + share * value).astype(copy.dtype)
        for path, value in state.params.items()
        for copy in [state.copies[f"{role}/{path}"]]
    }
    return state._replace(copies={**state.copies, **mixed})


def bring(opt_state: Any, behind: jax.Array) -> tuple[Any, Callable[[Any], Any]]:
    """(slots of an optimizer on the devices, what puts them back where they were), inside of jit.

    What lies on the host is not fetched before `behind` is computed, so that it takes no memory
    while activations do.
    """
    away = jax.tree.map(lambda x: jax.typeof(x).memory_space == SPACE.Host, opt_state)
    if not any(jax.tree.leaves(away)):
        return opt_state, lambda after: after
    waiting, _ = jax.lax.optimization_barrier((opt_state, behind))

    def send(tree: Any, space: Any) -> Any:
        return jax.tree.map(lambda x, far: jax.device_put(x, space) if far else x, tree, away)

    return send(waiting, SPACE.Device), lambda after: send(after, SPACE.Host)


def shape_of(array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and place of an array, without its values."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def make_step(
    build: Callable[[Params], Any],
    loss: Callable,
    coef: Mapping[str, float],
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None,
    follow: Callable[[Params, jax.Array], Params] | None = None,
    draws: StepNoise | None = None,
) -> Callable[..., tuple[State, StepOutput]]:
    """Compile-ready `(state, batch [A, B, T], frozen={}, fine=True) -> (state, output)`.

    build: makes of all parameters what the loss takes first, a model or models by role. The state
    is donated. `frozen` are the parameters that are not trained, by path: arguments, so that they
    are never constants of the program, and never differentiated. `fine`: `finite` of the step
    before. Who reads a step late has dispatched the next one already; it then changes nothing, and
    the state is still that from before the bad step. `follow` changes the updated parameters by the
    load of experts [layers, E] over the whole step, which the loss then has among its metrics.
    Without `draws` the models are run as in evaluation.
    """

    def micro_loss(params: Params, frozen: Params, micro: Batch, denoms, rng_bits: Any):
        models = build({**frozen, **params})
        if draws is not None:
            assert rng_bits is not None
            models = draws.give(models, rng_bits)
        sums, metrics = loss(models, micro)
        total = sum(coef[name] * value / denoms[name] for name, value in sums.items())
        return total, metrics

    def step(
        state: State,
        batch: Batch,
        frozen: Params | None = None,
        fine: jax.Array | bool = True,
    ) -> tuple[State, StepOutput]:
        frozen = {**(frozen or {}), **state.copies}
        denoms = {name: denominator(batch, name) for name in coef}
        grad = jax.value_and_grad(micro_loss, has_aux=True)

        rng_bits_AB = None
        if draws is not None:
            rows = jnp.arange(batch.tokens[..., 0].size, dtype=jnp.uint32)
            rng_bits_AB = row_rng_bits(draws.seed, state.step, rows.reshape(batch.tokens.shape[:2]))

        def add_micro(summed, part):
            micro, rng_bits = part
            (total, metrics), grads = grad(state.params, frozen, micro, denoms, rng_bits)
            grads = jax.tree.map(jnp.add, summed[0], grads)
            return (grads, join_metrics(summed[1], metrics)), total

        if batch.tokens.shape[0] == 1:
            only, rng_bits = jax.tree.map(lambda leaf: leaf[0], (batch, rng_bits_AB))
            (total, metrics), grads = grad(state.params, frozen, only, denoms, rng_bits)
            micro_losses = total[None]
        else:
            first, rng_bits = jax.tree.map(lambda leaf: leaf[0], (batch, rng_bits_AB))
            shapes = jax.eval_shape(grad, state.params, frozen, first, denoms, rng_bits)
            (_, metric_shapes), grad_shapes = shapes
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), grad_shapes)
            start = (zeros, empty_metrics(metric_shapes))
            (grads, metrics), micro_losses = jax.lax.scan(add_micro, start, (batch, rng_bits_AB))

        norm = optax.tree.norm(grads)
        finite = fine & jnp.isfinite(norm) & jnp.isfinite(micro_losses).all()
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        optimizer_state, put_back = bring(state.opt_state, norm)
        state = state._replace(opt_state=optimizer_state)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        if follow is not None:
            metrics = dict(metrics)
            params = follow(params, metrics.pop(LOADS)[0])
        new = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        # A bad step must not spoil what a checkpoint may still save.
        guarded_state = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before), new, state
        )
        guarded_state = guarded_state._replace(opt_state=put_back(guarded_state.opt_state))
        weight = jnp.ones((), micro_losses.dtype)
        metrics = {"loss": (jnp.sum(micro_losses), weight), **metrics}
        return guarded_state, StepOutput(metrics, norm, micro_losses, finite)

    return jax.jit(step, donate_argnums=0)


EXTREMES = {
    **dict.fromkeys(("max", "high_max", "max_reward"), (jnp.maximum, -jnp.inf)),
    **dict.fromkeys(("min", "low_min", "min_reward"), (jnp.minimum, jnp.inf)),
}
"""How metrics named ".../max", ".../low_min" and so on are joined over microsteps; all others add
up."""


def join_metrics(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """(sum, weight) pairs of two microsteps as one; an extreme has weight 1, or 0 if empty."""
    joined = {}
    for name, (value, weight) in second.items():
        join, _ = EXTREMES.get(name.rpartition("/")[2], (jnp.add, 0.0))
        weigh = jnp.add if join is jnp.add else jnp.maximum
        joined[name] = (join(first[name][0], value), weigh(first[name][1], weight))
    return joined


def empty_metrics(shapes: dict[str, Any]) -> dict[str, Any]:
    """What join_metrics leaves as it is; shapes: a ShapeDtypeStruct for each number."""
    return {
        name: (
            jnp.full(
                value.shape, EXTREMES.get(name.rpartition("/")[2], (None, 0.0))[1], value.dtype
            ),
            jnp.zeros(weight.shape, weight.dtype),
        )
        for name, (value, weight) in shapes.items()
    }


def denominator(batch: Batch, component: str) -> jax.Array:
    """What a component's sum is divided by: its constant, or the step's total weight."""
    if component in batch.denoms:
        return jnp.asarray(batch.denoms[component]).reshape(-1)[0]
    total = total_weight(batch, component)
    return jnp.where(total > 0, total, 1.0)


def total_weight(batch: Batch, component: str) -> jax.Array:
    """Sum of a component's weights; one without weights of its own, such as the balance of
    experts, counts every token that is not padding."""
    weighted = component in batch.weights
    return jnp.sum(batch.weights[component]) if weighted else count_real(batch)


def make_eval(build: Callable[[Params], Any], loss: Callable) -> Callable:
    """Compile-ready `(params, batch [B, T]) -> {component or metric: (sum, weight)}`, no grads."""

    def evaluate(params: Params, batch: Batch):
        sums, metrics = loss(build(params), batch)
        pairs = {
            name: (value, batch.denoms[name] if name in batch.denoms else total_weight(batch, name))
            for name, value in sums.items()
        }
        return {**pairs, **metrics}

    return jax.jit(evaluate)
