"""Helpers for tests of full runs: sections of a config, for a model that trains in milliseconds;
and a model folder for verbs that need no run."""

from pathlib import Path

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, families, saving

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
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def save_model(folder: Path, **changes: object) -> None:
    """Write a Hugging Face folder of random weights with the built-in tokenizer. changes: keys of
    its config.json."""
    config = families.config_from_hf(ARCHITECTURE | changes)
    saving.save(build.init(config, 0), config, folder)
    load_tokenizer("builtin").save_pretrained(folder)
