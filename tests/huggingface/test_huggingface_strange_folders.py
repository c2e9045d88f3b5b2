"""Folders that somebody else wrote: whatever their files say, a sentence, soon, in little room."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_huggingface_config import QWEN3
from test_huggingface_safetensors import TENSORS, write

from jaxtrain.errors import UserError
from jaxtrain.huggingface import files, safetensors
from jaxtrain.huggingface.safetensors import INDEX, SafetensorsFolder
from jaxtrain.models import build, families

SINGLE = "model.safetensors"
FUZZ = settings(max_examples=150, deadline=None)


def refuse(act) -> str:
    """The message of the UserError that `act` must raise; short, and soon."""
    start = time.monotonic()
    with pytest.raises(UserError) as actual:
        act()
    assert time.monotonic() - start < 10
    assert len(str(actual.value)) < 2000
    return str(actual.value)


# -- headers


def put(folder, header, data=bytes(16), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    (folder / SINGLE).write_bytes(size.to_bytes(8, "little") + raw + data)


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES = {
    "overlapping": {"a": entry(), "b": entry(shape=[2], offsets=(8, 16))},
    "out of the file": {"a": entry(shape=[8], offsets=(0, 32))},
    "negative": {"a": entry(offsets=(-16, 0))},
    "backwards": {"a": entry(offsets=(16, 0))},
    "shape": {"a": entry(shape=[5])},
    "shape that overflows": {"a": entry(shape=[2**32, 2**32, 4])},
    "negative shape": {"a": entry(shape=[-2, -2])},
    "fraction": {"a": entry(shape=[4.0])},
    "switch": {"a": entry(shape=[True, 4])},
    "text": {"a": entry(shape=["4"])},
    "dtype": {"a": entry(dtype="F33")},
    "dtype of another type": {"a": entry(dtype=["F32"])},
    "one offset": {"a": entry(offsets=(16,))},
    "no entry": {"a": 7},
    "nothing in it": {"a": {}},
    "nothing at all": {},
    "a list": [],
    "twice": b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2),
    "nested": b'{"a":' + b"[" * 200_000,
    "not UTF-8": b'{"a\xff": 1}',
    "a long name": {"x" * 10_000: entry(shape=[3])},
    "control characters": {"\x1b[2J": entry(shape=[3])},
    "a number of a million digits": b'{"a":' + b"9" * 10**6 + b"}",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path, lie):
    put(tmp_path, LIES[lie])
    message = refuse(lambda: SafetensorsFolder(tmp_path))
    assert str(tmp_path) in message and "\x1b" not in message


@pytest.mark.parametrize("length", [0, 3, 2**20, 2**31, 2**63])
def test_the_length_of_a_header_is_checked_before_it_is_read(tmp_path, length):
    put(tmp_path, {"a": entry()}, length=length)
    refuse(lambda: SafetensorsFolder(tmp_path))


def test_a_header_larger_than_any_model_needs_is_not_read(tmp_path):
    with (tmp_path / SINGLE).open("wb") as stream:
        stream.write((2 * safetensors.MAX_HEADER_BYTES).to_bytes(8, "little"))
        stream.truncate(3 * safetensors.MAX_HEADER_BYTES)
    assert "at most" in refuse(lambda: SafetensorsFolder(tmp_path))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "x"]) | ODD,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | ODD,
        "data_offsets": st.lists(st.integers(-1, 20), max_size=3) | ODD,
    },
)


@FUZZ
@given(st.dictionaries(st.text(max_size=3), ENTRY | ODD, max_size=3) | ODD | st.binary(max_size=30))
def test_any_header_is_read_within_its_file_or_refused(tmp_path_factory, header):
    folder = tmp_path_factory.getbasetemp() / "header"
    folder.mkdir(exist_ok=True)
    put(folder, header)
    try:
        safetensors_folder = SafetensorsFolder(folder)
    except UserError as error:
        assert len(str(error)) < 2000
        return
    for name, stored in safetensors_folder.tensors.items():
        full = tuple(slice(0, size) for size in stored.shape)
        assert safetensors_folder.fetch(name, full).shape == stored.shape


# -- the index


def shard(folder):
    """A folder of several files, and its index."""
    write(folder, max_shard_bytes=130)
    return json.loads((folder / INDEX).read_text())


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, index: {"weight_map": {"w": "../model.safetensors"}},
        lambda folder, index: {"weight_map": {"w": str(folder.parent / "model.safetensors")}},
        lambda folder, index: {"weight_map": {"w": "a/../../model.safetensors"}},
        lambda folder, index: {"weight_map": {"w": ""}},
        lambda folder, index: {"weight_map": {"w": "."}},
        lambda folder, index: {"weight_map": {"w": "a\0b"}},
        lambda folder, index: {"weight_map": {"w": "x" * 5000}},
        lambda folder, index: {"weight_map": {"w": 7}},
        lambda folder, index: {"weight_map": []},
        lambda folder, index: {"weight_map": {}},
        lambda folder, index: [],
        lambda folder, index: {**index, "weight_map": {**index["weight_map"], "ghost": SHARD}},
        lambda folder, index: {"weight_map": dict.fromkeys(index["weight_map"], SHARD)},
    ],
)
def test_an_index_that_lies_or_points_elsewhere_is_refused(tmp_path, change):
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path)  # what must not be read
    index = shard(folder)
    (folder / INDEX).write_text(json.dumps(change(folder, index)))
    assert str(folder) in refuse(lambda: SafetensorsFolder(folder))


SHARD = "model-00002-of-00004.safetensors"


def test_links_out_of_the_folder_are_refused_but_those_of_the_hubs_cache(tmp_path):
    outside, blobs = tmp_path / "outside", tmp_path / "models--a--b" / "blobs"
    folder = tmp_path / "models--a--b" / "snapshots" / "1234"
    for created in (outside, blobs, folder):
        created.mkdir(parents=True)
    names = set(shard(folder)["weight_map"].values())
    for number, name in enumerate(sorted(names)):
        blob = blobs / f"{number:064x}"
        (folder / name).rename(blob)
        (folder / name).symlink_to(f"../../blobs/{blob.name}")
    assert set(SafetensorsFolder(folder).tensors) == set(TENSORS)
    stray = folder / sorted(names)[0]
    stray.resolve().rename(outside / "x.safetensors")
    stray.unlink()
    stray.symlink_to(outside / "x.safetensors")
    assert "a link out of its folder" in refuse(lambda: SafetensorsFolder(folder))


def test_a_tensor_that_two_files_hold_is_refused(tmp_path):
    index = shard(tmp_path)
    names = sorted(set(index["weight_map"].values()))
    (tmp_path / names[1]).write_bytes((tmp_path / names[0]).read_bytes())
    assert "too" in refuse(lambda: SafetensorsFolder(tmp_path))


# -- config.json

JSONS = [b"", b"[]", b"7", b"\xff\xfe{}", b"[" * 10**6, b'{"a":' * 10**5, b"9" * 10**5, b"{" * 9]


@pytest.mark.parametrize("raw", JSONS, ids=range(len(JSONS)))
def test_a_config_that_is_no_object_is_refused(tmp_path, raw):
    (tmp_path / "config.json").write_bytes(raw)
    assert "config.json" in refuse(lambda: families.read_config(tmp_path))


def test_a_file_that_is_none_or_too_large_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as stream:
        stream.truncate(files.MAX_BYTES + 1)
    assert "at most" in refuse(lambda: files.read_object(tmp_path / "a.json"))
    assert "is a folder" in refuse(lambda: files.read_object(tmp_path))


WRONG = {
    "hidden_size": ["1024", 0, -8, 10**9, 1024.0, True, [1024], {}],
    "num_hidden_layers": [10**9, -1, "28", []],
    "vocab_size": [0, 10**12, None],
    "num_attention_heads": [0, "16"],
    "head_dim": [0, -2, 3, "128"],
    "rms_norm_eps": ["1e-6", -1.0, float("nan"), float("inf"), 10**400],
    "tie_word_embeddings": ["false", 1, []],
    "hidden_act": [7, ["silu"], "\x1b[2J"],
    "layer_types": ["full_attention", [1] * 28, ["full_attention"] * 10**5],
    "rope_theta": ["1e6", 0, -1, [], float("inf")],
    "rope_scaling": [
        "yarn",
        [],
        {"rope_type": ["yarn"]},
        {"rope_type": "yarn", "factor": "4"},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": {}},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": 1e-9},
        {"rope_type": "linear", "factor": {"factor": 2.0}},
        {"full_attention": {"rope_type": "default"}},
    ],
    "architectures": ["Qwen3ForCausalLM", 7, [7], {}, ["x" * 10_000]],
    "model_type": [7, ["qwen3"], {}],
    "dtype": ["nope", 7, ["float32"]],
    "torch_dtype": ["nope", True],
    "eos_token_id": ["</s>", [1.5], {"id": 1}, 10**30],
    "max_position_embeddings": [0, "40960", 10**20],
    "alibi": [True],
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_types_and_impossible_sizes_are_refused_by_key(key):
    for value in WRONG[key]:
        message = refuse(lambda value=value: families.config_from_hf({**QWEN3, key: value}))
        name = "vocab_size" if value is None else key.split("\x1b")[0]
        assert name in message or name in ("model_type",), message
        assert "\x1b" not in message


@FUZZ
@given(st.dictionaries(st.sampled_from([*QWEN3, "rope_parameters", "x"]), ODD, max_size=2))
def test_any_config_is_taken_or_refused(change):
    try:
        families.config_from_hf({**QWEN3, **change})
    except UserError as error:
        assert len(str(error)) < 2000


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_smollm2_is_read():
    config = families.config_from_hf(SMOLLM2)
    # The model card of SmolLM2-135M.
    assert build.param_count(config) == 134_515_008
    assert dict(config.rope)["rope_theta"] == 100000


PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}


@pytest.mark.parametrize(
    ("raw", "noise"),
    [(QWEN3, "attention_dropout"), (PHI3, "resid_pdrop"), (PHI3, "embd_pdrop")],
)
def test_what_only_training_draws_is_no_reason_to_refuse(raw, noise):
    assert families.config_from_hf({**raw, noise: 0.1}) == families.config_from_hf(raw)
    assert noise in refuse(lambda: families.config_from_hf({**raw, noise: "0.1"}))


GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("raw", "change"),
    [
        (GEMMA3, {"attn_logit_softcapping": 30.0}),
        (GEMMA3, {"use_bidirectional_attention": True}),
        (QWEN3, {"quantization_config": {"quant_method": "odd"}}),
        (QWEN3, {"quantization_config": {"producer": "odd"}}),
        (QWEN3, {"partial_rotary_factor": 0.5}),
    ],
)
def test_what_changes_the_network_is_still_refused_by_name(raw, change):
    assert next(iter(change)) in refuse(lambda: families.config_from_hf({**raw, **change}))


@pytest.mark.parametrize("change", [{"rope_interleaved": True}, {"attention_multiplier": 0.5}])
def test_what_transformers_does_not_know_is_carried(change):
    assert families.config_from_hf({**QWEN3, **change}).to_hf().items() >= change.items()


def test_zero_bytes_and_shapes_of_none_are_fine(tmp_path):
    put(
        tmp_path,
        {"a": entry(shape=[0], offsets=(16, 16)), "b": entry(), "c": entry("U8", [0], (0, 0))},
    )
    safetensors_folder = SafetensorsFolder(tmp_path)
    np.testing.assert_array_equal(
        safetensors_folder.fetch("b", (slice(0, 4),)), np.zeros(4, np.float32)
    )
