"""Adapter folders that somebody else wrote: a sentence with file and key, whatever they say."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxtrain.adapters import peft_config
from jaxtrain.adapters.peft import open_peft
from jaxtrain.errors import UserError

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {
    f"{MODULE}.lora_A.weight": np.ones((4, 8), np.float32),
    f"{MODULE}.lora_B.weight": np.ones((8, 4), np.float32),
}
CONFIG = {
    "auto_mapping": None,
    "base_model_name_or_path": "some/base",
    "bias": "none",
    "lora_alpha": 8,
    "alpha_pattern": {},
    "rank_pattern": {},
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}


def put(folder, config=CONFIG, tensors=TENSORS):
    folder.mkdir(exist_ok=True)
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "adapter_config.json").write_bytes(raw)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def refuse(folder) -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as actual:
        open_peft(folder).modules()
    assert time.monotonic() - start < 15 and len(str(actual.value)) < 2000
    assert "\x1b" not in str(actual.value)
    return str(actual.value)


def test_the_folder_as_it_is_opens(tmp_path):
    (slot,) = open_peft(put(tmp_path)).modules().values()
    assert (slot.rank, slot.alpha) == (4, 8.0)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_half_of_a_pair_and_another_rank_are_refused(tmp_path, part):
    tensors = {name: value for name, value in TENSORS.items() if part not in name}
    assert f"missing tensors {MODULE}.{part}.weight" in refuse(put(tmp_path, tensors=tensors))
    said = refuse(put(tmp_path, {**CONFIG, "r": 8}))
    assert f"lora_A of {MODULE} has rank 4, and adapter_config.json says r=8" in said
    (slot,) = open_peft(put(tmp_path, {**CONFIG, "rank_pattern": {"q_proj": 4}})).modules().values()
    assert slot.rank == 4


WRONG = {
    "lora_alpha": [None, "16", -1, 0, True, [16], {}, float("nan"), float("inf"), 10**400],
    "r": ["8", 0, -4, 8.5, 10**9, True],
    "rank_pattern": [[], "q_proj", {"q_proj": "8"}, {"q_proj": 0}, {"(": 8}, {"x" * 5000: 8}],
    "alpha_pattern": [[], 7, {"q_proj": None}, {"q_proj": "16"}, {"[": 8}, {"a{99999999999}": 1}],
    "modules_to_save": [7, "lm_head", [7], {}],
    "target_modules": [7, [7], {}],
    "auto_mapping": [7, "x", []],
    "use_dora": ["true", 7, []],
    "use_rslora": ["false"],
    "peft_type": [None, 7, ["LORA"], "VERA\x1b[2J"],
    "base_model_name_or_path": [7, ["a"]],
    "lora_dropout": ["0.1", 2, {}],
    "layers_to_transform": ["all", [1.5]],
    "init_lora_weights": [{"a": 1}, [1], "pissa"],
    "bias": [["none"], "all"],
    "made_up": [{"x": "y" * 10**5}],
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_types_are_named(tmp_path, key):
    for value in WRONG[key]:
        message = refuse(put(tmp_path, {**CONFIG, key: value}))
        assert key in message and "adapter_config.json" in message


def test_an_adapter_without_alpha_says_so(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key != "lora_alpha"}
    assert "lora_alpha is missing" in refuse(put(tmp_path, config))


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff", b'{"a":' * 10**5, b"7"])
def test_a_config_that_is_no_object_is_refused(tmp_path, raw):
    assert "adapter_config.json" in refuse(put(tmp_path, raw))


@pytest.mark.parametrize("pattern", [r"(\w+)+!", r"(q|qq)*!", r"(.*.*.*.*.*.*)*!"])
def test_expressions_without_end_are_stopped(tmp_path, pattern, monkeypatch):
    monkeypatch.setattr(peft_config, "PATTERN_SECONDS", 0.7)
    module = MODULE.replace("q_proj", "q" * 60)
    tensors = {name.replace(MODULE, module): array for name, array in TENSORS.items()}
    message = refuse(put(tmp_path, {**CONFIG, "alpha_pattern": {pattern: 4}}, tensors))
    assert "alpha_pattern" in message and "takes longer" in message


@pytest.mark.parametrize(
    ("patterns", "alpha"),
    [
        ({"q_proj": 2}, 2),
        ({"self_attn.q_proj": 2}, 2),
        ({r"layers\.\d+\.self_attn\.q_proj": 2}, 2),
        ({r".*\.(q|k)_proj": 2}, 2),
        ({"^model.layers.0.*": 2}, 2),
        ({"proj": 2}, 8),
        ({"k_proj": 2, "q_proj": 3, ".*q_proj": 4}, 3),
    ],
)
def test_patterns_mean_what_they_mean_to_peft(tmp_path, patterns, alpha):
    (slot,) = open_peft(put(tmp_path, {**CONFIG, "alpha_pattern": patterns})).modules().values()
    assert slot.alpha == alpha


@pytest.mark.parametrize(
    "shapes",
    [
        ((4,), (8, 4)),
        ((), (8, 4)),
        ((4, 8), (8,)),
        ((4, 8), (8, 5)),
        ((0, 8), (8, 0)),
        ((4, 8, 1), (8, 4)),
    ],
)
def test_tensors_that_make_no_adapter_are_named(tmp_path, shapes):
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    assert MODULE in refuse(put(tmp_path, tensors=dict(zip(TENSORS, arrays, strict=True))))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*CONFIG, "lora_dropout", "x"]), ODD, max_size=2))
def test_any_config_is_taken_or_refused(tmp_path_factory, change):
    folder = tmp_path_factory.getbasetemp() / "adapter"
    try:
        open_peft(put(folder, {**CONFIG, **change})).modules()
    except UserError as error:
        assert len(str(error)) < 2000
