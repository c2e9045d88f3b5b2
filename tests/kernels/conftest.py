"""Kernels are compiled for their tests as they are for users: how they round is what is tested."""

import importlib.util
from pathlib import Path

import jax
import pytest

NEWEST = "0.11"
LONG = {
    "test_kernels_decode_attention",
    "test_kernels_decode_attention_codes",
    "test_kernels_grouped_matmul",
    "test_kernels_moe_gpu",
    "test_kernels_strict",
    "test_kernels_tree_attention_cudnn",
    "test_kernels_tree_attention_gpu",
    "test_kernels_tree_attention_tpu",
}
"""Files whose tests are slow where `make test-kernels` runs all of them with the newest jax, and CI
runs them there alone."""


def pytest_collection_modifyitems(items):
    if jax.__version__ >= NEWEST:
        return
    for item in items:
        if Path(item.path).stem in LONG:
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
