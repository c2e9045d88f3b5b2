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
}
DEFAULT = {"glm4_moe"}
