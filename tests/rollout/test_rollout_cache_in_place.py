"""Drawing tokens never copies the KV cache: what the compiled program makes of its size."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from cache_program import compile_chunk, describe

ROOT = Path(__file__).parents[2]
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "fusion"}


def check(found):
    """Only scatters of new keys, in place: a copy would show in the program and in its memory."""
    assert "scatter" in found["made"]
    assert set(found["made"]) <= IN_PLACE
    # A CPU copies one of the four layers of k and of v.
    assert found["temp"] < found["cache"]


@pytest.mark.parametrize("scan", [True, False])
def test_on_a_cpu(scan):
    check(describe(*compile_chunk(scan, "float32")))


@pytest.mark.slow
def test_on_a_hopper_gpu():
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt")
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"the plugin is for jax 0.11, found {jax.__version__}")
    environment = {n: v for n, v in os.environ.items() if n not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "cache_program.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 2
    for row in rows:
        check(row)
        assert row["temp"] < row["cache"] / 4  # not even a layer
