"""Dense families that vary Llama's block: LayerNorm, MLPs without a gate, parallel layers."""

EPS = {"rms_norm_eps": 1e-3}
WINDOWS = ["sliding_attention", "full_attention"]
QUARTERS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    }
}
GRANITE = {
    "attention_bias": True,
    "mlp_bias": True,
    "attention_multiplier": 0.11,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
    **EPS,
}
FAMILIES = {
    "arcee": {"model_type": "arcee", "attention_bias": True, "mlp_bias": True, **EPS},
    "jais2": {"model_type": "jais2", "layer_norm_eps": 1e-3},
    "nemotron": {
        "model_type": "nemotron",
        "norm_eps": 1e-3,
        "attention_bias": True,
        "mlp_bias": True,
        **QUARTERS,
    },
    "ministral": {
        "model_type": "ministral",
        "head_dim": 12,
        "sliding_window": 7,
        "layer_types": WINDOWS,
        **EPS,
    },
    "gemma": {"model_type": "gemma", "head_dim": 12, "attention_bias": True, **EPS},
    "vaultgemma": {
        "model_type": "vaultgemma",
        "head_dim": 16,
        "attention_bias": True,
        "query_pre_attn_scalar": 11,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **EPS,
    },
    "glm": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0, **QUARTERS, **EPS},
    "helium": {
        "model_type": "helium",
        "head_dim": 8,
        "pad_token_id": 0,
        "attention_bias": True,
        "mlp_bias": True,
        **EPS,
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 0.05, "attention_bias": True},
    "cohere": {
        "model_type": "cohere",
        "layer_norm_eps": 1e-3,
        "attention_bias": True,
        "logit_scale": 0.3,
    },
    "cohere2": {
        "model_type": "cohere2",
        "layer_norm_eps": 1e-3,
        "attention_bias": True,
        "logit_scale": 0.3,
        "sliding_window": 7,
        "layer_types": WINDOWS,
    },
    "starcoder2": {"model_type": "starcoder2", "norm_epsilon": 1e-3, "sliding_window": 7},
    "stablelm": {
        "model_type": "stablelm",
        "layer_norm_eps": 1e-3,
        "use_qkv_bias": True,
        **QUARTERS,
    },
    "stablelm_parallel": {
        "model_type": "stablelm",
        "layer_norm_eps": 1e-3,
        "use_parallel_residual": True,
        **QUARTERS,
    },
    "granite_swa": {
        "model_type": "granite_swa",
        **GRANITE,
        "num_hidden_layers": 3,
        "sliding_window": 7,
        "layer_types": ["full_attention", *WINDOWS],
        "layer_rope_theta": [0, 1e4, 500.0],
    },
    "hyperclovax": {"model_type": "hyperclovax", **GRANITE},
}
CHOSEN = {"cohere2", "glm4", "granite", "smollm3", "starcoder2"}
