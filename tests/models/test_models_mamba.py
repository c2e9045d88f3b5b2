"""Families with Mamba-2 layers: trees, folders, adapters, optimizer and meshes."""

import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_models_build import value_and_grads
from tiny_models import RAW

from jaxtrain.adapters.peft import adapter_entries
from jaxtrain.adapters.peft_config import short_name
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.core.optimizer import is_vector, muon_dimensions
from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.layers.norm import GroupedRMSNorm
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

sys.path.append(str(Path(__file__).parents[1] / "methods"))
import test_methods_tree_exactness as trees

WIDE = ("A_log", "D", "dt_bias")


ONE_LAYER = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M",
    "num_hidden_layers": 1,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
}


@pytest.fixture(autouse=True)
def mamba_models(monkeypatch):
    monkeypatch.setitem(trees.MODELS, "mamba", ONE_LAYER)
    for name in ("nemotron_h", "granitemoehybrid"):
        monkeypatch.setitem(trees.MODELS, name, RAW[name] | {"vocab_size": trees.VOCABULARY})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("nemotron_h", "granitemoehybrid")),
    ],
)
def test_packed_trees_and_documents_equal_their_branches_alone(name):
    """Logits, loss and every gradient in float64; nodes of 1 to 4 tokens, so that a convolution of
    4 reaches over several. A layer that only reads each token alone is among them."""
    trees.check_forest(name, "xla", trees.FIXED["k_of_4_beside_k_of_1"])


@pytest.mark.slow
@pytest.mark.parametrize("forest", ["one_token", "full_row"])
def test_forests_that_others_may_miss(forest):
    """A document of one token is in no chunk."""
    trees.check_forest("nemotron_h", "xla", trees.FIXED[forest])


def write_folder(folder, name, prefix=None):
    """A folder with random bits in bfloat16 and what recurrences keep in float32; its tensors."""
    raw = {**RAW[name], "eos_token_id": 5, "time_step_limit": [0.0, math.inf]}
    config = families.config_from_hf(raw)
    if prefix is not None:
        config = config.fit([f"{prefix}embeddings.weight"])
    rng, tensors = np.random.default_rng(0), {}
    shapes = {path: leaf.shape for path, leaf in split_model(build.abstract(config))[0].items()}
    for entry in families.family(config).names(config):
        for tensor, shape in entry.op.shapes(shapes[entry.param]).items():
            wide = tensor.endswith((".A_log", "e_score_correction_bias"))
            dtype = np.float32 if wide else ml_dtypes.bfloat16
            tensors[tensor] = (0.2 * rng.standard_normal(shape)).astype(dtype)
    if "nemotron" in name:
        tensors["mtp.layers.0.norm.weight"] = np.ones(3, ml_dtypes.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("nemotron_h_moe", "model."),
        pytest.param("granitemoehybrid", None, marks=pytest.mark.slow),
        pytest.param("nemotron_h", "backbone.", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid_dense", None, marks=pytest.mark.slow),
    ],
)
def test_load_then_save_is_bit_identical(name, prefix, tmp_path):
    """In bfloat16 training, too: decay, skip and bias of the steps lose nothing on the way."""
    tensors = write_folder(tmp_path / "in", name, prefix)
    model = loading.load(tmp_path / "in", param_dtype="bfloat16")
    params, _ = split_model(model)
    wide = {path.rsplit(".", 1)[-1] for path, value in params.items() if value.dtype == np.float32}
    assert wide == {*WIDE, "choice_bias"} if "moe" in name and "nemotron" in name else {*WIDE}
    config = families.read_config(tmp_path / "in")
    saving.save(model, config, tmp_path / "out")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert set(actual) == set(tensors)
    for tensor, array in tensors.items():
        assert actual[tensor].dtype == array.dtype, tensor
        assert actual[tensor].tobytes() == array.tobytes(), tensor
    assert families.read_config(tmp_path / "out") == config


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is .*M [*] - E"),
        ("nemotron_h", {"num_hidden_layers": 3}, "names 4 layers, num_hidden_layers=3"),
        ("nemotron_h", {"n_groups": 4}, "6 Mamba heads must be a multiple of the 4 groups"),
        ("nemotron_h", {"mamba_ssm_cache_dtype": "bfloat16"}, 'only "float32" is'),
        ("nemotron_h", {"time_step_limit": [1.0, 0.5]}, "time_step_limit is .*least and"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=true is not known"),
        ("nemotron_h", {"use_bias": True}, "use_bias=true is not supported"),
        ("nemotron_h", {"residual_in_fp32": True}, "residual_in_fp32=true is not supported"),
        ("nemotron_h_moe", {"topk_group": 5}, "topk_group=5 be from 1 to n_group"),
        ("nemotron_h_moe", {"num_experts_per_tok": 5}, "must be from 1 to the 4 experts"),
        ("nemotron_h_moe", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported"),
        ("granitemoehybrid", {"mamba_d_head": 5}, "do not match the model"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 2 + ["moe"]}, "must name 3 layers"),
        ("granitemoehybrid", {"init_method": "x"}, 'init_method=.*only "mup" is'),
        ("granitemoehybrid", {"num_experts_per_tok": 7}, "must be from 1 to the 6 experts"),
    ],
)
def test_what_is_not_computed_is_refused(name, change, words):
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**RAW[name], **change})


@pytest.mark.parametrize(
    "name", ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "qwen3_5", "qwen3_next"]
)
def test_the_convolution_has_the_activation_of_config(name):
    """transformers takes hidden_act for both; here the convolution has silu alone."""
    with pytest.raises(UserError, match="hidden_act='gelu'; supported: .'silu'"):
        families.config_from_hf({"model_type": name, **RAW.get(name, {}), "hidden_act": "gelu"})


def test_published_spellings_are_read():
    """Spellings that occur in the Hub's files; infinity as transformers 5 writes it."""
    raw = {**RAW["nemotron_h"], "rope_theta": 10000, "norm_eps": 1e-5, "partial_rotary_factor": 1.0}
    raw |= {"time_step_limit": [0.0, {"__float__": "Infinity"}], "auto_map": {"AutoConfig": "x"}}
    config = families.config_from_hf(raw)
    assert config.time_step_limit == (0.0, math.inf)
    listed = {k: v for k, v in raw.items() if k != "hybrid_override_pattern"}
    listed["layers_block_type"] = ["linear_attention", "mlp", "mamba", "attention"]
    assert families.config_from_hf(listed) == config
    written = config.to_hf()
    assert written["hybrid_override_pattern"] == "M-M*" and written["norm_eps"] == 1e-5
    assert families.config_from_hf(json.loads(json.dumps(written))) == config
    granite = {**RAW["granitemoehybrid"], "mamba_d_head": "auto", "init_method": "mup"}
    assert families.config_from_hf(granite).mamba_d_head == 8


NANO = {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "vocab_size": 131072,
}


def test_a_published_config_counts_its_published_parameters():
    """The model card of Nemotron 3 Nano: 31.6B parameters, of which a token goes through 3.2B."""
    config = families.config_from_hf(NANO)
    assert round(build.param_count(config) / 1e9, 1) == 31.6
    assert round(count_matmul_params(build.abstract(config)) / 1e9, 1) == 3.2


FALCON_H1 = {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_use_mlp": True,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rope_scaling": None,
    "rope_theta": 1e11,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "time_step_rank": "auto",
    "vocab_size": 32784,
}
JAMBA = {
    "model_type": "jamba",
    "mamba_dt_rank": 256,
    "mamba_inner_layernorms": True,
    "n_ctx": 2**18,
}


@pytest.mark.parametrize(("raw", "count"), [(FALCON_H1, 521_411_104), (JAMBA, 51_570_323_328)])
def test_falcon_h1_and_jamba_count_their_published_parameters(raw, count):
    """Falcon-H1-0.5B; Jamba-v0.1, whose sizes are the defaults of its class."""
    config = families.config_from_hf(raw)
    assert build.param_count(config) == count
    assert families.config_from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (FALCON_H1, {"mlp_multipliers": [1.0]}, "mlp_multipliers must have 2 numbers"),
        (FALCON_H1, {"mamba_n_groups": 5}, "24 Mamba heads must be a multiple of the 5 groups"),
        (FALCON_H1, {"attn_layer_indices": [1]}, "only null is"),
        (FALCON_H1, {"mamba_use_mlp": False}, "only true is"),
        (JAMBA, {"num_experts_per_tok": 17}, "must be from 1 to the 16 experts"),
        (JAMBA, {"attn_layer_period": 0}, "attn_layer_period is a number, 0; it must be"),
        (JAMBA, {"mamba_inner_layernorms": False}, "only true is"),
    ],
)
def test_what_falcon_h1_and_jamba_do_not_compute_is_refused(raw, change, words):
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**raw, **change})


def test_adapters_have_pefts_names():
    config = families.config_from_hf(RAW["nemotron_h_moe"])
    linears = find_linears(config)
    slots = choose_slots(linears, ["attention"], LoRASpec(2, 4.0), {}, {})
    names = {short_name(linears, path) for path in slots}
    assert names == {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    # B's rows take the order of the kernel's: z, x, B, C and dt there, by group here.
    config = families.config_from_hf(RAW["nemotron_h"])
    path = "stack.mamba.layer.in_proj"
    slots = choose_slots(find_linears(config), ["in_proj"], LoRASpec(1, 4.0), {}, {})
    entries = {e.param: e.op for e in adapter_entries(config, Adapter({path: slots[path]}))}
    b_2RF = np.arange(2 * 150, dtype=np.float32).reshape(2, 1, 150)
    written = np.zeros(150, np.float32)
    for piece in entries[f"{path}.adapter.b"].write(b_2RF, np.asarray):
        if "layers.0." in piece.name:
            assert piece.name.endswith("mixer.in_proj.lora_B.weight")
            written[piece.index[0]] = piece.array[:, 0]
    groups = np.split(b_2RF[0, 0], 2)
    parts = [np.split(group, [24, 48, 60, 72]) for group in groups]
    np.testing.assert_array_equal(written, np.concatenate([g[i] for i in range(5) for g in parts]))


def test_what_is_no_matrix_and_what_multiplies_tokens():
    config = families.config_from_hf(RAW["nemotron_h_moe"])
    model = build.abstract(config)
    params, _ = split_model(model)
    small = {p.rsplit(".", 1)[-1] for p in params if is_vector(p)}
    assert small == {*WIDE, "conv", "conv_bias", "choice_bias", "scale"}
    assert muon_dimensions("stack.mamba.layer.conv", np.zeros((2, 80, 1, 4))) is None
    spans = np.array([1, 2, 3])
    # 4 FLOPs for each number of a state and token; attention by what it sees; experts nothing.
    assert model.stack.mixing_flops(spans) == 4 * 4 * 8 * 12 * 3 + 4 * 4 * 16 * spans.sum()
    mamba, attention = 32 * 92 + 32 * 32, 32 * (64 + 32 + 32) + 64 * 32
    moe = 32 * 8 + 2 * 32 * 16 + 2 * 32 * 20 + 3 * 2 * 16 * 24
    assert count_matmul_params(model) == mamba + attention + moe + 97 * 32


def test_a_norm_of_groups_is_behind_its_gate():
    rng = np.random.default_rng(0)
    x, gate, scale = rng.standard_normal((3, 12)).astype(np.float32)
    norm = GroupedRMSNorm(12, 3, eps=1e-3)
    norm.scale[...] = jnp.asarray(scale)
    gated = (x * gate / (1 + np.exp(-gate))).reshape(3, 4)
    expected = gated / np.sqrt((gated**2).mean(1, keepdims=True) + 1e-3)
    actual = norm(jnp.asarray(x), jnp.asarray(gate))
    np.testing.assert_allclose(actual, expected.reshape(12) * scale, rtol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("nemotron_h", {"tensor": 2, "fsdp": 2}),
        # One group, which four devices share.
        pytest.param("nemotron_h_moe", {"tensor": 2, "context": 2}, marks=pytest.mark.thorough),
        pytest.param("granitemoehybrid", {"context": 2, "expert": 2}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_sharded_gradients_equal_one_device(name, sizes):
    value, grads = value_and_grads(None, name)
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        actual, found_grads = value_and_grads(mesh, name)
    # float32 sums split over devices.
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=5e-5 * float(np.abs(b).max()))
