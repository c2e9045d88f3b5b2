"""A single optimizer step as a pure function: exact under accumulation and on any mesh.

Denominators are summed over the whole step before any microstep runs; microsteps add up sums, never
means. So A microsteps of B rows give the update of one batch of A*B rows, whatever the number of
trained tokens in each.

    Backward  zeros ─> sums ─> add_micro (once a microstep, into the same buffers) ─> sums
    make_update                                                            (state, sums) ─> state

The host makes the loop, so that no program depends on A, and a microstep's arrays are on the
devices only while it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.batch import Batch
from jaxtrain.core.losses.balance import LOADS, count_real
from jaxtrain.core.optimizer import AverageState, clip, gradient_point
from jaxtrain.distributed.feed import feed, to_host
from jaxtrain.distributed.mesh import HOST_MEMORY, require_host_memory
from jaxtrain.distributed.sharding import fit
from jaxtrain.layers.noise import row_rng_bits
from jaxtrain.models.parameters import Params

SPACE = jax.memory.Space


class State(NamedTuple):
    """Everything that training changes: the content of a checkpoint besides the data's cursor."""

    step: jax.Array
    """int32 number of updates made."""
    params: Params
    """Trained parameters by path, in the dtype of the masters; of a schedule-free optimizer their
    average."""
    opt_state: Any
    """The optimizer's own state, sharded like the parameters."""
    copies: Params = {}
    """Moving copies of the trained parameters, "role/path", and parameters that are not trained, by
    path; the step does not change them."""

    def tree(self) -> dict[str, Any]:
        """Return the state as a checkpoint names its arrays: "params/...", "reference/..."."""
        arrays = {"step": self.step, "params": self.params, "opt_state": self.opt_state}
        return {**arrays, **self.copies}

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> "State":
        """Return the state of what `tree` returned."""
        arrays = {name: tree[name] for name in ("step", "params", "opt_state")}
        copies = {name: value for name, value in tree.items() if name not in arrays}
        return cls(**arrays, copies=copies)


class StepNoise(NamedTuple):
    """Noise that a step draws for the tokens that it trains."""

    seed: int
    apply: Callable[[Any, jax.Array], Any]
    """(models that `build` made, random bits uint32 [B] of the rows) -> the models as they run in
    training; see layers.noise."""


class StepOutput(NamedTuple):
    """Small arrays that the host reads one step late."""

    metrics: dict[str, tuple[jax.Array, jax.Array]]
    """(sum, weight) pairs over the whole step; "loss" among them."""
    grad_norm: jax.Array
    """Global norm before clipping, without that of a head that guesses further tokens."""
    micro_loss: tuple[jax.Array, ...]
    """Share of each of A microsteps in the loss: shows which one was not finite."""
    finite: jax.Array
    """False: loss or gradients were not finite, here or in the step before, and the state is
    unchanged."""


def abstract_state(
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    copies: Mapping[str, Any] | None = None,
    offload: bool = False,
) -> State:
    """Return shapes and shardings of a State. params, copies: arrays or ShapeDtypeStructs with
    shardings. offload: the optimizer's slots are in the pinned memory of the hosts; UserError where
    there is none.

    An optimizer slot of a parameter's path and shape is sharded like the parameter, one whose last
    axis is shorter (scales of blocks) as similarly as it divides; other slots are replicated.
    """
    sample = next(iter(params.values())).sharding
    replicated = jax.sharding.NamedSharding(sample.mesh, jax.sharding.PartitionSpec())

    if offload:
        require_host_memory(sample.mesh, "optim.offload")

    def place_slot(path, slot):
        names = [str(getattr(part, "key", "")) for part in path]
        owner = next((params[name] for name in reversed(names) if name in params), None)
        if owner is None or not slot.shape or owner.shape[:-1] != slot.shape[:-1]:
            sharding = replicated
        else:
            sharding = fit(owner.sharding, slot.shape)
            sharding = sharding.with_memory_kind(HOST_MEMORY) if offload else sharding
        return jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=sharding)

    slots = jax.eval_shape(optimizer.init, params)
    shapes = {path: shape_of(value) for path, value in params.items()}
    tree = {
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated),
        "params": shapes,
        "opt_state": jax.tree_util.tree_map_with_path(place_slot, slots),
    }
    return State.of_tree({**tree, **(copies or {})})


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    copies: Params | None = None,
    offload: bool = False,
) -> State:
    """Return the state before the first step; offload: as for abstract_state."""
    shapes = abstract_state(params, optimizer, offload=offload)
    places = jax.tree.map(lambda shape: shape.sharding, shapes.opt_state)
    step = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=shapes.step.sharding)()
    opt_state = jax.jit(optimizer.init, out_shardings=places)(params)
    return State(step, params, opt_state, copies or {})


def fetch_slots(opt_state: Any, after: jax.Array) -> tuple[Any, Callable[[Any], Any]]:
    """Return (optimizer slots on the devices, the function that moves them back), inside of jit.

    Slots on the host are not fetched before `after` is computed, so that they take no device
    memory while activations do.
    """
    on_host = jax.tree.map(lambda x: jax.typeof(x).memory_space == SPACE.Host, opt_state)
    if not any(jax.tree.leaves(on_host)):
        return opt_state, lambda slots: slots
    # Without the barrier XLA schedules the copies at the start of the program.
    delayed, _ = jax.lax.optimization_barrier((opt_state, after))

    def send(tree: Any, space: Any) -> Any:
        return jax.tree.map(lambda x, host: jax.device_put(x, space) if host else x, tree, on_host)

    return send(delayed, SPACE.Device), lambda slots: send(slots, SPACE.Host)


def shape_of(array) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


class StepSums(NamedTuple):
    """Sums over the microsteps of a step so far; the next microstep gets their buffers."""

    grads: Params
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    loss: jax.Array
    finite: jax.Array
    """False: the loss of a microstep was not finite."""
    count: jax.Array
    """uint32 number of microsteps."""


def make_step(
    build: Callable[[Params], Any],
    loss: Callable,
    coef: Mapping[str, float],
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None,
    update_biases: Callable[[Params, jax.Array], Params] | None = None,
    noise: StepNoise | None = None,
) -> "TrainStep":
    """Return the step `(state, batch [A, B, T], frozen={}, fine=True) -> (state, output)`: a
    `Backward` and the update of `make_update`.

    The state is donated. `frozen` are the parameters that are not trained, by path. `fine` is
    `finite` of the step before.
    """
    return TrainStep(
        Backward(build, loss, coef, noise), make_update(optimizer, max_grad_norm, update_biases)
    )


class Backward:
    """Loss, metrics and gradients of microsteps, added up: `open` returns the two programs."""

    def __init__(
        self,
        build: Callable[[Params], Any],
        loss: Callable,
        coef: Mapping[str, float],
        noise: StepNoise | None = None,
        apart: bool = False,
    ):
        """build: makes the first argument of the loss, a model or models by role, of all
        parameters. Without `noise` the models run as in evaluation. apart: metrics are no pairs to
        be added up but arrays of any shape, which each microstep returns."""
        self.build, self.loss, self.coef = build, loss, dict(coef)
        self.noise, self.apart = noise, apart
        self._opened: dict[Any, tuple[Callable, Callable]] = {}

    def weigh(self, params: Params, frozen: Params, micro: Batch, denoms, rng_bits: Any = None):
        """Return the loss of a microstep [B, T], and its metrics."""
        models = self.build({**frozen, **params})
        if self.noise is not None:
            assert rng_bits is not None
            models = self.noise.apply(models, rng_bits)
        sums, metrics = self.loss(models, micro)
        # The denominators are those of the whole step, so gradients of microsteps simply add up.
        total = sum(self.coef[name] * value / denoms[name] for name, value in sums.items())
        return total, metrics

    def differentiate(self, params: Params, frozen: Params, batch: Batch, step: Any, count: Any):
        """Return loss, metrics and gradients of a batch [1, B, T], the count-th microstep of a
        step."""
        denoms = {name: denominator(batch, name) for name in self.coef}
        micro = jax.tree.map(lambda leaf: leaf[0], batch)
        rng_bits = None
        if self.noise is not None:
            # A function of step and row alone, so that accumulation and mesh draw the same noise.
            rows = jnp.arange(micro.tokens.shape[0], dtype=jnp.uint32)
            rng_bits = row_rng_bits(self.noise.seed, step, count * np.uint32(rows.size) + rows)
        grad = jax.value_and_grad(self.weigh, has_aux=True)
        return grad(params, frozen, micro, denoms, rng_bits)

    def add_micro(
        self, sums: StepSums, params: Params, frozen: Params, batch: Batch, step: jax.Array
    ) -> tuple[StepSums, jax.Array, Any]:
        """Return the sums with those of one more microstep, its loss, and what stays apart."""
        (total, metrics), grads = self.differentiate(params, frozen, batch, step, sums.count)
        metrics, apart = ({}, metrics) if self.apart else (metrics, {})
        sums = StepSums(
            grads=jax.tree.map(jnp.add, sums.grads, grads),
            metrics=join_metrics(sums.metrics, metrics),
            loss=sums.loss + total,
            finite=sums.finite & jnp.isfinite(total),
            count=sums.count + 1,
        )
        return sums, total, apart

    def open(self, params: Params, frozen: Params, micro: Batch, step: jax.Array):
        """Return the jitted (zeros of the sums, `add_micro`) for arrays like these."""
        key = jax.tree.structure((frozen, micro)), micro.tokens.shape
        if key not in self._opened:
            # The sums need the shapes of metrics before the first microstep.
            count = jax.ShapeDtypeStruct((), jnp.uint32)
            shapes = jax.eval_shape(self.differentiate, params, frozen, micro, step, count)
            (loss, metrics), _ = shapes
            sample = next(iter(params.values())).sharding
            everywhere = sample
            if isinstance(sample, jax.sharding.NamedSharding):
                everywhere = jax.sharding.NamedSharding(sample.mesh, jax.sharding.PartitionSpec())

            def zeros() -> StepSums:
                return StepSums(
                    grads={path: jnp.zeros(x.shape, x.dtype) for path, x in params_shapes.items()},
                    metrics={} if self.apart else empty_metrics(metrics),
                    loss=jnp.zeros((), loss.dtype),
                    finite=jnp.ones((), bool),
                    count=jnp.zeros((), jnp.uint32),
                )

            params_shapes = {path: shape_of(value) for path, value in params.items()}
            places = jax.tree.map(lambda _: everywhere, jax.eval_shape(zeros))
            places = places._replace(grads={path: x.sharding for path, x in params_shapes.items()})
            # The sums come back where they lay: else the second microstep would be another program.
            self._opened[key] = (
                jax.jit(zeros, out_shardings=places),
                jax.jit(
                    self.add_micro, donate_argnums=0, out_shardings=(places, everywhere, everywhere)
                ),
            )
        return self._opened[key]


def make_update(
    optimizer: optax.GradientTransformation,
    max_grad_norm: float | None,
    update_biases: Callable[[Params, jax.Array], Params] | None = None,
) -> Callable[[State, StepSums, Any], tuple[State, StepOutput]]:
    """Return `(state, sums, fine) -> (state, output)`, not jitted. update_biases: changes the
    updated parameters by the load of experts [layers, E] over the whole step, which the sums then
    have among their metrics."""

    def update(state: State, sums: StepSums, fine: jax.Array | bool) -> tuple[State, StepOutput]:
        metrics = dict(sums.metrics)
        # A head that guesses further tokens must not change how far the model moves.
        head_grads = {path: g for path, g in sums.grads.items() if path.startswith("mtp.")}
        model_grads = {path: g for path, g in sums.grads.items() if path not in head_grads}
        model_grads, norm = clip(model_grads, max_grad_norm)
        head_grads, head_norm = clip(head_grads, max_grad_norm)
        grads = {**model_grads, **head_grads}
        # The host reads a step after it has dispatched the next one. After a bad step, the next one
        # must change nothing either, or the state before the bad step would be lost: hence `fine`.
        finite = fine & jnp.isfinite(norm) & jnp.isfinite(head_norm) & sums.finite
        # Behind the norm, the last result of the backward pass.
        slots, put_back = fetch_slots(state.opt_state, norm)
        state = state._replace(opt_state=slots)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        if update_biases is not None:
            params = update_biases(params, metrics.pop(LOADS)[0])
        new = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        # A select, not a branch: it costs no synchronization, and a bad step leaves the state that
        # a checkpoint may still save. The donated buffers are those of the old state either way.
        guarded_state = jax.tree.map(
            lambda after, before: jnp.where(finite, after, before), new, state
        )
        guarded_state = guarded_state._replace(opt_state=put_back(guarded_state.opt_state))
        metrics = {"loss": (sums.loss, jnp.ones((), sums.loss.dtype)), **metrics}
        return guarded_state, StepOutput(metrics, norm, (), finite)

    return update


class TrainStep:
    """A step of any number of microsteps in three programs: zeros, a microstep, the update."""

    def __init__(self, backward: Backward, update: Callable):
        self.backward, self._update = backward, update
        self.gradient_point = jax.jit(gradient_point)
        self.update = jax.jit(update, donate_argnums=0)
        self.single = jax.jit(self.single_step, donate_argnums=0)
        """The step of a batch [1, B, T] on the devices."""
        self.prefers_single = False
        """True: a batch of one microstep takes the program `single` instead of those that any
        number takes: XLA fuses and schedules it better, and it keeps no accumulator."""

    def single_step(
        self,
        state: State,
        batch: Batch,
        frozen: Params | None = None,
        fine: jax.Array | bool = True,
    ) -> tuple[State, StepOutput]:
        # Arguments of the program, never constants in it, and outside of what is differentiated.
        frozen, count = {**(frozen or {}), **state.copies}, jnp.zeros((), jnp.uint32)
        point = gradient_point(state.opt_state, state.params)
        (total, metrics), grads = self.backward.differentiate(
            point, frozen, batch, state.step, count
        )
        sums = StepSums(grads, metrics, total, jnp.isfinite(total), count)
        state, output = self._update(state, sums, fine)
        return state, output._replace(micro_loss=(total,))

    def __call__(
        self,
        state: State,
        batch: Batch,
        frozen: Params | None = None,
        fine: jax.Array | bool = True,
    ) -> tuple[State, StepOutput]:
        """Make a step; batch: arrays of the host, or of the devices as `feed` places them."""
        mesh = getattr(next(iter(state.params.values())).sharding, "mesh", None)
        count = batch.tokens.shape[0]
        if count == 1 and self.prefers_single:
            return self.single(state, feed(batch, mesh), frozen, fine)
        frozen = {**(frozen or {}), **state.copies}
        # Before any microstep: the loss of each needs the weights of all.
        batch = batch._replace(denoms=count_denominators(batch, tuple(self.backward.coef), mesh))
        point = state.params
        if isinstance(state.opt_state, AverageState):
            point = self.gradient_point(state.opt_state, point)
        sums, totals = None, []
        for index in range(count):
            micro = feed(take_micro(batch, index), mesh)
            arguments = point, frozen, micro, state.step
            if sums is None:
                start, add_micro = self.backward.open(*arguments)
                sums = start()
            sums, total, _ = add_micro(sums, *arguments)
            totals.append(total)
        state, output = self.update(state, sums, fine)
        return state, output._replace(micro_loss=tuple(totals))


def take_micro(batch: Batch, index: int) -> Batch:
    """Return one microstep [1, B, T] of a batch [A, B, T]."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf[index : index + 1]
        return leaf if len(leaf) == 1 else slice_micro(leaf, jax.device_put(np.int32(index)))

    return jax.tree.map(take, batch)


@jax.jit
def slice_micro(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return x[index : index + 1]; the index is no constant of the program."""
    return jax.lax.dynamic_slice_in_dim(x, index, 1)


EXTREMES = {
    **dict.fromkeys(("max", "high_max", "max_reward", "max_abs"), (jnp.maximum, -jnp.inf)),
    **dict.fromkeys(("min", "low_min", "min_reward"), (jnp.minimum, jnp.inf)),
}
"""(join, neutral element) of metrics named ".../max", ".../low_min" and so on over microsteps; all
other metrics add up."""


def join_metrics(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join (sum, weight) pairs of two microsteps; an extreme has weight 1, or 0 if empty."""
    joined = {}
    for name, (value, weight) in second.items():
        join, _ = EXTREMES.get(name.rpartition("/")[2], (jnp.add, 0.0))
        weigh = jnp.add if join is jnp.add else jnp.maximum
        joined[name] = (join(first[name][0], value), weigh(first[name][1], weight))
    return joined


def empty_metrics(shapes: dict[str, Any]) -> dict[str, Any]:
    """Return the neutral element of join_metrics. shapes: a ShapeDtypeStruct for each number."""
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
    """Return the divisor of a component's sum: its constant, or the step's total weight."""
    if component in batch.denoms:
        return jnp.asarray(batch.denoms[component]).reshape(-1)[0]
    total = total_weight(batch, component)
    # A step without trained tokens has loss 0, not NaN.
    return jnp.where(total > 0, total, 1.0)


def count_denominators(batch: Batch, components: Sequence[str], mesh: Any) -> dict[str, Any]:
    """Return `denominator` of each component on the host or the devices, [A] times.

    Counts are exact on the host. The sum of other weights depends on its order, so a small program
    of the whole step's weights makes it, as in a step of one program.
    """
    denoms = dict(batch.denoms)
    for name in (name for name in components if name not in denoms):
        weight = batch.weights.get(name)
        host = None if weight is None else to_host(weight)
        if host is None or (host == np.rint(host)).all():
            total = count_real(batch) if host is None else host.sum(dtype=np.float64)
            dtype = np.dtype(np.float32) if host is None else host.dtype
            value: Any = np.asarray(total if total > 0 else 1.0, dtype)
        else:
            placed = feed(Batch(*[batch.tokens] * 4, {name: weight}), mesh)
            value = np.asarray(to_host(sum_weights(placed.weights[name])))
        denoms[name] = np.full(len(batch.tokens), value)
    return denoms


@jax.jit
def sum_weights(weight: jax.Array) -> jax.Array:
    """Return the sum of a step's weights, 1 if that is not positive."""
    total = jnp.sum(weight)
    return jnp.where(total > 0, total, 1.0)


def total_weight(batch: Batch, component: str) -> jax.Array:
    """Return the sum of a component's weights; a component without weights, such as the balance of
    experts, counts every token that is not padding."""
    weighted = component in batch.weights
    return jnp.sum(batch.weights[component]) if weighted else count_real(batch)


def make_eval(build: Callable[[Params], Any], loss: Callable) -> Callable:
    """Return the jitted `(params, batch [B, T]) -> {component or metric: (sum, weight)}`."""

    def evaluate(params: Params, batch: Batch):
        sums, metrics = loss(build(params), batch)
        pairs = {
            name: (value, batch.denoms[name] if name in batch.denoms else total_weight(batch, name))
            for name, value in sums.items()
        }
        return {**pairs, **metrics}

    return jax.jit(evaluate)
