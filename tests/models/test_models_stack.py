"""A network gives equal results however it runs: scanned or not, with or without remat, packed or
alone."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from other_devices import need_hopper_compiler, run_script
from tiny_models import RAW, documents, pack

from jaxtrain.errors import UserError
from jaxtrain.layers import stack, stack_params
from jaxtrain.layers.fused_linear import FusedColumns
from jaxtrain.layers.linear import Linear, with_output_barrier
from jaxtrain.layers.mixer import LayerSpec
from jaxtrain.layers.stack import REMAT, LayerSegment, find_segments
from jaxtrain.models import build, families


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@jax.jit
def hidden_of(model, batch):
    return model.hidden(batch).hidden


def value_and_grads(config, batch, seed=0, **options):
    graphdef, state = nnx.split(build.init(config, seed, **options))

    def loss(state):
        model = nnx.merge(graphdef, state)
        return jnp.sin(model.logits(model.hidden(batch).hidden)).sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(state)
    return value, jax.tree.leaves(grads)


@pytest.mark.slow
def test_scan_equals_unrolled_and_remat_changes_nothing(x64):
    # Three layers in two runs: one without a window, then two with one.
    config = families.config_from_hf({**RAW["qwen2_window"], "num_hidden_layers": 3})
    batch = pack([documents(0, 11, 6), documents(1, 19)], 20)
    wide = {"param_dtype": "float64", "dtype": "float64"}
    expected, grads = value_and_grads(config, batch, **wide, scan_layers=False)
    variants = [(False, "full"), *((True, policy) for policy in REMAT)]
    for scan, remat in variants:
        value, actual = value_and_grads(config, batch, **wide, scan_layers=scan, remat=remat)
        # float64 with a compiler free to reorder sums.
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        for actual_values, grad in zip(actual, grads, strict=True):
            np.testing.assert_allclose(actual_values, grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scan", [True, False])
def test_offloaded_inputs_of_blocks_are_all_that_is_saved(scan):
    """What a GPU's program keeps from the forward pass: the inputs of the blocks, in host memory;
    each is written once and read once, by the function that all layers share."""
    config = families.config_from_hf({**RAW["qwen3"], "num_hidden_layers": 3})
    batch = pack([documents(0, 11, 6)], 20)
    graphdef, state = nnx.split(build.init(config, 0, scan_layers=scan, remat="offload"))

    def loss(state):
        return nnx.merge(graphdef, state).hidden(batch).hidden.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace(state)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    copies = [line for line in text.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in copies if "pinned_host" in line]
    assert len(to_host) == len(copies) / 2 == 1
    if scan:  # it stacks what it saves of its three layers
        stacked = [
            line
            for line in text.splitlines()
            if "dynamic_update_slice" in line and "<3x1x20" in line
        ]
        assert len(stacked) == 1, stacked


def test_unknown_remat_is_refused():
    with pytest.raises(UserError, match="save_attention"):
        build.abstract(families.config_from_hf(RAW["qwen3"]), remat="everything")


@pytest.mark.slow
def test_layers_of_several_kinds_are_scanned_by_their_period(x64):
    """Two rounds of (experts, dense, experts) and one more layer; notes and captured layers come
    out as they do of an unrolled stack."""
    config = families.config_from_hf(
        {**RAW["qwen3_moe_mixed"], "num_hidden_layers": 7, "mlp_only_layers": [1, 4]}
    )
    batch = pack([documents(0, 11, 6), documents(1, 19)], 20)

    def run(**options):
        model = build.init(config, 0, param_dtype="float64", dtype="float64", **options)
        graphdef, state = nnx.split(model)

        def loss(state):
            actual = nnx.merge(graphdef, state).hidden(batch, capture=(2, 4, 6))
            captured = sum(jnp.sin(value).sum() for value in actual.captured.values())
            return jnp.cos(actual.hidden).sum() + captured, actual

        return model, jax.jit(jax.value_and_grad(loss, has_aux=True))(state)

    model, scanned = run(remat="save_attention")
    assert find_segments(model.stack.specs) == (LayerSegment(0, 3, 2), LayerSegment(6, 1, 1))
    _, unrolled = run(scan_layers=False)
    assert scanned[0][1].notes["expert_load"].shape == (5, 2, 4)
    for actual_values, reference in zip(
        jax.tree.leaves(scanned), jax.tree.leaves(unrolled), strict=True
    ):
        # float64 with a compiler free to reorder sums.
        np.testing.assert_allclose(actual_values, reference, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("kinds", "segments"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("abbb", [(0, 1, 1), (1, 1, 3)]),
        ("llgllgl", [(0, 3, 2), (6, 1, 1)]),
        ("aaababab", [(0, 1, 2), (2, 2, 3)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ],
)
def test_segments_compile_the_fewest_layers(kinds, segments):
    assert find_segments(tuple(LayerSpec(kind) for kind in kinds)) == tuple(segments)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen2_window", "qwen3_moe")),
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("qwen3", "llama")),
    ],
)
def test_packed_equals_alone(name, x64):
    config = families.config_from_hf(RAW[name])
    model = build.init(config, 0, param_dtype="float64", dtype="float64")
    texts = documents(2, 13, 1, 9)
    packed = hidden_of(model, pack([texts], 32))
    start = 0
    for text in texts:
        # One without padding; the others share a program.
        alone = hidden_of(model, pack([[text]], 13 if len(text) == 13 else 32))[:, : len(text)]
        # The figure promised to users; float64 leaves about 1e-14.
        np.testing.assert_allclose(packed[:, start : start + len(text)], alone, atol=1e-10)
        start += len(text)
    assert jnp.isfinite(packed).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen3_moe"])
def test_branches_that_share_a_prefix_equal_their_paths(name, x64):
    """Windows must follow positions, not indices; experts must drop nothing."""
    config = families.config_from_hf(RAW[name])
    model = build.init(config, 0, param_dtype="float64", dtype="float64")
    trunk, first, right = documents(3, 6, 7, 5)
    batch = pack([[np.concatenate([trunk, first, right])]], 18)
    index = np.arange(18)
    in_right = index >= 13
    tree = batch._replace(
        positions=jnp.asarray(np.where(in_right, index - 7, index)[None], jnp.int32),
        until=jnp.asarray(np.where((index >= 6) & ~in_right, 13, 18)[None], jnp.int32),
    )
    hidden = hidden_of(model, tree)
    # Padded, so that all three share a program.
    entry = hidden_of(model, pack([[np.concatenate([trunk, first])]], 18))
    two = hidden_of(model, pack([[np.concatenate([trunk, right])]], 18))
    np.testing.assert_allclose(hidden[:, :13], entry[:, :13], atol=1e-10)  # as in the test above
    np.testing.assert_allclose(hidden[:, 13:], two[:, 6:11], atol=1e-10)


def test_capture_gives_the_states_between_layers():
    config = families.config_from_hf({**RAW["qwen3"], "num_hidden_layers": 3})
    batch = pack([documents(4, 12)], 12)
    model = build.init(config, 0)
    actual = jax.jit(lambda model: model.hidden(batch, capture=(0, 2)))(model)
    assert set(actual.captured) == {0, 2}
    # float32, and each program rounds in its own order.
    np.testing.assert_allclose(model.norm(actual.captured[2]), actual.hidden, atol=1e-5)
    np.testing.assert_allclose(hidden_of(model, batch), actual.hidden, atol=1e-5)
    apart = jax.jit(lambda model: model.unstack().hidden(batch, capture=(0, 2)))(model)
    for actual_values, reference in zip(
        jax.tree.leaves(apart), jax.tree.leaves(actual), strict=True
    ):
        np.testing.assert_allclose(actual_values, reference, atol=1e-5)
    first = build.init(config, 0)
    first.stack.specs = first.stack.specs[:1]
    nnx.update(first.stack.block, jax.tree.map(lambda leaf: leaf[:1], nnx.state(first.stack.block)))
    expected = model.norm(actual.captured[0])
    np.testing.assert_allclose(hidden_of(first, batch), expected, atol=1e-5)


def test_bfloat16_compute_keeps_float32_masters():
    config = families.config_from_hf(RAW["qwen3"])
    batch = pack([documents(5, 20)], 20)
    mixed = build.init(config, 0, dtype="bfloat16")
    hidden = hidden_of(mixed, batch)
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(mixed))} == {jnp.dtype("float32")}
    exact = hidden_of(build.init(config, 0), batch)
    error = np.abs(hidden.astype(jnp.float32) - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.05  # bfloat16 has 8 bits: 0.4% a rounding, some ten of them in a row


@pytest.mark.parametrize(
    "name, layers",
    [
        pytest.param("qwen3", (2, 0), marks=pytest.mark.slow),
        pytest.param("qwen2_window", (1,), marks=pytest.mark.slow),
        ("qwen2_window", (3, 2)),
    ],
)
def test_no_layer_behind_the_last_captured_one_is_run(name, layers):
    raw = {**RAW[name], "num_hidden_layers": 5, "max_window_layers": 2}
    config = families.config_from_hf(raw)
    batch = pack([documents(0, 11, 6), documents(1, 19)], 20)
    graphdef, state = nnx.split(build.init(config, 0))
    full = jax.jit(lambda state: nnx.merge(graphdef, state).hidden(batch, layers).captured)(state)
    array = jnp.concatenate([full[layer] for layer in layers], -1)
    # What is not run cannot spoil anything.
    spoiled = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf.at[max(layers) + 1 :].set(jnp.nan) if leaf.shape[:1] == (5,) else leaf
        ),
        state,
    )
    actual = jax.jit(lambda state: nnx.merge(graphdef, state).captured(batch, layers))(spoiled)
    np.testing.assert_allclose(actual, array, rtol=1e-5, atol=1e-6)


def test_a_model_to_decode_with_has_its_kernels_joined():
    model = build.init(families.config_from_hf(RAW["qwen3"]), 0)
    model = jax.jit(lambda model: model.unstack())(model)
    block = model.stack.layers[0]
    for first, *peers in (
        (block.attention.q, block.attention.k, block.attention.v),
        (block.mlp.gate, block.mlp.up),
    ):
        width = sum(entry.kernel.shape[1] for entry in (first, *peers))
        assert first.kernel.fused.shape == (first.kernel.shape[0], width)
        assert all(entry.kernel.fused is None for entry in peers)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_kernels_that_training_rounds_lie_side_by_side(scan, monkeypatch):
    """Loss and gradients are those of kernels apart, and the masters' gradients stay their own."""
    config, batch = families.config_from_hf(RAW["qwen3"]), pack([documents(0, 11, 6)], 20)

    def run():
        model = build.init(config, 0, dtype="bfloat16", scan_layers=scan)
        segments = (
            find_segments(model.stack.specs)
            if scan
            else (LayerSegment(0, 1, 1), LayerSegment(1, 1, 1))
        )
        ((graphdef, state),) = model.stack._split_blocks(segments)[0].values()
        kernels = nnx.merge(graphdef, state).attention.q.kernel
        return kernels, value_and_grads(config, batch, dtype="bfloat16", scan_layers=scan)

    joined, (value, grads) = run()
    assert isinstance(joined, FusedColumns) and joined.fused.dtype == jnp.bfloat16
    monkeypatch.setattr(stack_params, "fuse_all", lambda block: None)
    apart, (expected, expectation) = run()
    assert isinstance(apart, nnx.Param) and apart.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert [grad.dtype for grad in grads] == [jnp.float32] * len(expectation)
    for actual_values, reference in zip(grads, expectation, strict=True):
        # bfloat16: gradients to x are one sum in the place of three rounded ones.
        assert np.linalg.norm(actual_values - reference) < 0.02 * np.linalg.norm(reference)


@pytest.mark.parametrize("scan", [True, False])
def test_a_model_is_not_changed_by_what_rounds_its_kernels(scan):
    """Nor does it matter that it is of an outer trace, as in a loop over microsteps."""
    config, batch = families.config_from_hf(RAW["qwen3"]), pack([documents(0, 11, 6)], 20)
    model = build.init(config, 0, dtype="bfloat16", scan_layers=scan)
    before = jax.tree.leaves(nnx.state(model))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
    actual = jax.lax.map(lambda entry: model.hidden(entry).hidden, twice)
    np.testing.assert_array_equal(actual[0], actual[1])
    assert model.stack.block.attention.q.kernel.dtype == jnp.float32
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_linears_of_a_scan_have_an_output_barrier(monkeypatch):
    """Its matmuls' results go through a barrier where XLA for GPUs would make them twice."""

    def output_barriers(scan):
        model = build.init(families.config_from_hf(RAW["qwen3"]), 0, scan_layers=scan)
        segments = find_segments(model.stack.specs)
        ((graphdef, state),) = model.stack._split_blocks(segments)[0].values()
        actual = nnx.iter_graph(nnx.merge(graphdef, state))
        return {node.output_barrier for _, node in actual if isinstance(node, Linear)}

    assert output_barriers(True) == {True} and output_barriers(False) == {False}
    monkeypatch.setattr(stack, "device_kind", lambda: "TPU v5e")
    assert output_barriers(True) == {False}

    x = jnp.arange(6.0).reshape(2, 3)
    assert "optimization_barrier" not in str(jax.make_jaxpr(with_output_barrier)(x))
    value, back = jax.vjp(with_output_barrier, x)
    forward = jax.make_jaxpr(lambda x: jax.vjp(with_output_barrier, x)[0])(x)
    assert "optimization_barrier" in str(forward)
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(back(x)[0], x)


@pytest.mark.slow
def test_a_scan_on_a_hopper_gpu_runs_each_matmul_and_kernel_once():
    need_hopper_compiler(Path("/usr/local/cuda/bin/ptxas"))
    printed = run_script(
        Path(__file__).with_name("scan_program.py"),
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        XLA_FLAGS="--xla_gpu_enable_triton_gemm=false",  # cuBLAS, as for big matmuls
    )
    *dense, experts = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
    # q k v, out, gate up and down: one forward, two backward.
    assert dense == [{"remat": remat, "matmuls": 12} for remat in ("none", "elementwise", "dots")]
    # Rows are gathered once for the experts and once for their gradients.
    assert experts == {"gathers": 2, "products": 1}
