"""Families that test_models_parity.py has, too: the harness agrees with it."""

from tiny_models import RAW

FAMILIES = {name: {**RAW[name]} for name in ("qwen3_moe_mixed", "qwen3_5_moe")}
FAMILIES["qwen3_5_moe"]["intermediate_size"] = None  # there is no dense layer
SHARDED = {"qwen3_moe_mixed": [{"expert": 2, "tensor": 2}, {"context": 2, "fsdp": 2}]}
