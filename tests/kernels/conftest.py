"""Kernels are compiled for their tests as they are for users: how they round is what is tested."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def usual_compilation():
    """All optimizations, which the tests of everything else do without."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
