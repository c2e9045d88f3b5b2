"""Families with latent attention."""

LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "rms_norm_eps": 1e-3,  # that of latents is not this
    "moe_intermediate_size": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 3, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 20,  # of 48 tokens
    "beta_fast": 32,
    "beta_slow": 1,
}
# As many keys as a row has tokens: see models/deepseek_v32.py.
INDEXER = {"index_topk": 48, "index_n_heads": 3, "index_head_dim": 8}
FAMILIES = {
    "deepseek_v3": {
        **LATENT,
        **GROUPS,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "deepseek_v3_halves": {
        **LATENT,
        **GROUPS,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        **LATENT,
        **GROUPS,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v2_lite": {
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,  # says nothing in this family
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "glm4_moe_lite": {
        **LATENT,
        "model_type": "glm4_moe_lite",
        "num_attention_heads": 5,  # do not divide hidden_size
        "num_key_value_heads": 5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "tie_word_embeddings": True,
    },
    "mistral4": {
        **LATENT,
        **GROUPS,
        "model_type": "mistral4",
        "first_k_dense_replace": 1,
        "rope_parameters": {
            **YARN,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 12,
            "max_position_embeddings": 128,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "deepseek_v32": {
        **LATENT,
        **GROUPS,
        **INDEXER,
        "model_type": "deepseek_v32",
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm_moe_dsa": {
        **LATENT,
        **INDEXER,
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full"],
    },
}
DEFAULT = {"deepseek_v3"}
CHOSEN = {"deepseek_v32"}
SHARDED = {"deepseek_v3": [{"tensor": 2, "fsdp": 2}, {"expert": 2, "context": 2}]}
