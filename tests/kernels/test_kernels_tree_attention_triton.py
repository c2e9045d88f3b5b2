"""The Triton kernels of tree attention in Triton's interpreter on the CPU, by the 2x rule against
float64; and that they compile for five generations of GPUs."""

import functools
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context, attention, testing, triton_call
from jaxtrain_kernels.tree_attention import blocks, triton_gpu
from jaxtrain_kernels.tree_attention.cases import CASES
from jaxtrain_kernels.tree_attention.gpu_tiles import Settings
from other_devices import run_script
from test_kernels_sinks import check_kernel
from test_kernels_tree_attention import ancestor_mask, arguments, case_mask, compare
from test_kernels_tree_attention_gpu import dense_visible

CI_CASES = [case for case in CASES if "ci" in case.tags]
QUICK = ("tree_h4_1_d64_softcap", "blocks_h2_1_d64")
SMALL = triton_gpu.Configs(
    triton_gpu.Config(64, 32), triton_gpu.Config(32, 64), triton_gpu.Config(32, 64)
)
"""Blocks of which even the small cases have several."""


def options(head_dim, window=None, softcap=None):
    return triton_gpu.Options(Settings(head_dim**-0.5, softcap, window), SMALL)


def check(inputs, mask, dtype, context, window=None, softcap=None):
    setting = options(inputs["q"].shape[-1], window, softcap)
    kernels = functools.partial(triton_gpu.run, setting, context=context)
    plain = functools.partial(
        attention, context=context, impl="reference", window=window, softcap=softcap
    )
    compare(inputs, mask, jnp.dtype(dtype), kernels, plain, softcap, jit=False)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)
        for case in CI_CASES
    ],
)
def test_cases(interpreter, monkeypatch, case):
    """Keys are read in the other order wherever there is one."""
    monkeypatch.setattr(blocks, "WORTH", 2.0)
    inputs = case.inputs()
    context, provided = arguments(case, inputs)
    check(inputs, case_mask(case, inputs), "bfloat16", context, **provided)


@pytest.mark.parametrize(
    "dtype, H, V", [("float16", 64, 64), ("float32", 32, 32), ("bfloat16", 192, 128)]
)
def test_dtypes_and_dims_of_ragged_rows(interpreter, dtype, H, V):
    """Fewer queries than keys, lengths that no block divides, a window, and queries and keys that
    meet nobody: zeros there, never NaN."""
    rng = np.random.default_rng(8)
    T, S, window = 90, 130, 25
    since = np.minimum(np.arange(S) // 2 * 2, T)[None].astype(np.int32)
    until = np.minimum(since + rng.integers(0, 40, (1, S)), 80).astype(np.int32)
    places, key_places = (rng.integers(0, 60, (1, n)).astype(np.int32) for n in (T, S))
    mask = dense_visible(since, until, T, places, key_places, window)
    empty_rows, empty_keys = ~mask.any(2)[0], ~mask.any(1)[0]
    assert empty_rows[80:].all() and empty_keys.any()
    sizes = {"q": (T, 2, H), "k": (S, 1, H), "v": (S, 1, V), "d_out": (T, 2, V)}
    inputs = {n: rng.standard_normal((1, *shape)) for n, shape in sizes.items()}
    context = Context(*(jnp.asarray(x) for x in (until, since, places, key_places)))
    check(inputs, mask, dtype, context, window)


def test_a_row_that_ends_behind_its_last_query(interpreter):
    """`until` beyond the row, as a caller may give it, is no reason to read beyond the row."""
    rng = np.random.default_rng(2)
    T = 40
    inputs = {n: rng.standard_normal((1, T, 1, 16)) for n in ("q", "k", "v", "d_out")}
    context = Context(jnp.full((1, T), 1000, jnp.int32), jnp.zeros((1, T), jnp.int32))
    check(inputs, np.ones((1, T, T), bool), "bfloat16", context)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_forests(interpreter, seed):
    rng = np.random.default_rng(seed)
    T, used = 200, 190 - 11 * seed
    row = testing.pack(testing.random_forest(rng, used, mean=14), T)
    shapes = {"q": (1, T, 2, 80), "k": (1, T, 1, 80), "v": (1, T, 1, 80), "d_out": (1, T, 2, 80)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    context = Context(jnp.asarray(row["until"])[None])
    check(inputs, ancestor_mask(row["prev"], used)[None], "bfloat16", context)


@pytest.mark.slow
def test_sinks(interpreter):
    check_kernel(functools.partial(triton_gpu.run, options(64)))


def test_by_name(interpreter):
    """Through the op: default sizes, and heads of dims that are filled up."""
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 40, n, 24)), jnp.bfloat16) for n in (2, 1, 1))
    context = Context(jnp.asarray(testing.pack(testing.documents([25, 15]), 40)["until"])[None])
    actual, expected = (
        np.asarray(attention(q, k, v, context, impl=impl), np.float32)
        for impl in ("triton", "reference")
    )
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=2**-7)


def test_head_dims_are_two_powers_of_two():
    expected = {8: (16, 0), 64: (64, 0), 80: (64, 16), 96: (64, 32), 112: (128, 0), 192: (128, 64)}
    assert {dim: triton_gpu.parts(dim) for dim in expected} == expected
    for dim in range(1, 257):
        first, rest = triton_gpu.parts(dim)
        assert dim <= first + rest <= 256
        assert all(n & (n - 1) == 0 for n in (first, rest)) and first >= 16 and rest != 8


@pytest.mark.slow
def test_kernels_compile_for_five_generations(tmp_path):
    for name in ("triton", "jax_triton", "jax_cuda13_plugin"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    if not Path("/usr/local/cuda/bin/ptxas").exists():
        pytest.skip("needs ptxas")
    printed = run_script(
        Path(__file__).parent / "triton_compile.py",
        "attention d128",
        TRITON_CACHE_DIR=str(tmp_path),
        TRITON_INTERPRET="0",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        JAX_PLATFORMS="cpu",
    )
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(rows) == 3 * 5
    # Bytes by Triton 3.7.1: of what was timed on an H200 these sizes were the fastest even so.
    spilled = {(90, "queries_gradient"): 20, (90, "keys_gradient"): 68}
    for row in rows:
        assert row["shared_kib"] <= triton_call.SHARED_MEMORY[row["target"]], row
        assert row["tensor_cores"], row
        assert row["spills"] <= spilled.get((row["target"], row["kernel"]), 0), row
