"""The verb models: the list of families, a model's layers, and memory against sums by hand."""

import json
import math

import pytest

from jaxtrain.main import main
from jaxtrain.models import ARCHITECTURES

D, F, V, L, N, K, H = 32, 48, 97, 2, 4, 2, 8
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "max_position_embeddings": 128,
}
NORMS = D * (2 * L + 1)
MATRICES = L * (2 * D * N * H + 2 * D * K * H + 3 * D * F) + 2 * V * D
SIDES = L * ((D + N * H) * 2 + (D + K * H) * 2 + (D + F) * 3)
"""Inputs and outputs of all Linears in layers: an adapter of rank 1."""
GIB = 2.0**30


def describe(capsys, path, *words) -> tuple[int, dict]:
    code = main(["models", str(path), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def tiny(tmp_path):
    """Path of a config.json in an otherwise empty folder."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def test_all_families_are_listed(capsys):
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {name for entry in listed for name in entry["architectures"]} >= {*ARCHITECTURES}
    assert all(entry["about"].endswith(".") for entry in listed)
    assert main(["models"]) == 0
    assert "gpt_neox          GPTNeoXForCausalLM\n    GPT-NeoX (Black" in capsys.readouterr().out


@pytest.mark.slow
def test_memory_is_the_sum_of_the_arrays(tiny, capsys):
    code, facts = describe(capsys, tiny, "--tokens", "128", "--remat", "none")
    assert code == 0 and facts["supported"] and facts["layers"] == ["2 x Attention"]
    count = NORMS + MATRICES
    assert facts["parameters"] == count
    full, lora = facts["memory"]["SFT"], facts["memory"]["SFT, LoRA"]
    assert full["trained"] == count
    for part, size in {"weights": 4, "gradients": 4, "optimizer": 8}.items():
        # The optimizer counts its steps, too.
        assert math.isclose(full[part] * GIB, size * count, rel_tol=1e-3), part
    assert facts["memory"]["DPO"]["reference"] * GIB == 4 * count
    assert "reference" not in facts["memory"]["DPO, LoRA"]  # the base without the adapter
    assert lora["trained"] == 16 * SIDES
    assert lora["weights"] * GIB == 2 * count + 4 * 16 * SIDES
    assert lora["gradients"] * GIB == 4 * 16 * SIDES
    # 64 answers of 128 tokens, keys and values in bfloat16, the length of each, weights as they
    # multiply.
    cache = 64 * (128 * L * 2 * K * H * 2 + 4)
    sampler = facts["memory"]["GRPO"]["sampler"] * GIB
    assert sampler == cache + 2 * MATRICES + 4 * NORMS
    assert main(["models", str(tiny), "--tokens", "128"]) == 0
    shown = capsys.readouterr().out
    assert f"parameters   {count:,}" in shown and "SFT, QLoRA" in shown


def test_a_model_that_is_not_supported_says_why(tiny, capsys):
    tiny.write_text(json.dumps({**TINY, "hidden_act": "mish"}))
    code, facts = describe(capsys, tiny)
    assert code == 2 and not facts["supported"]
    assert "hidden_act='mish'" in facts["reason"]
    tiny.write_text(json.dumps({**TINY, "architectures": ["MptForCausalLM"]}))
    assert main(["models", str(tiny)]) == 2
    assert capsys.readouterr().out.startswith("not supported: config.json: architectures")


def test_a_method_that_does_not_fit_the_model_says_why(tiny, capsys):
    tiny.write_text(json.dumps({**TINY, "hidden_size": 36, "head_dim": 8}))
    memory = describe(capsys, tiny)[1]["memory"]
    assert "64" in memory["SFT, QLoRA"]["reason"] and "weights" in memory["SFT, LoRA"]


def test_rows_are_no_longer_than_the_texts_of_the_model(tiny, capsys):
    assert describe(capsys, tiny)[1]["step"]["tokens"] == 128
    assert main(["models", str(tiny), "--tokens", "129"]) == 2
    shown = capsys.readouterr().err
    assert "--tokens 129 is longer than the model's max_position_embeddings 128" in shown
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    tiny.write_text(json.dumps({**TINY, "rope_parameters": scaling}))
    assert describe(capsys, tiny, "--tokens", "256")[1]["step"]["tokens"] == 256
    assert main(["models", str(tiny), "--tokens", "257"]) == 2
    assert "max_position_embeddings 128 x factor 2.0" in capsys.readouterr().err


def test_what_is_no_model_is_refused(tmp_path, capsys):
    assert main(["models", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["models", str(tmp_path)]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
