"""Published config.json files of families with experts: read, counted and written again."""

import pytest

from jaxtrain.errors import UserError
from jaxtrain.models import build, families

SILU = {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
M2 = {
    **SILU,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
TRINITY = {
    **SILU,
    "architectures": ["AfmoeForCausalLM"],
    "attention_dropout": 0.0,
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072,
    "model_type": "afmoe",
    "moe_intermediate_size": 1024,
    "mup_enabled": True,
    "n_group": 1,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_expert_groups": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "num_limited_groups": 1,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "route_norm": True,
    "route_scale": 2.826,
    "score_func": "sigmoid",
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_mm": True,
    "vocab_size": 200192,
}
ERNIE = {
    **SILU,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64],
    "moe_gate": "topk",
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": 27,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_use_aux_free": True,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 103424,
}
HUNYUAN = {
    **SILU,
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_moe",
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 32,
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_shared_expert": [1] * 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_mixed_mlp_moe": True,
    "use_qk_norm": True,
    "vocab_size": 128167,
}
GLM = {
    **SILU,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}

MIMO = {
    **SILU,
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_projection_layout": "split",
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_size": 4096,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, *[1] * 4, *[0, *[1] * 5] * 7, 0],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, *[1] * 47],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}
"""Keys of Xiaomi's folders; their values are those of transformers' defaults."""


@pytest.mark.parametrize(
    ("raw", "billions", "dims", "carried"),
    [
        pytest.param(M2, (228, 229), 64, (), marks=pytest.mark.slow),
        pytest.param(TRINITY, (26, 26.5), 128, (), marks=pytest.mark.slow),
        pytest.param(ERNIE, (21.5, 22), 128, ("mtp", "model.mtp"), marks=pytest.mark.slow),
        (HUNYUAN, (80, 81), 128, ()),
        (GLM, (106, 108), 64, ("model.layers.46.",)),
    ],
    ids=["MiniMax-M2", "Trinity-Mini", "ERNIE-4.5-21B", "Hunyuan-A13B", "GLM-4.5-Air"],
)
def test_published_configs(raw, billions, dims, carried):
    """Sizes match the model cards; rotated dims are checked; keys that only these files have comes
    back."""
    config = families.config_from_hf(raw)
    assert billions[0] < build.param_count(config) / 1e9 < billions[1]
    assert 2 * len(config.encodings()["default"][0]) == dims
    assert config.carries == carried
    written = config.to_hf()
    assert families.config_from_hf(written) == config
    for key in config.fixed:
        expected = raw.get(key)
        assert written.get(key) == (expected[0] if key == "num_shared_expert" else expected) or (
            key == "moe_intermediate_size"
        )


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (M2, {"scoring_func": "softmax"}, "scoring_func"),
        (M2, {"attn_type_list": [0] + [1] * 61}, "attn_type_list may only hold 1"),
        (M2, {"num_experts": 8}, "num_local_experts=.*256.*two names of one number"),
        (TRINITY, {"score_func": "softmax"}, "score_func"),
        (TRINITY, {"n_group": 8}, "n_group"),
        (ERNIE, {"use_bias": True}, "use_bias"),
        (ERNIE, {"moe_k": 65}, "moe_k=65 must be from 1 to the 64 experts"),
        (ERNIE, {"moe_layer_interval": 0}, "moe_layer_interval=0"),
        (HUNYUAN, {"moe_topk": [8] * 31 + [4]}, "moe_topk differs from layer to layer"),
        (HUNYUAN, {"num_shared_expert": [2] * 32}, "num_shared_expert"),
        (
            HUNYUAN,
            {"moe_intermediate_size": [1024] * 32},
            "moe_intermediate_size=1024 must be 3072",
        ),
        (GLM, {"n_group": 3}, "n_group=3 must divide the 128 experts"),
        (GLM, {"scoring_func": "softmax"}, "scoring_func"),
        (MIMO, {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads=4 .* only 8 is"),
        (MIMO, {"swa_head_dim": 128}, "swa_head_dim=128 is not supported; only 192 is"),
        (MIMO, {"num_key_value_heads": "4"}, "num_key_value_heads"),
        (MIMO, {"moe_layer_freq": 1}, "moe_layer_freq must be a list of 0 and 1"),
        (MIMO, {"hybrid_layer_pattern": [1.0] * 48}, "hybrid_layer_pattern must be a list"),
        (MIMO, {"layer_types": ["full_attention"] * 48}, "and layer_types differ"),
        (MIMO, {"sliding_window_size": "128"}, "sliding_window_size='128' must be an integer"),
        (MIMO, {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
    ],
)
def test_what_is_not_computed_is_refused(raw, change, message):
    with pytest.raises(UserError, match=message):
        families.config_from_hf({**raw, **change})


def test_xiaomis_keys_say_what_transformers_does_with_them():
    """Of the lists of layers it knows its own defaults alone, which are those of the folder."""
    transformers = pytest.importorskip("transformers")
    config = families.config_from_hf(MIMO)
    assert 308 < build.param_count(config) / 1e9 < 310  # 309 of the model card, without its heads
    theirs = transformers.AutoConfig.for_model(**MIMO)
    written = config.to_hf()
    for key in written.keys() - {"architectures"}:
        assert getattr(theirs, key) == written[key], key
    assert families.config_from_hf(written) == config
    changed = {"layernorm_epsilon": 1e-6, "swa_rope_theta": 2e4, "rope_theta": 3e6}
    changed |= {"moe_layer_freq": [0, 0, *[1] * 46], "partial_rotary_factor": 0.5}
    moved = families.config_from_hf({**MIMO, **changed})
    assert moved.rms_norm_eps == 1e-6 and moved.mlp_layer_types[:3] == ("dense", "dense", "sparse")
    table = moved.to_hf()["rope_parameters"]
    assert [table[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [
        3e6,
        2e4,
    ]
    assert {part["partial_rotary_factor"] for part in table.values()} == {0.5}
