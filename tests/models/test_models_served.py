"""A real vLLM on CPU serves what our exporter writes: its log-probs are ours."""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

NAMES = (
    *("qwen3", "gemma4_per_layer", "granitemoehybrid", "deepseek_v3"),
    *("llama_bias", "qwen3_yarn", "qwen3_moe_mixed", "phi3_short", "gemma3_softcap"),
    *("dots1", "solar_open"),  # in vLLM's transformers backend
)
"""Of benchmarks/served_families.py, which asks for all."""
REFUSED = {
    "qwen2_window": "Sliding window for some but all layers is not supported",
    "mistral4": "Head dimension 96 is not supported by MLA",
}
"""What vLLM says of those that it does not run."""


@pytest.mark.slow
@pytest.mark.vllm
def test_exports_are_served_with_our_log_probs(tmp_path):
    if not os.environ.get("JAXTRAIN_VLLM_PYTHON"):
        pytest.skip("JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM")
    import served_families

    completed = served_families.run([*NAMES, *REFUSED], tmp_path, "float32", seconds=900)
    for name in NAMES:
        assert completed[name]["difference"] < served_families.CLOSE["float32"], (
            name,
            completed[name],
        )
    for name, words in REFUSED.items():
        assert words in completed[name]["error"], (name, completed[name])
