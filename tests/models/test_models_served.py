"""A real vLLM on CPU serves what our exporter writes: its log-probs are ours."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

NAMES = ("qwen3", "gemma4_per_layer", "granitemoehybrid", "deepseek_v3")
"""Of benchmarks/served_families.py, which asks for all."""


@pytest.mark.slow
@pytest.mark.vllm
def test_exports_are_served_with_our_log_probs(tmp_path):
    if not os.environ.get("JAXTRAIN_VLLM_PYTHON"):
        pytest.skip("JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM")
    import served_families

    found = served_families.run([*NAMES], tmp_path, "float32", seconds=450)
    for name in NAMES:
        assert found[name]["difference"] < served_families.CLOSE["float32"], (name, found[name])
