"""Keys and tensor names of GGUF files (llama.cpp), by family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

ATTRIBUTES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
}
"""What all families have: {key behind the architecture's name: attribute of config.json}."""
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = LAYER | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
JOINT = LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclasses.dataclass(frozen=True)
class GgufFamily:
    """A family in GGUF."""

    name: str
    """general.architecture."""
    architecture: str
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Keys besides ATTRIBUTES."""
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: LAYER)
    """{name behind blk.<n>.: name behind model.layers.<n>.}; {} stands for an expert's number."""
    interleaved: bool = False
    """Whether rows of queries and keys are stored in rotated pairs."""
    norm_offset: int = 0
    """What is added to the weights of norms."""
    constant: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes that the format leaves out and llama.cpp takes for granted."""
    rotated: str | None = "head_dim"
    """The attribute behind rope.dimension_count, where a file has no attention.key_length."""


GEMMA = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
FAMILIES = (
    GgufFamily("llama", "LlamaForCausalLM", interleaved=True),
    GgufFamily("llama", "MistralForCausalLM", interleaved=True),
    GgufFamily("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    GgufFamily("qwen2", "Qwen2ForCausalLM"),
    GgufFamily("qwen3", "Qwen3ForCausalLM"),
    GgufFamily(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        EXPERTS,
        constant={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    GgufFamily("gemma2", "Gemma2ForCausalLM", GEMMA, SANDWICH, norm_offset=1),
    GgufFamily(
        "gemma3",
        "Gemma3ForCausalLM",
        {"attention.sliding_window": "sliding_window"},
        SANDWICH,
        norm_offset=1,
    ),
    GgufFamily(
        "phi3",
        "Phi3ForCausalLM",
        {
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        JOINT,
        rotated=None,
    ),
)
