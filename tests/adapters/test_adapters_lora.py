"""LoRA and DoRA in the slots of a model: identity at the start, formulas, split, meshes."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals
from test_core_step import ARCHITECTURE, documents_batch, regroup

from jaxtrain.adapters.attach import attach, draw_trained, without_adapters
from jaxtrain.adapters.lora import DoRA, column_norms
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.core.weights import split_trained
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.distributed.sharding import shardings
from jaxtrain.errors import UserError
from jaxtrain.models import build, families
from jaxtrain.models.parameters import name_path, split_model

CONFIG = families.config_from_hf(ARCHITECTURE)
LINEARS = find_linears(CONFIG)


def make_adapter(target=("all-linear",), full=(), ranks=None, **slot):
    slot = LoRASpec(**{"rank": 4, "alpha": 8.0, **slot})
    return Adapter(choose_slots(LINEARS, target, slot, ranks or {}, {}), full)


def open_model(adapter, mesh=None, seed=0, noise=0.0, **options):
    """(trained, frozen, rebuild); with noise nothing trained is at its start."""
    mesh = mesh or make_mesh(jax.devices()[:1])
    model = attach(build.abstract(CONFIG, **options), adapter)
    shapes, rebuild = split_model(model)
    places = jax.tree_util.tree_leaves_with_path(shardings(nnx.state(model), mesh))
    places = {name_path(path): position for path, position in places}
    shapes = {
        p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[p]) for p, s in shapes.items()
    }
    base = split_model(build.init(CONFIG, seed, mesh=mesh, **options))[0]
    expected, _ = split_trained(shapes, adapter)
    trained = draw_trained(expected, base, adapter, seed)
    rng = np.random.default_rng(1)
    trained = {
        path: jax.device_put(value + noise * rng.standard_normal(value.shape), value.sharding)
        if noise
        else value
        for path, value in sorted(trained.items())
    }
    trained = {path: value.astype(jnp.float32) for path, value in trained.items()}
    return trained, split_trained({**base, **trained}, adapter)[1], rebuild


@jax.jit
def logits_of(model, batch):
    micro = jax.tree.map(lambda leaf: leaf[0], batch)
    return model.logits(model.hidden(micro).hidden)


@pytest.mark.parametrize(
    ("dora", "scan"), [pytest.param(False, True, marks=pytest.mark.thorough), (True, False)]
)
def test_the_start_is_the_identity(dora, scan):
    trained, frozen, rebuild = open_model(make_adapter(dora=dora), scan_layers=scan)
    batch = documents_batch(rows=2)
    plain = logits_of(build.init(CONFIG, 0, scan_layers=scan), batch)
    actual_values = logits_of(rebuild({**frozen, **trained}), batch)
    # LoRA adds zeros (XLA fuses them with other roundings); DoRA multiplies by norm / norm.
    np.testing.assert_allclose(actual_values, plain, atol=1e-5 if dora else 1e-6)


@pytest.mark.parametrize(
    ("dora", "rslora"),
    [
        (True, True),
        *(
            pytest.param(*flags, marks=pytest.mark.slow)
            for flags in [(False, False), (False, True), (True, False)]
        ),
    ],
)
def test_adapted_equals_the_weight_that_the_papers_write(dora, rslora):
    adapter = make_adapter(dora=dora, rslora=rslora)
    trained, frozen, rebuild = open_model(adapter, noise=0.3)
    params = {**frozen, **trained}
    merged = dict(frozen)
    scale = 8.0 / (2.0 if rslora else 4.0)
    for path in adapter.slots:
        index = {name: np.asarray(params[f"{path}.adapter.{name}"], np.float64) for name in "ab"}
        weight = np.asarray(params[f"{path}.kernel"], np.float64) + scale * index["a"] @ index["b"]
        if dora:
            length = np.linalg.norm(weight, axis=-2, keepdims=True)
            weight *= np.asarray(params[f"{path}.adapter.magnitude"])[..., None, :] / length
        merged[f"{path}.kernel"] = jnp.asarray(weight, jnp.float32)
    plain, rebuild_plain = split_model(build.init(CONFIG, 0))
    assert set(plain) == set(merged)
    batch = documents_batch(rows=2)
    expected = logits_of(rebuild_plain(merged), batch)
    actual_values = logits_of(rebuild(params), batch)
    # fp32 products in another order; logits are about 1.
    np.testing.assert_allclose(actual_values, expected, atol=1e-4 * np.abs(expected).max())
    assert np.abs(expected - logits_of(rebuild_plain(plain), batch)).max() > 0.1


@pytest.mark.slow
def test_without_adapters_is_the_base():
    trained, frozen, rebuild = open_model(make_adapter(dora=True), noise=0.3)
    batch = documents_batch(rows=2)
    reference = without_adapters(rebuild({**frozen, **trained}))
    np.testing.assert_array_equal(
        logits_of(reference, batch), logits_of(build.init(CONFIG, 0), batch)
    )


@pytest.mark.slow
def test_the_norm_is_a_constant_for_the_gradient():
    rng = np.random.default_rng(0)
    kernel, a, b = (jnp.asarray(rng.standard_normal(s)) for s in [(6, 5), (6, 2), (2, 5)])
    norms = column_norms(kernel, a, b, 0.5)
    np.testing.assert_allclose(norms, np.linalg.norm(kernel + 0.5 * a @ b, axis=0), rtol=1e-5)
    x = jnp.asarray(rng.standard_normal((3, 6)))
    magnitude = jnp.asarray(rng.random(5), jnp.float32)

    def ours(b):
        return DoRA(a, b, magnitude, 0.5, ("embed", "mlp"))(x, x @ kernel, kernel).sum()

    def fixed(b):
        return ((x @ (kernel + 0.5 * a @ b)) * magnitude / norms).sum()

    np.testing.assert_allclose(jax.grad(ours)(b), jax.grad(fixed)(b), rtol=1e-4)


def test_only_adapters_are_trained():
    adapter = make_adapter(("q_proj", "v_proj"), full=("embed.embedding",))
    trained, frozen, _ = open_model(adapter)
    names = {f"stack.block.attention.{n}.adapter.{part}" for n in "qv" for part in "ab"}
    assert set(trained) == names | {"embed.embedding"}
    assert not set(frozen) & set(trained)
    state = init_state(trained, optax.adamw(1e-3))
    assert set(state.opt_state[0].mu) == set(trained)
    assert trained["stack.block.attention.q.adapter.a"].shape == (2, 32, 4)


def run_step(adapter, batch, mesh, noise=0.02):
    with jax.set_mesh(mesh):
        trained, frozen, rebuild = open_model(adapter, mesh, noise=noise)
        optimizer = optax.sgd(1.0)
        step = make_step(rebuild, nll_loss, {"nll": 1.0}, optimizer, None)
        before = jax.device_get(trained)
        retained = jax.device_get(frozen)
        state, output = step(init_state(trained, optimizer), feed(batch, mesh), frozen)
        assert all(np.array_equal(retained[path], frozen[path]) for path in retained)
        after = jax.device_get(state.params)
        grads = {path: before[path] - after[path] for path in before}
        return grads, jax.device_get(output)


@functools.cache
def one_device(dora):
    return run_step(trained_adapter(dora), meshed_batch(), make_mesh(jax.devices()[:1]))


def trained_adapter(dora):
    return make_adapter(dora=dora, full=("embed.embedding",))


def meshed_batch():
    return regroup(documents_batch(), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dora"),
    [
        pytest.param({"data": 4}, False, marks=pytest.mark.thorough),
        ({"fsdp": 2, "tensor": 2}, True),
        pytest.param({"fsdp": 2, "context": 2}, False, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_meshes_give_the_same_loss_and_gradients(sizes, dora):
    adapter, batch = trained_adapter(dora), meshed_batch()
    entry, one_out = one_device(dora)
    many, many_out = run_step(adapter, batch, make_mesh(**sizes))
    np.testing.assert_allclose(many_out.metrics["loss"][0], one_out.metrics["loss"][0], rtol=1e-6)
    for path, grad in entry.items():
        # fp32 sums in another order, then a subtraction of weights of about 1.
        np.testing.assert_allclose(many[path], grad, atol=2e-6, err_msg=path)
        assert np.abs(grad).max() > 1e-5, path


@pytest.mark.slow
def test_frozen_weights_may_be_bfloat16():
    adapter = make_adapter()
    trained, frozen, _ = open_model(adapter, param_dtype="bfloat16", dtype="bfloat16")
    assert {v.dtype for v in trained.values()} == {jnp.dtype("float32")}
    assert {v.dtype for v in frozen.values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (["attention"], {"q", "k", "v", "out"}),
        (["mlp"], {"gate", "up", "down"}),
        (["all-linear"], {"q", "k", "v", "out", "gate", "up", "down"}),
        (["q_proj", "attention.v"], {"q", "v"}),
        (["mlp.*_proj"], {"gate", "up", "down"}),
        (["model.layers.*.self_attn.o_proj"], {"out"}),
    ],
    ids=lambda names: "+".join(sorted(names)),  # a set has no order of its own
)
def test_targets(target, expected):
    slots = choose_slots(LINEARS, target, LoRASpec(4, 8.0), {}, {})
    assert {path.rsplit(".", 1)[-1] for path in slots} == expected


def test_ranks_by_pattern():
    slots = choose_slots(
        LINEARS, ["all-linear"], LoRASpec(4, 8.0), {"mlp": 2, "up_proj": 3}, {"q": 1}
    )
    ranks = {path.rsplit(".", 1)[-1]: slot.rank for path, slot in slots.items()}
    assert ranks == {"q": 4, "k": 4, "v": 4, "out": 4, "gate": 2, "down": 2, "up": 3}
    assert slots["stack.block.attention.q"].alpha == 1


@pytest.mark.parametrize(
    ("target", "ranks", "words"),
    [
        (["qproj"], {}, "names no Linear"),
        (["mlp"], {"q_proj": 3}, "that adapter.target chose"),
    ],
    ids=str,
)
def test_patterns_that_name_nothing(target, ranks, words):
    with pytest.raises(UserError, match=words):
        choose_slots(LINEARS, target, LoRASpec(4, 8.0), ranks, {})


def test_frozen_weights_count_two_thirds_of_a_trained_one():
    trained, frozen, rebuild = open_model(make_adapter())
    matrices = {path: value for path, value in frozen.items() if path.endswith(".kernel")}
    table = frozen["embed.embedding"].size  # tied: it is the head's matmul
    kernels = sum(value.size for value in matrices.values())
    adapters = sum(value.size for value in trained.values())
    expected = adapters + (kernels + table) * 2 / 3
    assert count_matmul_params(rebuild({**frozen, **trained}), frozen) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["elementwise", "dots"])
def test_the_backward_pass_keeps_of_an_adapted_product_what_it_keeps_of_a_plain_one(remat):
    """The sum, not both its terms; beside it only what is as narrow as the rank."""
    micro = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), documents_batch(rows=2))
    options = {"remat": remat, "scan_layers": False}

    def kept(rebuild, frozen, trained):
        actual = saved_residuals(
            lambda trained: rebuild({**frozen, **trained}).hidden(micro).hidden.sum(), trained
        )
        shapes = Counter(value.shape for value, _ in actual)
        # Of tokens, wider than the rank; 32, 16 and 64 are all widths of Linears here.
        wide = [(*micro.tokens.shape, width) for width in (16, 32, 64)]
        return {shape: shapes[shape] for shape in wide}

    plain, rebuild_plain = split_model(build.init(CONFIG, 0, **options))
    trained, frozen, rebuild = open_model(make_adapter(), **options)
    expected = kept(rebuild_plain, {}, plain)
    assert min(expected.values()) > 0
    assert kept(rebuild, frozen, trained) == expected
