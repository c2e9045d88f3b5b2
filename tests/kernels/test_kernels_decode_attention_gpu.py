"""decode_attention compiles to sm_90a machine code that waits for memory alone: no spills."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from sm90a_triton import FLAGS, PTXAS

HERE = Path(__file__).parent


@pytest.mark.slow
def test_decode_attention_compiles_for_hopper(tmp_path):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt")
    if not Path(PTXAS).exists():
        pytest.skip(f"needs {PTXAS}")
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"the plugin is for jax 0.11, found {jax.__version__}")
    environment = {n: v for n, v in os.environ.items() if n not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "PYTHONPATH": str(HERE.parents[1] / "kernels"),
        "XLA_FLAGS": FLAGS.format(folder=tmp_path),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # of a cached program nothing is written
    done = subprocess.run(
        [sys.executable, str(HERE / "sm90a_triton.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    calls = [row for row in rows if row["kernel"] == "decode_attention"]
    merges = [row for row in rows if row["kernel"] == "decode_attention_merge"]
    assert len(calls) == 13 and len(merges) == 12  # with 16 programs a row nothing is merged
    assert all(row["in_flight"] for row in calls)
    assert not [row for row in rows if row["spills"]]
