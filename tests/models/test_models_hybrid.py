"""Hybrid families: trees through linear attention, folders, adapters, optimizer and meshes."""

import json
import shutil
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file, save_file
from test_models_build import value_and_grads
from tiny_models import RAW, SIZES, compute_logits, documents, pack
from tiny_vision import VISION

from jaxtrain.adapters.peft import adapter_entries
from jaxtrain.adapters.peft_config import short_name
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.adapters.storage import store_kernels
from jaxtrain.core.optimizer import is_vector, muon_dimensions
from jaxtrain.data.media_tokens import only_text
from jaxtrain.data.sample import Dropped, Sample, to_tree
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

sys.path.append(str(Path(__file__).parents[1] / "methods"))
import test_methods_tree_exactness as trees

AROUND = {key: VISION["qwen3_5"][key] for key in ("image_token_id", "vision_config")}
CARRIED = ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight")


@pytest.fixture(autouse=True)
def hybrid_trees(monkeypatch):
    for name in ("qwen3_5", "qwen3_next"):
        raw = {**RAW[name], "vocab_size": trees.VOCABULARY}
        monkeypatch.setitem(trees.MODELS, name, raw)


@settings(trees.RANDOM, max_examples=10)
@given(forest=trees.FORESTS)
def check_forests(forest):
    trees.check_forest("qwen3_5", "xla", forest)


@pytest.mark.slow
def test_packed_trees_and_documents_equal_their_branches_alone():
    """Logits, loss and every gradient in float64; nodes of 1 to 4 tokens, so that a convolution of
    4 reaches over several."""
    trees.check_forest("qwen3_5", "xla", trees.FIXED["k_of_4_beside_k_of_1"])


@pytest.mark.slow
def test_any_forests_equal_their_branches_alone():
    """Documents of one token among them, which share chunks with padding."""
    check_forests()


@pytest.mark.thorough
def test_trees_of_a_model_with_experts_equal_their_branches_alone():
    trees.check_forest("qwen3_next", "xla", trees.FIXED["k_of_4_beside_k_of_1"])


def write_folder(folder, name="qwen3_5", multimodal=True, fused=False):
    """A folder with random bits in bfloat16 and what Qwen stores in float32; its tensors."""
    raw = {**RAW[name], "eos_token_id": 5}
    if multimodal:
        text = {**raw, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
        tied = text.get("tie_word_embeddings", False)
        kind = "Moe" if "moe" in name else ""
        raw = {**AROUND, "text_config": text, "tie_word_embeddings": tied}
        raw["architectures"] = [f"Qwen3_5{kind}ForConditionalGeneration"]
        raw["model_type"] = name
    config = families.config_from_hf(raw)
    if fused:
        prefix = "model.language_model.layers.0.mlp.experts.gate_up_proj"
        config = config.fit([prefix, "model.language_model.embed_tokens.weight"])
    rng, tensors = np.random.default_rng(0), {}
    shapes = {path: leaf.shape for path, leaf in split_model(build.abstract(config))[0].items()}
    for entry in families.family(config).names(config):
        for tensor, shape in entry.op.shapes(shapes[entry.param]).items():
            wide = tensor.endswith(("A_log", "linear_attn.norm.weight"))
            dtype = np.float32 if wide else ml_dtypes.bfloat16
            tensors[tensor] = (0.2 * rng.standard_normal(shape)).astype(dtype)
    if multimodal:
        for tensor in CARRIED:
            tensors[tensor] = rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "multimodal", "fused"),
    [
        ("qwen3_5", True, False),
        ("qwen3_5_moe", True, True),
        ("qwen3_5_moe", True, False),
        ("qwen3_next", False, False),
    ],
)
def test_load_then_save_is_bit_identical(name, multimodal, fused, tmp_path):
    """Vision tower, further heads and float32 tensors among them, in bfloat16 training, too."""
    tensors = write_folder(tmp_path / "in", name, multimodal, fused)
    model = loading.load(tmp_path / "in", param_dtype="bfloat16")
    params, _ = split_model(model)
    assert not any("mtp" in path for path in params)
    wide = {path for path, value in params.items() if value.dtype == np.float32}
    linear = {path.rsplit(".attention.", 1)[0] for path in params if path.endswith("A_log")}
    assert wide == {
        f"{index}.attention.{part}" for index in linear for part in ("A_log", "norm.scale")
    }
    config = families.read_config(tmp_path / "in")
    saving.save(model, config, tmp_path / "out")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert set(actual) == set(tensors)
    for tensor, array in tensors.items():
        assert actual[tensor].dtype == array.dtype, tensor
        assert actual[tensor].tobytes() == array.tobytes(), tensor
    assert families.read_config(tmp_path / "out") == config
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    if multimodal:
        assert raw["vision_config"] == AROUND["vision_config"]
        assert raw["text_config"]["attn_output_gate"] is True
        shutil.rmtree(tmp_path / "in")
        with pytest.raises(UserError, match="in is gone, from which an export copies"):
            saving.save(model, config, tmp_path / "late")


def test_a_flat_config_beside_long_names(tmp_path):
    """Config that transformers writes for a causal class loaded from a multimodal folder."""
    write_folder(tmp_path / "in")
    raw = json.loads((tmp_path / "in" / "config.json").read_text())
    text = {**raw["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "in" / "config.json").write_text(json.dumps(text))
    loading.check_folder(tmp_path / "in", families.read_config(tmp_path / "in"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple of"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types must name 2 layers"),
        ({"attn_output_gate": False}, "attn_output_gate=false is not supported; only true is"),
        ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype=.*only "float32" is'),
        ({"attention_bias": True}, "attention_bias=true is not supported"),
        ({"partial_rotary_factor": 1.5}, "gives 24 dims to rotate"),
        ({"text_config": 7}, "text_config is .*; it is an object"),
        ({"text_config": {"model_type": "qwen3"}}, "text_config.model_type='qwen3'"),
        (
            {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False},
            "tie_word_embeddings is false on top and true in text_config",
        ),
    ],
)
def test_what_is_not_computed_is_refused(change, words):
    raw = {**RAW["qwen3_5"], "architectures": ["Qwen3_5ForCausalLM"]}
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**raw, **change})


def test_layers_by_default_and_by_interval():
    raw = {**RAW["qwen3_5"], "num_hidden_layers": 6, "layer_types": None}
    kinds = [spec.kind for spec in families.config_from_hf(raw).layers()]
    assert kinds == ["linear", "linear", "linear", "block", "linear", "linear"]
    config = families.config_from_hf({**raw, "full_attention_interval": 3})
    assert [spec.kind for spec in config.layers()] == ["linear", "linear", "block"] * 2
    assert families.config_from_hf(config.to_hf()) == config


def test_adapters_have_pefts_names_and_small_gates_stay_whole():
    config = families.config_from_hf(RAW["qwen3_5"])
    linears = find_linears(config)
    slots = choose_slots(linears, ["attention"], LoRASpec(2, 4.0), {}, {})
    assert {short_name(linears, path) for path in slots} == {
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
        *("q_proj", "k_proj", "v_proj", "o_proj"),
    }
    path = "stack.linear.attention.qkv"
    entries = {e.param: e.op for e in adapter_entries(config, Adapter({path: slots[path]}))}
    # B's rows take the order of the kernel's: q, k and v of all heads there, by key head here.
    b_1RF = np.arange(2 * 80, dtype=np.float32).reshape(1, 2, 80)
    written = np.zeros((80, 2), np.float32)
    for piece in entries[f"{path}.adapter.b"].write(b_1RF, np.asarray):
        assert piece.name.endswith("layers.0.linear_attn.in_proj_qkv.lora_B.weight")
        written[piece.index] = piece.array
    by_head = b_1RF[0].T.reshape(2, 40, 2)
    parts = [by_head[:, :8], by_head[:, 8:16], by_head[:, 16:]]
    np.testing.assert_array_equal(written, np.concatenate([p.reshape(-1, 2) for p in parts]))
    stored = split_model(store_kernels(build.abstract(config), "int8"))[0]
    full = {p.split(".")[-2] for p in stored if p.endswith("kernel") and ".attention." in p}
    assert full == {"a", "b"}


def test_decay_and_taps_are_no_matrices():
    params, _ = split_model(build.abstract(families.config_from_hf(RAW["qwen3_next"])))
    small = {p.rsplit(".", 1)[-1] for p in params if is_vector(p)}
    assert small == {"A_log", "dt_bias", "conv", "scale"}
    assert muon_dimensions("stack.linear.attention.conv", np.zeros((2, 80, 1, 4))) is None
    params, _ = split_model(build.abstract(families.config_from_hf(OLMO)))
    small = {p.rsplit(".", 1)[-1] for p in params if is_vector(p)}
    assert small == {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "scale"}


OLMO = {
    **SIZES,
    "model_type": "olmo_hybrid",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "pad_token_id": 0,
    "rope_parameters": None,
    "rope_theta": None,
}
"""Attributes that Ai2's converter writes; values of more dims than keys."""


@pytest.mark.slow
def test_published_names_of_olmo_hybrid(tmp_path):
    """transformers reads our folder, whose convolutions are as wide as their projections."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = families.config_from_hf(OLMO)
    model = build.init(config, 0)
    saving.save(model, config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.linear_attn.v_conv1d.weight"].shape == (20, 1, 4)
    assert "model.layers.1.post_attention_layernorm.weight" in stored
    assert families.read_config(tmp_path) == config and not config.rotates
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.stack(documents(4, 30, 30))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    logits = compute_logits(model, pack([[row] for row in tokens], 30))
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


def test_flops_of_a_state():
    """18 FLOPs in training, 6 forward, for each number of a state and token, whatever it sees."""
    model = build.abstract(families.config_from_hf(RAW["qwen3_5"]))
    spans = np.array([1, 2, 3])
    attention = 4 * 4 * 16 * spans.sum()
    assert model.stack.mixing_flops(spans) == 6 * 4 * 8 * 12 * 3 + attention


@pytest.fixture(scope="module")
def one_device():
    return value_and_grads(None, "qwen3_5")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.thorough),
        pytest.param({"context": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4}, marks=pytest.mark.thorough),  # more than there are key heads
    ],
    ids=str,
)
def test_sharded_gradients_equal_one_device(sizes, one_device):
    value, grads = one_device
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        actual, found_grads = value_and_grads(mesh, "qwen3_5")
    # float32 sums split over devices; what reaches A_log cancels to a hundredth.
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=5e-5 * float(np.abs(b).max()))


def test_what_multimodal_folders_cannot_be_used_for(tmp_path):
    write_folder(tmp_path / "in")
    config = families.read_config(tmp_path / "in")
    raw = json.loads((tmp_path / "in" / "config.json").read_text())
    del raw["vision_config"]
    with pytest.raises(UserError, match="vision tower of a multimodal config cannot be drawn"):
        families.config_from_hf(raw).check_drawn()
    assert saving.count_stale(loading.load(tmp_path / "in"), config) == 2
    assert config.media_tokens == {5: "image_token_id"}
    flat = families.config_from_hf(RAW["qwen3_5"])
    flat.check_drawn()
    assert not flat.media_tokens


def test_rows_with_tokens_of_images_are_refused_by_their_place():
    media = {90: "image_token_id"}
    samples = {"a": [Sample(np.array([1, 89, 91]), np.ones(3))], "b": [Dropped("empty")]}
    samples["c"] = [to_tree(Sample(np.array([4, 90]), np.ones(2)))]
    part = only_text(MixturePart("data", samples, lambda row, origin: samples[row]), media)
    assert part.tokenize("a", "data row 0") == samples["a"]
    assert part.tokenize("b", "data row 1") == samples["b"]
    with pytest.raises(UserError, match=r"data row 2: token 90 \(image_token_id\) stands for"):
        part.tokenize("c", "data row 2")
