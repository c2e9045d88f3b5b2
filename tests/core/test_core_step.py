"""Optimizer step: exact under accumulation and on meshes, robust to non-finite values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.batch import Batch, check_batch
from jaxtrain.core.losses.balance import count_real
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import denominator, init_state, make_eval, make_step
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def documents_batch(rows=8, length=24, seed=0):
    """[1, rows, length]: three documents a row, an uneven number of trained tokens in each."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(3, length - 3), (rows, 2)), axis=1)
    fields = {name: np.zeros((rows, length), np.int32) for name in ("positions", "prev", "until")}
    weights = (rng.random((rows, length)) < rng.random((rows, 1))).astype(np.float32)
    for row in range(rows):
        for start, stop in zip([0, *cuts[row]], [*cuts[row], length], strict=True):
            fields["positions"][row, start:stop] = np.arange(stop - start)
            fields["prev"][row, start:stop] = np.arange(start, stop) - 1
            if stop > start:
                fields["prev"][row, start] = -1
                weights[row, start] = 0
            fields["until"][row, start:stop] = stop
    tokens = rng.integers(0, 64, (rows, length), dtype=np.int32)
    batch = Batch(tokens=tokens, weights={"nll": weights}, **fields)
    check_batch(batch)
    return jax.tree.map(lambda leaf: leaf[None], batch)


def regroup(batch, microsteps):
    return jax.tree.map(lambda leaf: leaf.reshape(microsteps, -1, leaf.shape[-1]), batch)


@functools.cache
def open_model(mesh):
    """(parameters, rebuild) of the same random model on a mesh."""
    model = build.init(families.config_from_hf(ARCHITECTURE), 0, mesh=mesh)
    return split_model(model)


@functools.cache
def open_step(mesh, optimizer, max_grad_norm):
    """Compiled once for every shape of a batch."""
    return make_step(open_model(mesh)[1], nll_loss, {"nll": 1.0}, optimizer, max_grad_norm)


SGD, ADAM = optax.sgd(1.0), optax.adamw(1e-2)


def start_params():
    """Initial state of run_step."""
    return jax.device_get(open_model(make_mesh(jax.devices()[:1]))[0])


def run_step(batch, mesh=None, optimizer=SGD, max_grad_norm=0.5, params_of=None):
    mesh = mesh or make_mesh(jax.devices()[:1])
    with jax.set_mesh(mesh):
        params = jax.tree.map(jnp.copy, open_model(mesh)[0])  # the step donates them
        if params_of:
            params = params_of(params)
        step = open_step(mesh, optimizer, max_grad_norm)
        state, output = step(init_state(params, optimizer), feed(batch, mesh))
        return jax.device_get(state), jax.device_get(output)


def assert_same(left, right, tolerance):
    for path, value in left.items():
        scale = np.abs(value).max() + 1e-6
        np.testing.assert_allclose(value / scale, right[path] / scale, atol=tolerance, err_msg=path)


@pytest.mark.parametrize(
    "microsteps", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_accumulation_equals_the_large_batch(microsteps):
    batch = documents_batch()
    whole, whole_out = run_step(batch)
    split, split_out = run_step(regroup(batch, microsteps))
    # fp32 sums in another order.
    assert_same(whole.params, split.params, 1e-6)
    loss, weight = split_out.metrics["loss"]
    np.testing.assert_allclose(loss / weight, whole_out.metrics["loss"][0], rtol=1e-6)
    np.testing.assert_allclose(split_out.grad_norm, whole_out.grad_norm, rtol=1e-5)
    assert len(split_out.micro_loss) == microsteps


@pytest.fixture
def compilations():
    """Programs that were compiled or read from the cache on disk since, in a list."""
    compiled = []

    def listen(event: str, seconds: float, **values) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(values)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


def test_one_program_whatever_the_number_of_microsteps(compilations):
    """Arrays of the host and of the devices; the second step compiles nothing that depends on it
    but the slice of an array that lies on the devices already."""
    mesh = make_mesh(jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, rebuild = open_model(mesh)
        step = make_step(rebuild, nll_loss, {"nll": 1.0}, ADAM, 0.5)
        state = init_state(jax.tree.map(jnp.copy, params), ADAM)
        counts = {}
        for microsteps in (2, 1, 3, 4, 6):
            batch = regroup(documents_batch(rows=2 * microsteps), microsteps)
            before = len(compilations)
            state, output = step(state, batch)
            assert output.finite and len(output.micro_loss) == microsteps
            counts[microsteps] = len(compilations) - before
    assert counts[2] > 0 and not any(counts[n] for n in (1, 3, 4, 6)), counts


@pytest.mark.slow
def test_a_mesh_equals_one_device():
    batch = regroup(documents_batch(), 2)
    one, one_out = run_step(batch, optimizer=ADAM)
    many, many_out = run_step(batch, make_mesh(data=2, fsdp=2), optimizer=ADAM)
    np.testing.assert_allclose(many_out.grad_norm, one_out.grad_norm, rtol=1e-5)
    # adam's first update is the gradient's sign, so near-zero gradients may flip: compare
    # the moments, which are linear in the gradients.
    for path in one.params:
        left, right = one.opt_state[0].mu[path], many.opt_state[0].mu[path]
        np.testing.assert_allclose(left, right, atol=1e-6 * np.abs(left).max(), err_msg=path)


def test_loss_is_the_mean_over_trained_tokens():
    batch = documents_batch()
    _, output = run_step(batch)
    mesh = make_mesh(jax.devices()[:1])
    with jax.set_mesh(mesh):
        params, rebuild = open_model(mesh)
        model = rebuild(params)
        micro = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), batch)
        logits = model.logits(model.hidden(micro).hidden)
    logp = jax.nn.log_softmax(np.asarray(logits, np.float64))
    weight = batch.weights["nll"][0]
    total = sum(
        -weight[b, t] * logp[b, batch.prev[0, b, t], batch.tokens[0, b, t]]
        for b, t in zip(*np.nonzero(weight), strict=True)
    )
    np.testing.assert_allclose(output.metrics["loss"][0], total / weight.sum(), rtol=1e-5)


@pytest.mark.slow
def test_clipping_bounds_the_update():
    batch = documents_batch()
    free, output = run_step(batch, max_grad_norm=None)
    clipped, _ = run_step(batch, max_grad_norm=0.01)
    start = start_params()
    moved = jax.tree.map(lambda a, b: a - b, clipped.params, start)
    np.testing.assert_allclose(optax.tree.norm(moved), 0.01, rtol=1e-3)
    moved = jax.tree.map(lambda a, b: a - b, free.params, start)
    np.testing.assert_allclose(optax.tree.norm(moved), output.grad_norm, rtol=1e-3)


def test_a_step_that_is_not_finite_leaves_the_state_alone():
    def poison(params):
        return {**params, "norm.scale": jnp.asarray(params["norm.scale"]).at[0].set(jnp.nan)}

    batch = regroup(documents_batch(), 2)
    state, output = run_step(batch, params_of=poison)
    start = poison(start_params())
    assert not output.finite and not np.isfinite(output.micro_loss).any()
    assert state.step == 0
    for path, value in state.params.items():
        np.testing.assert_array_equal(value, start[path])


def test_a_step_without_trained_tokens_changes_nothing():
    batch = documents_batch()
    batch = batch._replace(weights={"nll": np.zeros_like(batch.weights["nll"])})
    state, output = run_step(batch)
    assert output.finite and output.metrics["loss"][0] == 0
    assert_same(state.params, start_params(), 0.0)


def test_evaluation_sums_add_up_over_batches():
    mesh = make_mesh(jax.devices()[:1])
    batch = documents_batch()
    with jax.set_mesh(mesh):
        params, rebuild = open_model(mesh)
        evaluate = make_eval(rebuild, nll_loss)
        micro = [jax.tree.map(lambda leaf, i=i: leaf[i], regroup(batch, 4)) for i in range(4)]
        parts = [evaluate(params, part)["nll"] for part in micro]
        whole = evaluate(params, jax.tree.map(lambda leaf: leaf[0], batch))["nll"]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)


def test_a_component_without_weights_is_evaluated_over_real_tokens():
    """The balance of experts has none: its pair adds up over batches, too."""

    def loss(model, batch):
        return {"balance": 2.0 * count_real(batch).astype(jnp.float32)}, {}

    first = jax.tree.map(lambda leaf: leaf[0], documents_batch(rows=2))
    total, weight = make_eval(lambda params: None, loss)({}, first)["balance"]
    assert weight == denominator(first, "balance") == 48 and total == 96
