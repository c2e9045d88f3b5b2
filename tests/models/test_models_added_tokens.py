"""model.added_tokens and model.special_tokens: tokenizer, grown tables, what is exported."""

import json

import jax
import numpy as np
import pytest

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.peft import write_peft
from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import open_params
from jaxtrain.data.chat.control_tokens import add_tokens, rows_needed
from jaxtrain.data.chat.named_templates import TOKENS
from jaxtrain.data.chat.template import encode, encode_text, load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

ARCHITECTURE = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "eos_token_id": 1},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder whose model has as many rows as the tokenizer tokens."""
    folder = tmp_path_factory.mktemp("base")
    config = families.config_from_hf(ARCHITECTURE)
    saving.save(build.init(config, 0), config, folder)
    load_tokenizer("builtin").save_pretrained(folder)
    return folder


def parts_of(base, adapter=None, **keys):
    table = {
        "run": {"max_steps": 1},
        "model": {"path": str(base), "compute_dtype": "float32", **keys},
        "data": {"datasets": [{"path": "a.jsonl"}], "sequence_len": 32},
        "adapter": adapter or {},
    }
    return build_model_bundle(Config.model_validate(table))


def test_tables_grow_by_their_mean_and_go_to_transformers(base, tmp_path):
    special = {"eos_token": "<stop>", "additional_special_tokens": ["<|role|>"]}
    parts = parts_of(base, added_tokens=["<tool>", "</tool>"], special_tokens=special)
    tokenizer, architecture = parts.tokenizer, parts.architecture
    assert len(tokenizer) == 516 and architecture.vocab_size == 576
    with jax.set_mesh(parts.mesh):
        params = open_params(parts, 0)
    old = split_model(loading.load(base))[0]
    for path in ("embed.embedding", "lm_head.embedding"):
        table, before = np.asarray(params[path]), np.asarray(old[path])
        np.testing.assert_array_equal(table[:512], before)
        np.testing.assert_allclose(table[512:], before.mean(0)[None].repeat(64, 0), atol=1e-6)
    model = split_model(build.abstract(architecture))[1](params)
    saving.save(model, architecture, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.get_input_embeddings().weight.shape == (576, 16)
    assert reference.config.eos_token_id == tokenizer.convert_tokens_to_ids("<stop>")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.eos_token == "<stop>" and len(again) == 516
    # What was exported needs nothing more.
    assert parts_of(tmp_path, added_tokens=["<tool>"]).architecture.grown == 0


def test_texts_spell_added_tokens_and_never_control_ones():
    tokenizer = load_tokenizer("builtin")
    new = add_tokens(tokenizer, ["<tool>", "<think>"], ["<|role|>"], {"pad_token": "<pad>"})
    assert new == ("<tool>", "<|role|>", "<pad>")
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in new}
    actual = encode_text(tokenizer, "a <tool> b <|role|>")
    assert ids["<tool>"] in actual and ids["<|role|>"] not in actual
    assert ids["<|role|>"] in encode(tokenizer, "<|role|>")
    assert tokenizer.decode(actual) == "a <tool> b <|role|>"
    assert tokenizer.pad_token_id == ids["<pad>"]


@pytest.mark.parametrize(("rows", "tokens", "expected"), [(512, 512, 512), (600, 512, 600)])
def test_rows_that_are_there_are_used(rows, tokens, expected):
    assert rows_needed(range(tokens), rows) == expected


def test_grown_tables_are_cut_as_they_were():
    assert rows_needed(range(513), 512) == 576
    assert rows_needed(range(513), 511) == 513
    assert rows_needed(range(515), 500) == 516


@pytest.mark.parametrize(
    ("adapter", "keys", "messages"),
    [
        ({}, {"added_tokens": [" "]}, "is no token"),
        (
            {},
            {"added_tokens": ["<a>"], "special_tokens": {"pad_token": "<a>"}},
            "and a control token",
        ),
    ],
)
def test_what_cannot_be_added_is_refused(base, adapter, keys, messages):
    with pytest.raises(UserError, match=messages):
        parts_of(base, adapter, **keys)


def test_beside_an_adapter_there_are_as_many_rows_as_tokens(base):
    parts = parts_of(base, {"kind": "lora"}, added_tokens=["<tool>"])
    assert parts.architecture.vocab_size == 513
    assert parts.adapter.rows == {"embed": (512,), "lm_head": (512,)}
    parts = parts_of(base, {"kind": "lora", "train_embeddings": True}, added_tokens=["<tool>"])
    assert (parts.adapter.full, parts.adapter.rows) == (("embed.embedding",), {"lm_head": (512,)})
    # One that the tokenizer has is trained already.
    assert parts_of(base, {"kind": "lora"}, added_tokens=["<|im_end|>"]).adapter.rows == {}


def test_an_adapter_s_rows_must_be_those_of_the_tokens(base, tmp_path):
    new = {"added_tokens": ["<tool>", "</tool>"]}
    parts = parts_of(base, {"kind": "lora", "target": ["q_proj"]}, **new)
    shapes = split_model(attach(build.abstract(parts.architecture), parts.adapter))[0]
    zeros = {path: np.zeros(shape.shape, np.float32) for path, shape in shapes.items()}
    write_peft(zeros, parts.architecture, parts.adapter, tmp_path, str(base))
    adapter = {"kind": "lora", "path": str(tmp_path)}
    assert parts_of(base, adapter, **new).adapter.rows == parts.adapter.rows
    with pytest.raises(UserError, match="no rows for the tokens that section model adds"):
        parts_of(base, adapter, added_tokens=["<tool>", "</tool>", "<more>"])
    with pytest.raises(UserError, match=r"rows for token 513, the model has 512.*added_tokens"):
        parts_of(base, adapter)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    assert config["trainable_token_indices"] == {"embed_tokens": [512, 513], "lm_head": [512, 513]}
    for ids, messages in (([512], "names 1 tokens"), (["a"], "ids of tokens")):
        config["trainable_token_indices"] = {"embed_tokens": ids, "lm_head": ids}
        file.write_text(json.dumps(config))
        with pytest.raises(UserError, match=messages):
            parts_of(base, adapter, **new)


def test_a_named_template_finds_the_tokens_that_are_added(base):
    special = {"additional_special_tokens": list(TOKENS["llama3"])}
    with pytest.raises(UserError, match="llama3"):
        parts_of(base, chat_template="llama3")
    parts = parts_of(base, chat_template="llama3", special_tokens={**special, "bos_token": "<s>"})
    assert "<|eot_id|>" in parts.tokenizer.chat_template
