"""Tokenizers of strangers: wrong types in a sentence, and what transformers makes of the rest."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ModelConfig
from jaxtrain.core.architecture import find_tokenizer
from jaxtrain.data.chat.named_templates import BUILTIN
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.huggingface.tokenizer import (
    compare_vocabularies,
    find_differences,
    remove_tokens_beyond,
)

CONFIG = json.loads((BUILTIN / "tokenizer_config.json").read_text())
TOKENIZER = json.loads((BUILTIN / "tokenizer.json").read_text())


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(BUILTIN, tmp_path / "model")
    return tmp_path / "model"


def put(folder, name, content):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(raw)


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_tokenizer_that_transformers_builds_anew_is_told(folder, name, capfd):
    digits = {"type": "Digits", "individual_digits": True}
    spaces = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    parts = {"type": "Sequence", "pretokenizers": [digits, {**spaces, "trim_offsets": True}]}
    local_value = {**TOKENIZER, "pre_tokenizer": parts, "normalizer": {"type": "Lowercase"}}
    put(folder, "tokenizer.json", local_value)
    put(folder, "tokenizer_config.json", {**CONFIG, "tokenizer_class": name})
    find_tokenizer(ModelConfig(path=str(folder)))
    messages = capfd.readouterr().err
    assert "warning: " in messages and name in messages and "tokenizer.json" in messages
    assert "pre_tokenizer" in messages and "PreTrainedTokenizerFast" in messages
    # What the warning advises.
    put(folder, "tokenizer_config.json", CONFIG)
    assert find_differences(load_tokenizer(str(folder))) is None


def test_a_tokenizer_that_is_its_file_is_not_mentioned():
    assert find_differences(load_tokenizer("builtin")) is None


WRONG = {
    "tokenizer.json": [
        *(b"", b"[]", b"{}", b"\xff", b"[" * 10**6),
        {"model": 7},
        {**TOKENIZER, "model": {"type": "BPE", "vocab": {}, "merges": 7}},
        {**TOKENIZER, "model": {"type": "Other", "vocab": {"a": 1}}},
        {**TOKENIZER, "added_tokens": {}},
        {**TOKENIZER, "added_tokens": [{"id": "7", "content": "a"}]},
        {**TOKENIZER, "normalizer": []},
        {**TOKENIZER, "pre_tokenizer": {"type": "Other"}},
    ],
    "tokenizer_config.json": [
        *(b"[]", b"7", b"\xff", b'{"a":' * 10**5),
        *({**CONFIG, "chat_template": odd} for odd in (5, [1], [{"name": 1}], {"default": 5})),
        *({**CONFIG, "eos_token": odd} for odd in (5, ["a"], {"content": 5}, {}, True)),
        *({**CONFIG, "tokenizer_class": odd} for odd in (7, ["x"])),
        *({**CONFIG, "added_tokens_decoder": odd} for odd in ([], {"x": 7}, {"5": {"content": 7}})),
        *({**CONFIG, "extra_special_tokens": odd} for odd in ("x", [7])),
        {**CONFIG, "model_max_length": "x"},
        {**CONFIG, "auto_map": {"AutoTokenizer": 7}},
        {**CONFIG, "padding_side": "up"},
        {**CONFIG, "init_inputs": 7},
        {**CONFIG, "self": 1},
    ],
    "special_tokens_map.json": [b"[]", {"eos_token": 7}],
    "added_tokens.json": [b"[]", {"a": "b"}, {"a": -1}],
    "config.json": [b"[]", {"model_type": 7}],
    "chat_template.jinja": [b"\xff"],
}


@pytest.mark.parametrize("name", WRONG)
def test_files_of_wrong_types_are_named(folder, name):
    for content in WRONG[name]:
        put(folder, name, content)
        with pytest.raises(UserError) as actual:
            load_tokenizer(str(folder))
        assert str(folder) in str(actual.value) and len(str(actual.value)) < 1000, content


def test_added_tokens_that_the_model_has_no_rows_for_are_text():
    """Gemma 3's models of text alone have 262,144 rows, and <image_soft_token> as token 262,144."""
    tokenizer = load_tokenizer("builtin")
    rows, text = len(tokenizer), "a<image_soft_token>b"
    plain = tokenizer.encode(text)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    assert rows in tokenizer.encode(text)
    assert remove_tokens_beyond(tokenizer, rows + 1) == []
    assert remove_tokens_beyond(tokenizer, rows - 100) == [], "tokens of the vocabulary, too"
    assert remove_tokens_beyond(tokenizer, rows) == ["<image_soft_token>"]
    assert len(tokenizer) == rows and tokenizer.encode(text) == plain
    assert compare_vocabularies(load_tokenizer("builtin"), tokenizer) is None
    tokenizer.add_special_tokens({"eos_token": "<other end>"})
    assert remove_tokens_beyond(tokenizer, rows) == []


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_read_where_the_tokenizer_has_none(folder, name):
    template = load_tokenizer("builtin").chat_template
    put(folder, "tokenizer_config.json", {k: v for k, v in CONFIG.items() if k != "chat_template"})
    assert load_tokenizer(str(folder)).chat_template is None
    put(folder, name, {"chat_template": template, "image_seq_len": 64})
    assert load_tokenizer(str(folder)).chat_template == template
    put(folder, name, {"chat_template": 5})
    with pytest.raises(UserError, match="chat_template is a number, 5"):
        load_tokenizer(str(folder))


def test_no_code_of_a_folder_is_run(folder):
    put(
        folder, "tokenizer_config.json", {**CONFIG, "auto_map": {"AutoTokenizer": ["mine.T", None]}}
    )
    (folder / "mine.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass T: pass\n")
    try:
        load_tokenizer(str(folder))
    except UserError:
        pass
    assert not (folder / "ran").exists()


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
CHANGES = st.one_of(
    st.tuples(
        st.just("tokenizer_config.json"), st.sampled_from([*CONFIG, "pad_token", "bos_token"])
    ),
    st.tuples(st.just("tokenizer_config.json"), st.sampled_from(["extra_special_tokens", "x"])),
    st.tuples(st.just("tokenizer.json"), st.sampled_from([*TOKENIZER])),
)


@settings(max_examples=60, deadline=None)
@given(CHANGES, ODD)
def test_any_tokenizer_is_taken_or_refused(tmp_path_factory, change, value):
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    if not folder.exists():
        shutil.copytree(BUILTIN, folder)
    name, key = change
    full = CONFIG if name == "tokenizer_config.json" else TOKENIZER
    put(folder, name, {**full, key: value})
    try:
        find_differences(load_tokenizer(str(folder)))
    except UserError as error:
        assert len(str(error)) < 2000
    finally:
        put(folder, name, full)
