"""Settings for every test: 4 fake CPU devices, no network, and quick compilation."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import jax

# A test compiles for longer than it runs, and this takes a third off. Processes that a test starts,
# such as runs that are killed and resumed, compile as usual; so do the kernels' own tests, whose
# rounding is what is tested (kernels/conftest.py).
jax.config.update("jax_disable_most_optimizations", True)
