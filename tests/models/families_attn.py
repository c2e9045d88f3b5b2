"""Dense families whose attention, norms or positions are not Llama's."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EPS = {"rms_norm_eps": 1e-3}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.3, 1.7],
    "long_factor": [1.0, 2.5, 6.0],
}
# Of three quarters of a head of 8, rotated as texts beyond the first length are.
PHI3 = {"model_type": "phi3", "partial_rotary_factor": 0.75, "pad_token_id": 0, **EPS}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"]
FAMILIES = {
    "olmo2": {"model_type": "olmo2", "attention_bias": True, **EPS},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 3,
        "layer_types": WINDOWS,
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        **EPS,
    },
    "smollm3": {
        "model_type": "smollm3",
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 9,
        "pad_token_id": 0,
        **EPS,
    },
    "phi3": {
        **PHI3,
        "original_max_position_embeddings": 4,
        "rope_scaling": LONGROPE,
        "sliding_window": 11,
    },
    "phi3_short": {**PHI3, "original_max_position_embeddings": 128, "rope_scaling": LONGROPE},
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            **YARN,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
            "max_position_embeddings": 128,
        },
        "sliding_window": 20,
        **EPS,
    },
    "granite": {
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.11,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
        **EPS,
    },
    "hunyuan_v1_dense": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_scaling": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        **EPS,
    },
    "ernie4_5": {
        "model_type": "ernie4_5",
        "head_dim": 16,
        "use_bias": True,
        "tie_word_embeddings": True,
        **EPS,
    },
    "exaone4": {
        "model_type": "exaone4",
        "num_hidden_layers": 3,
        "layer_types": WINDOWS,
        "sliding_window": 7,
        **EPS,
    },
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "attention_bias": True,
        "query_pre_attn_scalar": 11,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **EPS,
    },
    "seed_oss": {
        "model_type": "seed_oss",
        "head_dim": 16,
        "attention_out_bias": True,
        "mlp_bias": True,
        **EPS,
    },
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0, **EPS},
}
CHOSEN = {"olmo3", "ministral3", "phi3"}
DECODED = {"olmo3", "ministral3"}
SHARDED = {
    "olmo3": [{"tensor": 2, "fsdp": 2}, {"context": 2, "tensor": 2}],
    "ministral3": [{"context": 2, "data": 2}],
}
