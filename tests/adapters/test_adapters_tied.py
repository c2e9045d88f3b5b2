"""Adapters of PEFT with one of the two tables of a tied base: what PEFT computes, merged."""

import json

import numpy as np
import pytest
from tiny_models import compute_logits, pack

from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.models import loading

torch = pytest.importorskip("torch", reason="PEFT needs torch")
peft = pytest.importorskip("peft", reason="PEFT is the reference")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

TOKENS = torch.tensor([np.random.default_rng(0).integers(0, 97, 30).tolist()])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return make_base(tmp_path_factory.mktemp("base"), "llama", num_hidden_layers=2, **sizes)


def make_base(folder, model_type, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=97, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


CASES = {
    "embedding": ({"modules_to_save": ["embed_tokens"]}, False),
    "head": ({"modules_to_save": ["lm_head"]}, False),
    "both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
    "kept tied": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "rows": ({"trainable_token_indices": [3, 5]}, True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stored", [False, True], ids=["stored once", "stored twice"])
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_pefts(base, tmp_path, case, stored):
    settings, tied = CASES[case]
    folder = base
    if stored:
        folder = tmp_path / "base"
        folder.mkdir()
        state = load_file(base / "model.safetensors")
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    check_merge(folder, tmp_path, {"target_modules": ["q_proj"], **settings}, tied)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "tied"),
    [({"modules_to_save": ["wte"]}, False), ({"trainable_token_indices": [3, 5]}, True)],
    ids=["embedding", "rows"],
)
def test_merged_logits_of_gpt2_are_pefts(tmp_path, settings, tied):
    base = make_base(tmp_path / "base", "gpt2", n_embd=32, n_layer=1, n_head=4)
    settings = {"target_modules": ["c_fc"], "fan_in_fan_out": True, **settings}
    check_merge(base, tmp_path, settings, tied)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stored", [False, True], ids=["stored once", "stored twice"])
def test_a_head_of_another_name_is_untied_and_read_again(tmp_path, stored):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    base = make_base(tmp_path / "base", "gpt_neox", num_hidden_layers=1, **sizes)
    if stored:
        state = load_file(base / "model.safetensors")
        state["embed_out.weight"] = state["gpt_neox.embed_in.weight"].clone()
        save_file(state, base / "model.safetensors", {"format": "pt"})
    settings = {"target_modules": ["dense"], "modules_to_save": ["lm_head"]}
    expected = check_merge(base, tmp_path, settings, False)
    model = loading.load(tmp_path / "merged")
    batch = pack([[TOKENS[0].numpy()]], TOKENS.shape[1])
    np.testing.assert_allclose(compute_logits(model, batch), expected, atol=2e-5)


def check_merge(folder, tmp_path, settings, tied):
    torch.manual_seed(1)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(loaded, lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        expected = model.eval()(TOKENS).logits
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        actual = merged.eval()(TOKENS).logits
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    raw = json.loads((tmp_path / "merged/config.json").read_text())
    assert raw.get("tie_word_embeddings", True) is tied
    return expected
