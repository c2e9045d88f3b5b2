"""Helpers for tests of full runs: sections of a config, for a model that trains in milliseconds."""

from pathlib import Path

MODEL = """
[model]
tokenizer = "builtin"
compute_dtype = "float32"

[model.architecture]
architectures = ["Qwen3ForCausalLM"]
model_type = "qwen3"
vocab_size = 512
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
max_position_embeddings = 64
tie_word_embeddings = false

[parallel]
data = 1
fsdp = -1
"""
EVEN_TOKENS = f"""
[env]
kind = "python"
path = "{Path(__file__).parent / "methods" / "rl_toy_env.py"}:EvenTokens"

[sampling]
temperature = 1.0
max_new_tokens = 8
"""
"""Reinforcement learning whose reward is the share of even tokens."""
