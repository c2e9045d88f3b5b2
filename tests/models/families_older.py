"""The families that tiny_models.py has."""

from tiny_models import HYBRID, MAMBA, RAW

FAMILIES = {name: {"intermediate_size": None, **raw} for name, raw in RAW.items()}
DEFAULT = {"qwen2_window", "llama", "qwen3_5"}
CHOSEN = {"qwen3_yarn", "qwen3_moe", "nemotron_h_moe"}
LONG = {*HYBRID, *MAMBA}
DECODED = {"nemotron_h_moe", "granitemoehybrid"}
