"""Families with a mixture of experts."""

EXPERTS = {"rms_norm_eps": 1e-3, "num_experts_per_tok": 2, "num_experts": 6}
GROUPED = {
    "rms_norm_eps": 1e-3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1e4,
}

GRANITE = {
    "rms_norm_eps": 1e-3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "attention_multiplier": 0.11,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}

FAMILIES = {
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
    },
    "olmoe": {"model_type": "olmoe", **EXPERTS, "clip_qkv": 0.9, "attention_bias": True},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **GROUPED,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **EXPERTS,
        "head_dim": 12,
        "num_experts": None,
        "num_local_experts": 6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "rms_norm_eps": 1e-3,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_norm_min": 0.4,
        "tie_word_embeddings": False,
    },
    "granitemoe": {**GRANITE, "model_type": "granitemoe", "attention_bias": True},
    "granitemoeshared": {
        **GRANITE,
        "model_type": "granitemoeshared",
        "shared_intermediate_size": 20,
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "rms_norm_eps": 1e-3,
        "num_experts": 6,
        "moe_topk": 2,
        "head_dim": 12,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 1e4, "alpha": 8.0},
    },
    "afmoe": {
        "model_type": "afmoe",
        **EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 12,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "global_attn_every_n_layers": 3,
        "sliding_window": 7,
        "route_scale": 2.5,
        "mup_enabled": True,
        "attention_bias": True,
    },
    "dots1": {
        "model_type": "dots1",
        **GROUPED,
        "norm_topk_prob": True,
        "sliding_window": 7,
        "max_window_layers": 2,
        "attention_bias": True,
        "head_dim": 12,
    },
    "solar_open": {
        "model_type": "solar_open",
        **GROUPED,
        "first_k_dense_replace": None,
        "intermediate_size": None,
        "attention_bias": True,
        "head_dim": 12,
        "rope_parameters": YARN,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "norm_eps": 1e-3,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "head_dim": 12,
        "num_dense_layers": 1,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
CHOSEN = {"lfm2_moe", "minimax_m2"}
DECODED = {"lfm2_moe"}
SHARDED = {  # GLM's router is DeepSeek's, which families_mla.py has
    "lfm2_moe": [{"context": 2, "tensor": 2}],
}
