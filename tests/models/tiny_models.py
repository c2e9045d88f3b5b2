"""Tiny configs of every family, batches for them, and a check of decoding, shared by tests."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.models import build, families

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

RAW = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_yarn": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "rope_theta": 1e6,
        "rope_scaling": YARN_ROPE,
    },
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2_window": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "llama": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
    "llama_bias": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "moe_intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
}
LINEAR = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
MANY_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
HYBRID = {
    "qwen3_5": {"model_type": "qwen3_5_text", "tie_word_embeddings": True, **LINEAR},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **LINEAR,
        **MANY_EXPERTS,
        "linear_num_value_heads": 6,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **LINEAR,
        **MANY_EXPERTS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_only_layers": [1],
    },
}
# Steps of a new layer; transformers takes the first for a limit, too, which none should reach here.
STEPS = {"time_step_min": 1e-6, "time_step_floor": 0.01}
MAMBA = {
    "nemotron_h": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 12,
        **STEPS,
    },
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 12,
        **STEPS,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 16,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "mamba", "attention"],
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
        "attention_multiplier": 0.11,
        "embedding_multiplier": 6,
        "residual_multiplier": 0.4,
        "logits_scaling": 3,
    },
    "granitemoehybrid_dense": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
        "attention_bias": True,
        "mamba_n_heads": 8,
        "mamba_d_state": 12,
        "mamba_conv_bias": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 20,
        "residual_multiplier": 0.4,
    },
}
RAW |= HYBRID | MAMBA
RAW = {name: {**SIZES, **raw} for name, raw in RAW.items()}
del RAW["qwen3_5_moe"]["intermediate_size"]  # there is no dense layer


def pack(rows: list[list[np.ndarray]], length: int) -> Batch:
    """Batch [B, T] of plain documents, padded; weights 1 wherever a token has a predecessor."""
    shape = (len(rows), length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    prev = np.full(shape, -1, np.int32)
    until = np.tile(np.arange(1, length + 1, dtype=np.int32), (len(rows), 1))
    for b, row in enumerate(rows):
        start = 0
        for document in row:
            stop = start + len(document)
            tokens[b, start:stop] = document
            positions[b, start:stop] = np.arange(len(document))
            prev[b, start + 1 : stop] = np.arange(start, stop - 1)
            until[b, start:stop] = stop
            start = stop
    weights = {"nll": (prev >= 0).astype(np.float32)}
    fields = (jnp.asarray(field) for field in (tokens, positions, prev, until))
    return Batch(*fields, weights={name: jnp.asarray(w) for name, w in weights.items()})


def documents(seed: int, *lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, SIZES["vocab_size"], n).astype(np.int32) for n in lengths]


@jax.jit
def compute_logits(model, batch):
    """Logits [B, T, V]; one program for all models of a config."""
    return model.logits(model.hidden(batch).hidden)


def check_decoding(raw: dict, scan: bool = True, apart: bool = True):
    """Prompts in two pieces and single tokens, rows pausing at times: the full forward's states."""
    model = build.init(families.config_from_hf(raw), 0, scan_layers=scan)
    texts = documents(0, 17, 12, 20)
    full = jax.jit(lambda model, batch: model.hidden(batch).hidden)(
        model, pack([[text] for text in texts], 20)
    )
    if apart:
        model = jax.jit(lambda model: model.unstack())(model)
    cache = model.init_cache(3, 20)
    decode = jax.jit(type(model).decode)
    seen, prompts = np.zeros(3, int), np.array([9, 4, 12])

    def step(width, counts):
        nonlocal cache
        tokens = np.ones((3, width), np.int32)
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            tokens[row, :count] = text[seen[row] : seen[row] + count]
        hidden, cache, *_ = decode(model, tokens, cache, jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            expected = full[row][seen[row] : seen[row] + count]
            # float32 through another kernel: a few units in the last place of numbers around 1.
            np.testing.assert_allclose(hidden[row, :count], expected, atol=2e-5)
        seen[:] += counts
        assert cache.length.tolist() == seen.tolist()

    step(7, np.minimum(prompts, 7))
    step(7, prompts - seen)
    for turn in range(10):
        remaining = np.array([len(text) for text in texts]) - seen
        step(1, np.minimum(remaining, np.arange(3) != turn % 3))
