"""Cached decoding gives the hidden states of the full forward pass."""

import pytest
from tiny_models import RAW, check_decoding


@pytest.mark.parametrize(
    ("name", "scan", "apart"),
    [
        pytest.param("qwen3", True, True, marks=pytest.mark.slow),
        pytest.param("qwen2_window", False, False, marks=pytest.mark.slow),
        ("mistral", True, False),  # a ring of 5 slots, which a piece of a prompt fills and more
        pytest.param("qwen3_moe_mixed", True, True, marks=pytest.mark.thorough),
        pytest.param("qwen3_5", True, True, marks=pytest.mark.slow),
    ],
)
def test_prefill_and_steps_equal_full_forward(name, scan, apart):
    check_decoding(RAW[name], scan, apart)
