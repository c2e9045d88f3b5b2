"""gpt-oss: windows shorter than the rows, positions beyond what YaRN scales from, limits that
values reach."""

FAMILIES = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "hidden_size": 28,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rms_norm_eps": 1e-3,
        "swiglu_limit": 0.3,
        "initializer_range": 0.3,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
            "rope_theta": 150000.0,
        },
    },
    "gpt_oss_plain": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}
CHOSEN = {"gpt_oss"}
SHARDED = {"gpt_oss_plain": [{"context": 2, "fsdp": 2}, {"tensor": 2, "expert": 2}]}
