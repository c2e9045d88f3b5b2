"""Schedule-free AdamW: against its reference in float64, in the step, and across a resumed run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.batch import Batch
from jaxtrain.config import OptimConfig
from jaxtrain.core.optimizer import build_optimizer, build_schedule, gradient_point
from jaxtrain.core.parameter_groups import ParameterGroups
from jaxtrain.core.step import State, abstract_state, init_state, make_step
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.runs.checkpoint import Checkpoints

START = {
    "layers.mlp.up.kernel": np.linspace(-1, 1, 24).reshape(2, 3, 4),
    "layers.norm.scale": np.linspace(0.5, 1.5, 6).reshape(2, 3),
    "embed.embedding": np.linspace(1, 2, 6).reshape(2, 3),
}
RATES = {"layers.mlp.up.kernel": np.array([1.0, 3.0], np.float32).reshape(2, 1, 1)}
OPTIM = {
    "name": "schedule_free_adamw", "learning_rate": 0.02, "lr_scheduler": "constant",
    "warmup_steps": 5, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99,
}  # fmt: skip


class Reference:
    """AdamWScheduleFreeReference of the package schedulefree 1.4.1, line by line."""

    def __init__(self, value, rate, decay):
        self.rate, self.decay, self.k, self.weight_sum, self.lr_max = rate, decay, 0, 0.0, -1.0
        self.x = self.y = self.z = value.astype(np.float64)
        self.exp_avg_sq = np.zeros_like(self.x)

    def step(self, grad):
        sched = (self.k + 1) / 5 if self.k < 5 else 1.0
        bias_correction2 = 1 - 0.99 ** (self.k + 1)
        lr = self.rate * sched
        self.lr_max = max(lr, self.lr_max)
        weight = self.lr_max**2.0
        self.weight_sum += weight
        ckp1 = weight / self.weight_sum
        z = self.z - lr * self.decay * self.y
        self.exp_avg_sq = 0.99 * self.exp_avg_sq + 0.01 * grad * grad
        denom = np.sqrt(self.exp_avg_sq / bias_correction2) + 1e-8
        self.z = z - lr * grad / denom
        self.x = (1 - ckp1) * self.x + ckp1 * self.z
        self.y = 0.9 * self.x + 0.1 * self.z
        self.k += 1


def test_twenty_steps_are_those_of_the_reference():
    """With warm-up, decay of matrices alone, and a rate of its own for one layer."""
    optim = OptimConfig(**OPTIM)
    params = {path: jnp.asarray(value, jnp.float32) for path, value in START.items()}
    groups = ParameterGroups(RATES, {})
    optimizer = build_optimizer(optim, build_schedule(optim, 20), params, groups)
    state = optimizer.init(params)

    @jax.jit
    def move(params, state, step):
        point = gradient_point(state, params)
        grads = {path: jnp.cos(value + step) for path, value in point.items()}
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    twins = {}
    for path, value in START.items():
        decay = 0.3 if path == "layers.mlp.up.kernel" else 0.0
        rates = [0.02, 0.06] if path in RATES else [0.02, 0.02]
        twins[path] = list(map(Reference, value, rates, [decay, decay]))
    for step in range(20):
        params, state = move(params, state, step)
        for twin in [twin for layers in twins.values() for twin in layers]:
            twin.step(np.cos(twin.y + step))
    point = gradient_point(state, params)
    for path, layers in twins.items():
        for ours, name in ((params, "x"), (state.z, "z"), (point, "y")):
            expected = np.stack([getattr(twin, name) for twin in layers])
            np.testing.assert_allclose(
                np.asarray(ours[path]), expected, rtol=2e-5, atol=2e-6, err_msg=f"{name} {path}"
            )
        assert np.abs(np.asarray(params[path]) - np.asarray(state.z[path])).max() > 1e-3


def test_what_is_not_trained_has_no_second_copy_and_a_router_bias_no_average():
    shapes = {**START, "layers.router.choice_bias": np.zeros((2, 4))}
    params = {path: jnp.asarray(value, jnp.float32) for path, value in shapes.items()}
    groups = ParameterGroups({}, {"embed.embedding": np.float32(0)})
    optim = OptimConfig(**OPTIM)
    optimizer = build_optimizer(optim, build_schedule(optim, 20), params, groups)
    state = optimizer.init(params)
    assert sorted(state.z) == ["layers.mlp.up.kernel", "layers.norm.scale"]
    updates, _ = optimizer.update(params, state, params)
    assert not np.asarray(updates["embed.embedding"]).any()


@pytest.fixture(scope="module")
def step_of():
    optim = OptimConfig(**OPTIM)
    params = {path: jnp.asarray(value, jnp.float32) for path, value in START.items()}
    optimizer = build_optimizer(optim, build_schedule(optim, 20), params)

    def loss(params, micro):
        total = sum(jnp.sum(jnp.sin(value) ** 2) for value in params.values())
        return {"nll": total * jnp.sum(micro.weights["nll"])}, {}

    return optimizer, make_step(lambda params: params, loss, {"nll": 1.0}, optimizer, 1.0)


def spread():
    place = jax.sharding.NamedSharding(make_mesh(fsdp=4), jax.sharding.PartitionSpec())
    return {p: jax.device_put(jnp.asarray(v, jnp.float32), place) for p, v in START.items()}


@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(step_of, tmp_path, offload):
    """The loss of a step is that at y; a step that is not finite changes nothing."""
    optimizer, step = step_of
    tokens = jnp.zeros((1, 4, 2), jnp.int32)
    batch = Batch(tokens, tokens, tokens, tokens, {"nll": jnp.ones((1, 4, 2))})
    state = init_state(spread(), optimizer, offload=offload)
    for _ in range(3):
        state, _ = step(state, batch, {}, True)
    store = Checkpoints(tmp_path)
    store.save(3, state.tree(), {})
    point = gradient_point(state.opt_state, state.params)
    expected = sum(float(jnp.sum(jnp.sin(value) ** 2)) for value in point.values())
    state, output = step(state, batch, {}, True)
    np.testing.assert_allclose(float(output.metrics["loss"][0]), expected, rtol=1e-5)
    straight, _ = step(state, batch, {}, False)
    shapes = abstract_state(spread(), optimizer, offload=offload)
    read = State.of_tree(store.restore(shapes.tree()).arrays)
    store.close()
    read, _ = step(read, batch, {}, True)
    for left, right in zip(jax.tree.leaves(straight), jax.tree.leaves(read), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
