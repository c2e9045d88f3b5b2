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
FAMILIES = {
    "gemma3": GEMMA3,
    "gemma3_softcap": {**GEMMA3, "final_logit_softcapping": 2.0, "attention_bias": True},
}
DEFAULT = {"gemma3"}
