"""Families with latent attention: published configs, folders with more than text, row lengths."""

import types

import numpy as np
import pytest

pytest.importorskip("torch", reason="folders are written by transformers' models")

import torch
import transformers
from families_mla import FAMILIES
from safetensors.numpy import load_file
from test_models_families import relative_error
from tiny_models import SIZES, compute_logits, documents, pack

from jaxtrain.adapters.spec import find_linears
from jaxtrain.config.model import ModelConfig
from jaxtrain.core.bundle import check_fit
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving

YARN = {"beta_slow": 1, "original_max_position_embeddings": 4096, "type": "yarn"}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "beta_fast": 32, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI = V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
LITE = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "first_k_dense_replace": 1,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(
    "raw, billions, carried",
    # What model cards say; of MTP layers that a folder has, nothing is counted here.
    [
        (V3, (670, 672), ("model.layers.61.",)),
        (KIMI, (1020, 1030), ()),
        (LITE, (15.6, 15.8), ()),
        (FLASH, (29, 31), ("model.layers.47.",)),
    ],
    ids=["DeepSeek-V3", "Kimi-K2", "DeepSeek-V2-Lite", "GLM-4.7-Flash"],
)
def test_published_configs(raw, billions, carried):
    config = families.config_from_hf(raw)
    assert billions[0] < build.param_count(config) / 1e9 < billions[1]
    assert config.carries == config.goes_stale == carried
    written = config.to_hf()
    assert families.config_from_hf(written) == config
    assert "quantization_config" not in written and "auto_map" not in written
    for key in ("topk_method", "num_nextn_predict_layers", "ep_size"):
        assert written.get(key) == raw.get(key), key
    # GLM-4.7-Flash's does not say it; vLLM asks.
    assert written["scoring_func"] == raw.get("scoring_func", "sigmoid")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scoring_func": "softmax"}, 'scoring_func=.*"softmax".*only "sigmoid"'),
        ({"moe_layer_freq": 2}, "moe_layer_freq=.*2 is not.*only 1 is"),
        ({"num_key_value_heads": 64}, "num_key_value_heads=64 must be num_attention_heads=128"),
        ({"rope_scaling": {**V3["rope_scaling"], "type": "linear"}}, "linear.*does not know.*beta"),
        ({"topk_group": 9}, "topk_group"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method=awq"),
    ],
)
def test_what_is_not_computed_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        families.config_from_hf(V3 | change)


def test_rows_longer_than_an_indexer_lets_through_are_refused():
    architecture = families.config_from_hf({**SIZES, **FAMILIES["deepseek_v32"]})
    assert architecture.longest == 48 < architecture.max_position_embeddings
    config = types.SimpleNamespace(
        model=ModelConfig(),
        data=types.SimpleNamespace(sequence_len=48),
    )
    check_fit(config, architecture, range(90))
    config.data.sequence_len = 49
    with pytest.raises(UserError, match=r"sequence_len 49 is longer.*index_topk 48 .*indexer"):
        check_fit(config, architecture, range(90))


def test_adapters_find_every_matrix_by_its_name():
    linears = find_linears(families.config_from_hf({**SIZES, **FAMILIES["deepseek_v3"]}))
    actual = {
        of.modules[0].rsplit(".", 1)[1]: of.preset
        for path, of in linears.items()
        if ".attention." in path and "dense" in path
    }
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert actual == dict.fromkeys(names, "attention")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_text_of_a_multimodal_mistral(tied, tmp_path):
    """Logits of text, and everything else of the folder bit by bit."""
    text = {**SIZES, **FAMILIES["mistral4"]}
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "intermediate_size": 16, "image_size": 28}
    torch.manual_seed(0)
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**vision, "patch_size": 14}, tie_word_embeddings=tied
    )
    reference = transformers.Mistral3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    reference.save_pretrained(tmp_path / "theirs")
    model = loading.load(tmp_path / "theirs")
    row = documents(1, 20, 20)[0]
    with torch.no_grad():
        expected = reference(input_ids=torch.from_numpy(np.asarray(row)[None]).long()).logits[0]
    logits = compute_logits(model, pack([[row]], 20))[0]
    assert relative_error(np.asarray(logits), expected.numpy()) < 1e-4
    saving.save(model, families.read_config(tmp_path / "theirs"), tmp_path / "ours")
    names = [
        load_file(tmp_path / selection / "model.safetensors") for selection in ("theirs", "ours")
    ]
    assert {k: v.tobytes() for k, v in names[0].items()} == {
        k: v.tobytes() for k, v in names[1].items()
    }
    transformers.Mistral3ForConditionalGeneration.from_pretrained(tmp_path / "ours")
