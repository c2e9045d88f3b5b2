"""Kernels are compiled for their tests as they are for users: how they round is what is tested."""

import importlib.util
from pathlib import Path

import jax
import pytest

NEWEST = "0.11"
LONG = {
    "test_kernels_conv_heads",
    "test_kernels_decode_attention",
    "test_kernels_decode_attention_codes",
    "test_kernels_gated_delta::test_a_forest_is_its_branches",
    "test_kernels_grouped_matmul",
    "test_kernels_logp_gather::test_cases_match_numpy",
    "test_kernels_moe_gpu",
    "test_kernels_rotate_heads",
    "test_kernels_sinks",
    "test_kernels_ssd::test_a_forest_is_its_branches",
    "test_kernels_strict",
    "test_kernels_tree_attention::test_any_block_size_on_random_forests",
    "test_kernels_tree_attention::test_cases_match_the_ancestor_walk",
    "test_kernels_tree_attention::test_since_blocks_and_fewer_queries_than_keys",
    "test_kernels_tree_attention_cudnn",
    "test_kernels_tree_attention_gpu",
    "test_kernels_tree_attention_tpu",
    "test_kernels_weighted_logp::test_cases_match_numpy",
}
"""Files and tests that are slow where `make test-kernels` runs all of them with the newest jax, and
CI runs them there alone."""


def pytest_collection_modifyitems(items):
    if jax.__version__ >= NEWEST:
        return
    for item in items:
        file = Path(item.path).stem
        if LONG & {file, f"{file}::{item.originalname}"}:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.newest)


@pytest.fixture(autouse=True, scope="module")
def usual_compilation():
    """Compile with all optimizations, which the other tests disable."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def interpreter(monkeypatch):
    """Triton kernels called inside run on the CPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install 'jaxtrain[triton]'")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    import triton

    if not isinstance(triton.language.max, triton.runtime.interpreter.InterpretedFunction):
        pytest.skip("Triton was imported before TRITON_INTERPRET=1 was set")
