"""Gemma 3 and 4."""

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 7,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, FULL],
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 7,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 2.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
FAMILIES = {
    "gemma4": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_moe": {
        **GEMMA4,
        **EXPERTS,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "attention_bias": True,
        "use_bidirectional_attention": "vision",
    },
    "gemma4_per_layer": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 97,
    },
    "gemma3": GEMMA3,
    "gemma3_softcap": {**GEMMA3, "final_logit_softcapping": 2.0, "attention_bias": True},
}
CHOSEN = {"gemma4_per_layer", "gemma3"}
DECODED = {"gemma4_per_layer"}
SHARDED = {
    "gemma4_moe": [{"expert": 2, "tensor": 2}],
    "gemma4_per_layer": [{"fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2}],
}
