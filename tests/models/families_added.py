"""Families that combine mechanisms which the families of other files have one by one."""

EPS = {"rms_norm_eps": 1e-3}
WINDOWS = ["sliding_attention", "full_attention"]
THREE = ["full_attention", *WINDOWS]
SPARSE = ["dense", "sparse", "sparse"]
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
EXPERTS = {**EPS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED = {"sliding_window": 7, "layer_types": THREE, "num_hidden_layers": 3}
LATENT = {
    **EPS,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "attention_bias": True,
}
NEOX = {"layer_norm_eps": 1e-3, "num_key_value_heads": None}
GPT = {
    **{"layer_norm_epsilon": 1e-3, "rotary_dim": 8},
    **dict.fromkeys(("intermediate_size", "num_key_value_heads")),
}
FALCON = {
    "model_type": "falcon",
    "layer_norm_epsilon": 1e-3,
    "ffn_hidden_size": 48,
    **dict.fromkeys(("intermediate_size", "num_key_value_heads")),
}
COMMAND = {
    "model_type": "cohere2_moe",
    "layer_norm_eps": 1e-3,
    "attention_bias": True,
    "logit_scale": 0.3,
    **WINDOWED,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
SCOUT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}
LLAMA4 = {
    "model_type": "llama4_text",
    **EPS,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "intermediate_size_mlp": 40,
    "num_local_experts": 6,
    "attention_bias": True,
    "attention_chunk_size": 7,
    "attn_scale": 0.3,
    "floor_scale": 5,
}
FAMILIES = {
    "llama4": {**LLAMA4, "moe_layers": [0, 3], "rope_parameters": SCOUT_ROPE},
    "llama4_top2": {
        **LLAMA4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [0, 1, 1, 0],
        "layer_types": ["chunked_attention", *THREE[:1] * 2, "chunked_attention"],
        "use_qk_norm": False,
    },
    "cwm": {"model_type": "cwm", **WINDOWED, **EPS, "mlp_bias": True, "head_dim": 12},
    "cohere2_moe": {
        **COMMAND,
        "num_shared_experts": 2,
        "prefix_dense_intermediate_size": 20,
        "mlp_layer_types": SPARSE,
    },
    "cohere2_moe_sum": {
        **COMMAND,
        "rms_norm_eps": 1e-2,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "layer_types": None,
    },
    "mimo_v2_flash": {
        "model_type": "mimo_v2_flash",
        **EXPERTS,
        "num_experts": None,
        "n_routed_experts": 6,
        "num_hidden_layers": 4,
        "layer_types": [*THREE, "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "sliding_window": 7,
        "head_dim": 12,
        "v_head_dim": 7,
        "attention_bias": True,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        **EXPERTS,
        **WINDOWED,
        "mlp_layer_types": SPARSE,
        "num_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
    },
    "flex_olmo": {"model_type": "flex_olmo", **EXPERTS, "moe_intermediate_size": None}
    | {"attention_bias": True, "pad_token_id": 0},
    "hy_v3": {
        "model_type": "hy_v3",
        **EXPERTS,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_layer_types": SPARSE,
        "num_shared_experts": 2,
    },
    "mellum": {
        "model_type": "mellum",
        **EXPERTS,
        **WINDOWED,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_layer_types": SPARSE,
        "rope_parameters": {
            "sliding_attention": ROPES["sliding_attention"],
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
    },
    "flint": {
        "model_type": "flint",
        **EXPERTS,
        **WINDOWED,
        "head_dim": 12,
        "attention_bias": True,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 20,
    },
    "youtu": {"model_type": "youtu", **LATENT, "tie_word_embeddings": False},
    "minicpm3": {
        "model_type": "minicpm3",
        **LATENT,
        "scale_emb": 3.0,
        "scale_depth": 0.7,
        "dim_model_base": 20,
    },
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        **EPS,
        **WINDOWED,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.11,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "attention_bias": True,
        "layer_rope_theta": [0, 1e4, 500.0],
        "shared_intermediate_size": 20,
    },
    "nanochat": {"model_type": "nanochat", "attention_bias": True, "rms_norm_eps": 1e-2},
    "gpt_neox": {"model_type": "gpt_neox", **NEOX},
    "gpt_neox_in_turn": {
        "model_type": "gpt_neox",
        **NEOX,
        "use_parallel_residual": False,
        "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "phi": {"model_type": "phi", "layer_norm_eps": 1e-3, "num_key_value_heads": 2},
    "phi_norms": {"model_type": "phi", "layer_norm_eps": 1e-3, "qk_layernorm": True},
    "gptj": {"model_type": "gptj", **GPT},
    "gptj_half": {"model_type": "gptj", **GPT, "n_inner": 48, "rotary_dim": 4},
    "codegen": {"model_type": "codegen", **GPT, "tie_word_embeddings": False},
    "persimmon": {"model_type": "persimmon", **NEOX},
    "falcon": {**FALCON, "bias": True},
    "falcon_groups": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_in_turn": {
        **FALCON,
        "parallel_attn": False,
        "multi_query": False,
        "tie_word_embeddings": False,
    },
    "apertus": {
        "model_type": "apertus",
        **EPS,
        "pad_token_id": 0,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "lfm2": {
        "model_type": "lfm2",
        "norm_eps": 1e-3,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 8,
        "tie_word_embeddings": False,
    },
    "olmo_hybrid": {
        "model_type": "olmo_hybrid",
        **EPS,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 3,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "olmo_hybrid_unrotated": {
        "model_type": "olmo_hybrid",
        **EPS,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_allow_neg_eigval": False,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "lfm3": {
        "model_type": "lfm3",
        "norm_eps": 1e-3,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "head_dim": 16,
        "attention_bias": True,
        "sliding_window": 7,
        "pad_token_id": 0,
        "rope_parameters": ROPES,
    },
}
DEFAULT = {"lfm3", "falcon_groups"}
CHOSEN = {"apertus", "exaone_moe", "nanochat", "phi", "youtu"}
SHARDED = {
    "olmo_hybrid": [{"fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 2}],
    "phi": {"fsdp": 2, "tensor": 2},
}
DECODED = {"llama4", "mimo_v2_flash", "olmo_hybrid"}
