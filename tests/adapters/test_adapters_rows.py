"""Tokens added beside an adapter: rows that train, PEFT's folders of them, merged tables."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import compute_logits, pack

from jaxtrain.adapters.attach import without_adapters
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import write_peft
from jaxtrain.adapters.rows import TokenRows
from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

ARCHITECTURE = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "eos_token_id": 1},
}
GPT2 = {
    **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 512},
    **{"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "eos_token_id": 1},
}
GPTJ = {
    **{**GPT2, "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "rotary_dim": 4},
    "tie_word_embeddings": False,
}
NEOX = {
    **{"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 512},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "eos_token_id": 1},
    **{"num_attention_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False},
}
ADDED = {"added_tokens": ["<tool>", "</tool>"], "special_tokens": {"eos_token": "<stop>"}}
IDS = (512, 513, 514)
TOKENS = np.asarray([[5, 513, 7, 514, 512, 9, 300, 2]])
BATCH = pack([[TOKENS[0]]], TOKENS.shape[1])
TABLES = {"embed", "lm_head"}
FULL = {"train_embeddings": True, "train_head": True}
MLP = {"target": "mlp"}
"""For families whose queries, keys and values are one matrix, with a pair of another rank."""


def test_rows_stand_in_for_the_table_s_and_alone_have_a_gradient():
    table = jnp.arange(12.0).reshape(6, 2)
    tokens = jnp.asarray([[5, 0, 2, 4]])
    # In any order, and with the largest and a small id.
    token_rows = TokenRows(jnp.asarray([[50.0, 51], [20, 21]]), (5, 2))
    actual = token_rows.look_up(table[tokens], tokens)
    np.testing.assert_array_equal(actual[0], [[50, 51], [0, 1], [20, 21], [8, 9]])
    np.testing.assert_array_equal(token_rows.place(table)[tokens], actual)
    assert token_rows.place(table.astype(jnp.bfloat16)).dtype == jnp.bfloat16

    def loss(rows):
        return TokenRows(rows, (5, 2)).look_up(table[tokens], tokens).sum()

    np.testing.assert_array_equal(jax.grad(loss)(token_rows.rows[...]), np.ones((2, 2)))


class Case(NamedTuple):
    """A base with an adapter whose values are no longer those of the start."""

    base: Path
    bundle: Any
    params: dict
    """At the start."""
    values: dict
    """Of what is trained."""
    logits: np.ndarray
    """Of TOKENS."""


def make_base(folder, kind):
    """kind: a config.json, or whether that of ARCHITECTURE is tied."""
    raw = kind if isinstance(kind, dict) else {**ARCHITECTURE, "tie_word_embeddings": kind}
    config = families.config_from_hf(raw)
    model = build.init(config, 0)
    if config.head_bias:  # of mean 0, which PEFT's base has in new rows
        model.lm_head.bias.set_value(jnp.linspace(-1, 1, config.vocab_size))
    saving.save(model, config, folder)
    load_tokenizer("builtin").save_pretrained(folder)
    return folder


def config_of(base, **adapter):
    return {
        "run": {"max_steps": 1},
        "model": {"path": str(base), "compute_dtype": "float32", **ADDED},
        "data": {"datasets": [{"path": "a.jsonl"}], "sequence_len": 32},
        "adapter": {"kind": "lora", **adapter},
    }


def parts_of(base, **adapter):
    return build_model_bundle(Config.model_validate(config_of(base, **adapter)))


def logits_of(parts, params, change=lambda model: model):
    model = change(abstract_params(parts)[1](params))
    return np.asarray(compute_logits(model, BATCH))


def open_case(base, **adapter):
    parts = parts_of(base, **adapter)
    with jax.set_mesh(parts.mesh):
        params = open_params(parts, 0)
    rng = np.random.default_rng(1)
    values = {
        path: jnp.asarray(np.asarray(value) + 0.3 * rng.standard_normal(value.shape), jnp.float32)
        for path, value in params.items()
        if parts.adapter.trains(path)
    }
    return Case(base, parts, params, values, logits_of(parts, {**params, **values}))


@pytest.fixture(scope="module")
def base(request, tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"), request.param)


def peft_model(case, folder):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    model = transformers.AutoModelForCausalLM.from_pretrained(case.base)
    model.resize_token_embeddings(len(case.bundle.tokenizer), mean_resizing=False)
    return peft.PeftModel.from_pretrained(model, folder).eval()


@pytest.mark.parametrize(
    ("base", "adapter"),
    [
        pytest.param(False, {}, id="rows", marks=pytest.mark.slow),
        pytest.param(True, FULL, id="tables-tied", marks=pytest.mark.slow),
        pytest.param(GPT2, {**FULL, **MLP}, id="tables-gpt2", marks=pytest.mark.slow),
        pytest.param(NEOX, MLP, id="rows-neox", marks=pytest.mark.thorough),
        pytest.param(NEOX, {**FULL, **MLP}, id="tables-neox", marks=pytest.mark.thorough),
        pytest.param(
            {**NEOX, "tie_word_embeddings": True},
            {**FULL, **MLP},
            id="tables-neox-tied",
            marks=pytest.mark.slow,
        ),
        pytest.param(GPTJ, {}, id="rows-bias", marks=pytest.mark.thorough),
        pytest.param(GPTJ, FULL, id="tables-bias", marks=pytest.mark.slow),
    ],
    indirect=["base"],
)
def test_peft_computes_what_was_trained_and_merging_keeps_it(base, adapter, tmp_path):
    case = open_case(base, **adapter)
    parts, tied = case.bundle, case.bundle.architecture.tie_word_embeddings
    by_row = "train_head" not in adapter
    if by_row:
        assert parts.adapter.rows == dict.fromkeys({"embed"} if tied else TABLES, IDS)
        params = {**case.params, **case.values}
        # Off, it is the base again, with the mean of its rows in the new ones.
        off = logits_of(parts, params, without_adapters)
        table = np.asarray(case.params["embed.embedding"])
        np.testing.assert_allclose(table[512:], table[:512].mean(0)[None].repeat(3, 0), atol=1e-6)
        np.testing.assert_array_equal(case.params["embed.adapter.rows"], table[512:])
        assert abs(off - case.logits).max() > 0.1
    folder, merged = tmp_path / "adapter", tmp_path / "merged"
    write_peft(case.values, parts.architecture, parts.adapter, folder, str(base))
    parts.tokenizer.save_pretrained(folder)
    again = parts_of(base, path=str(folder))
    with jax.set_mesh(again.mesh):
        actual = open_params(again, 0)
    for path, value in case.values.items():
        np.testing.assert_array_equal(actual[path], value)
    merge_adapter(base, folder, merged, keys={"eos_token_id": 514})
    raw = json.loads((merged / "config.json").read_text())
    assert (raw["vocab_size"], raw["eos_token_id"]) == (515, 514)
    assert len(load_tokenizer(str(merged))) == 515
    full = split_model(loading.load(merged))[0]
    for name in {"embed"} if tied else TABLES:
        array = np.array(case.params[f"{name}.embedding"])
        if not by_row:
            array = case.values[f"{name}.embedding"]
        else:
            array[list(IDS)] = case.values[f"{name}.adapter.rows"]
        np.testing.assert_array_equal(full[f"{name}.embedding"], array)
    merged_model = loading.load(merged)
    np.testing.assert_allclose(compute_logits(merged_model, BATCH), case.logits, atol=2e-5)
    if parts.architecture.head_bias and by_row:
        return  # PEFT 0.21 leaves out the bias of a head of which it trains rows
    model = peft_model(case, folder)
    import torch

    with torch.no_grad():
        reference = model(input_ids=torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(reference, case.logits, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("base", [True], indirect=True, ids=["tied"])
def test_rows_of_peft_are_read(base, tmp_path):
    """Any tokens in any order, also those that the base has."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(515, mean_resizing=False)
    torch.manual_seed(0)
    options = {
        "target_modules": ["q_proj", "up_proj"],
        "trainable_token_indices": [514, 3, 512, 513],
    }
    reference = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "trainable_tokens_delta" in name:
                weight.add_(torch.randn_like(weight))
        expected = reference(input_ids=torch.tensor(TOKENS)).logits.numpy()
    reference.save_pretrained(tmp_path)
    parts = parts_of(base, path=str(tmp_path))
    with jax.set_mesh(parts.mesh):
        params = open_params(parts, 0)
    np.testing.assert_allclose(logits_of(parts, params), expected, atol=2e-5)
