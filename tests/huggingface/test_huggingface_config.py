"""config.json: old and new spellings are one, defaults are transformers', surprises are refused,
and attributes that transformers does not know are carried along."""

import json

import pytest
import transformers

from jaxtrain.errors import UserError
from jaxtrain.models import ARCHITECTURES, build, families

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_published_qwen3_config_counts_its_published_parameters():
    config = families.config_from_hf(QWEN3)
    # The model card of Qwen3-0.6B: 0.6B parameters, 0.44B without embeddings.
    assert build.param_count(config) == 596_049_920
    assert build.param_count(config) - config.vocab_size * config.hidden_size == 440_467_456
    assert dict(config.rope) == {"rope_theta": 1000000, "rope_type": "default"}


LEFT_OUT = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
    "Mistral3ForConditionalGeneration": {
        "text_config": {"model_type": "mistral"},
        "tie_word_embeddings": False,
    },
    "Idefics3ForConditionalGeneration": {
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5},
        "vision_config": {"model_type": "idefics3_vision", "patch_size": 28},
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5},
        "vision_config": {"model_type": "smolvlm_vision", "patch_size": 28},
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": {"tie_word_embeddings": False},
        "vision_config": {"hidden_size": 8192},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": {"tie_word_embeddings": False},
        "vision_config": {"out_hidden_size": 8192},
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": {"model_type": "qwen3_vl_text", "tie_word_embeddings": False},
        "vision_config": {"model_type": "qwen3_vl_vision", "out_hidden_size": 4096},
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "tie_word_embeddings": False,
            "norm_topk_prob": True,
        },
        "vision_config": {"model_type": "qwen3_vl_moe_vision", "out_hidden_size": 2048},
    },
}
"""What the defaults of transformers' classes lack for a model."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_round_trip_and_transformers_agree(architecture):
    module = families.find_family(architecture)
    raw = {"architectures": [architecture], "model_type": module.Config.model_type}
    left_out = LEFT_OUT.get(architecture, {})
    raw |= left_out
    if "ForConditionalGeneration" in architecture:  # text is a level of its own
        raw.setdefault("text_config", {})
    config = families.config_from_hf({**raw, "eos_token_id": [7, 9]})
    written = json.loads(json.dumps(config.to_hf()))
    assert families.config_from_hf(written) == config
    assert written["eos_token_id"] == [7, 9] and written["architectures"] == [architecture]
    reference = transformers.AutoConfig.for_model(**written).to_dict()
    default = transformers.AutoConfig.for_model(written["model_type"], **left_out).to_dict()
    differing = {k for k in default if reference.get(k) != default[k]} - {"eos_token_id"}
    assert differing <= {"architectures"}


def test_old_and_new_rope_spelling_are_one():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling}
    new = {"model_type": "llama", "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert families.config_from_hf(old) == families.config_from_hf(new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_dropout": 1.5}, "attention_dropout=1.5 .* default 0.0"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"output_router_logits": True, "alibi": True}, "alibi=true"),
        ({"hidden_act": "softplus"}, "softplus"),
        ({"num_key_value_heads": 3}, "multiple of"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type='ntk'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "odd": 1}}, "odd"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*LlamaForCausalLM"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_surprises_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**QWEN3, **change})


def test_older_names_of_keys_are_read():
    """Keys of LFM2's and Pythia's files that transformers has other names for."""
    lfm2 = {
        **{"model_type": "lfm2", "num_hidden_layers": 3, "tie_embedding": False},
        **{"full_attn_idxs": [1], "block_ff_dim": 48, "block_use_swiglu": True},
    }
    config = families.config_from_hf(lfm2)
    assert config.layer_types == ("conv", "full_attention", "conv")
    assert config.intermediate_size == 48 and not config.tie_word_embeddings
    assert families.config_from_hf(config.to_hf()) == config
    with pytest.raises(UserError, match="block_use_swiglu"):
        families.config_from_hf({**lfm2, "block_use_swiglu": False})
    pythia = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500}
    rope = {"rope_theta": 500, "partial_rotary_factor": 0.5}
    new = families.config_from_hf({"model_type": "gpt_neox", "rope_parameters": rope})
    assert families.config_from_hf(pythia) == new
    assert families.config_from_hf(new.to_hf()) == new
    # transformers reads them in LFM2's files alone.
    lfm3 = {"model_type": "lfm3", "intermediate_size": 40, "block_ff_dim": 48}
    assert families.config_from_hf(lfm3).intermediate_size == 40


KINDS = ["sliding_attention", "full_attention"]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LONG = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
    **{"short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
}


@pytest.mark.parametrize("family", ["lfm3", "mellum"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"full_attention": PLAIN}}, "no sliding_attention"),
        ({"rope_parameters": dict.fromkeys(KINDS, LONG)}, "longrope"),
        ({"sliding_window": None}, "sliding_window"),
    ],
)
def test_each_kind_of_layer_has_its_encoding_and_window(family, change, words):
    raw = {
        **{"model_type": family, "num_hidden_layers": 2, "layer_types": KINDS, "head_dim": 128},
        **{"sliding_window": 16, "rope_parameters": dict.fromkeys(KINDS, PLAIN)},
    }
    names = {spec.rope for spec in families.config_from_hf(raw).layers()}
    assert names == {*KINDS}
    further = {**raw["rope_parameters"], "other": PLAIN}
    families.config_from_hf({**raw, "rope_parameters": further})  # of no layer
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**raw, **change})


def test_one_encoding_for_all_kinds_of_layers_is_refused_by_its_key():
    with pytest.raises(UserError, match="rope_parameters must hold an object for each kind"):
        families.config_from_hf({"model_type": "mellum", "rope_parameters": PLAIN})


@pytest.mark.parametrize("theta", [-1.0, 0.5])
def test_bases_of_layers_are_above_1_or_0(theta):
    raw = {"model_type": "granite_swa", "num_hidden_layers": 2, "layer_rope_theta": [0, theta]}
    with pytest.raises(UserError, match=f"layer_rope_theta holds {theta}"):
        families.config_from_hf(raw)


GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


def test_a_refusal_lists_every_attribute():
    raw = {**GEMMA3, "attn_logit_softcapping": 30.0, "use_bidirectional_attention": True}
    with pytest.raises(UserError) as refusal:
        families.config_from_hf({**raw, "cache_implementation": "odd", "alibi": True})
    for key in ("attn_logit_softcapping", "use_bidirectional", "cache_implementation", "alibi"):
        assert key in str(refusal.value)


def test_attributes_that_transformers_does_not_know_are_carried_along(capsys):
    unknown = {"unk_token_id": 0, "badwordsids": [[0]], "use_qk_norm": True, "max_sequence": 2}
    config = families.config_from_hf({**QWEN3, **unknown})
    assert {key: config.to_hf()[key] for key in unknown} == unknown
    plain = families.config_from_hf(QWEN3)
    assert {key: v for key, v in config.to_hf().items() if key not in unknown} == plain.to_hf()
    families.warn_unread(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(key in line for key in unknown)
    # As transformers 4 wrote all attributes of a config, at their defaults.
    full = {"pruned_heads": {}, "is_decoder": False, "length_penalty": 1.0, "min_length": 0}
    for silent in (plain, families.config_from_hf({**QWEN3, **full, "prefix": None})):
        families.warn_unread(silent)
        assert not capsys.readouterr().err


@pytest.mark.parametrize("value", [0, False, None, 0.0])
def test_what_is_off_changes_nothing(value):
    raw = {"model_type": "granite", "position_embedding_type": None, "shared_experts": value}
    families.config_from_hf(raw)
    actual = families.config_from_hf({**GEMMA3, "attn_logit_softcapping": value})
    assert actual == families.config_from_hf(GEMMA3)


def test_layers_of_gemma4_are_compared_as_numbers():
    """transformers writes "05" and "11" where there are more than ten layers."""
    sizes = {"num_hidden_layers": 12, "head_dim": 16, "global_head_dim": 32}
    saved = transformers.AutoConfig.for_model("gemma4_text", **sizes).to_dict()
    saved["architectures"] = ["Gemma4ForCausalLM"]
    assert "05" in saved["per_layer_config"]
    assert families.config_from_hf(saved).global_head_dim == 32


def test_switches_that_are_off_pass():
    families.config_from_hf({**QWEN3, "use_mrope": False, "new_thing": None})


def test_code_beside_the_weights_is_not_what_a_known_type_runs():
    """transformers does not either, unless it is told to trust it."""
    raw = {**QWEN3, "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    assert "auto_map" not in families.config_from_hf(raw).to_hf()


@pytest.mark.parametrize("raw", [{"model_type": "bloom"}, {}, {"vocab_size": 97}])
def test_a_config_that_names_no_family_is_refused(raw):
    with pytest.raises(UserError, match="model_type"):
        families.config_from_hf(raw)
