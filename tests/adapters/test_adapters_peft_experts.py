"""Pairs for all experts of a layer, as PEFT's ParamWrapper has them: out, in, and merged."""

import json
import re
import warnings

import numpy as np
import pytest
from families_added import FAMILIES as ADDED
from families_gemma import FAMILIES as GEMMA
from families_gptoss import FAMILIES
from safetensors.numpy import load_file
from test_adapters_peft import TOKENS, make_params, our_logits
from tiny_models import RAW, SIZES, compute_logits, pack

from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import load_trained, read_adapter, write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving

CONFIGS = {
    "gpt_oss": {**SIZES, **FAMILIES["gpt_oss"]},  # [in, out] matrices, gate and up in turns
    "qwen3_moe": RAW["qwen3_moe"],  # a tensor for each expert
    "qwen3_5_moe": RAW["qwen3_5_moe"],  # [out, in], gate rows first
    "granitemoehybrid": RAW["granitemoehybrid"],  # called otherwise by transformers
    "gemma4": {**SIZES, **GEMMA["gemma4_moe"]},
    "llama4": {**SIZES, **ADDED["llama4"]},  # [in, out], which PEFT takes for [out, in]
}
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def make_base(folder, name, **sizes):
    config = families.config_from_hf({**CONFIGS[name], **sizes})
    if name == "qwen3_5_moe":
        config = config.fit([FUSED])
    saving.save(build.init(config, seed=3), config, folder)
    return families.read_config(folder)


def logits_of(folder):
    model = loading.load(folder)
    return np.asarray(compute_logits(model, pack([[row] for row in TOKENS], 30)))


def theirs(base):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")


def run(model):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


def assert_close(actual, expected, plain):
    # fp32 sums in another order; and the adapter does something.
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.05 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("gpt_oss", ["all-linear"], marks=pytest.mark.thorough),
        pytest.param("qwen3_5_moe", ["mlp"], marks=pytest.mark.thorough),
        pytest.param("granitemoehybrid", ["mlp"], marks=pytest.mark.thorough),
        pytest.param("gemma4", ["all-linear"], marks=pytest.mark.thorough),
        ("llama4", ["all-linear"]),
        pytest.param("llama4", ["experts.up"], marks=pytest.mark.thorough),
        pytest.param("gpt_oss", ["experts.up", "attention"], marks=pytest.mark.thorough),
        pytest.param("gpt_oss", ["experts.down"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_peft_loads_and_we_merge_what_we_write(name, target, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    config = make_base(tmp_path / "base", name)
    slots = choose_slots(find_linears(config), target, LoRASpec(4, 6.0), {}, {})
    adapter = Adapter(slots)
    _, values, rebuild = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path / "adapter", str(tmp_path / "base"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The following .*_pattern keys did not match")
        model = peft.PeftModel.from_pretrained(theirs(tmp_path / "base"), str(tmp_path / "adapter"))
    expected, plain = run(model), logits_of(tmp_path / "base")
    assert_close(our_logits(tmp_path / "base", values, rebuild), expected, plain)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", max_shard_bytes=20_000)
    assert_close(logits_of(tmp_path / "out"), expected, plain)
    again = read_adapter(tmp_path / "adapter", config, "float32")
    shapes, _, rebuild = make_params(config, again)
    loaded = load_trained(shapes, config, again)
    assert_close(our_logits(tmp_path / "base", loaded, rebuild), expected, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("qwen3_moe", "mlp"),
        pytest.param("gpt_oss", "mlp", marks=pytest.mark.thorough),
        pytest.param("llama4", "feed_forward", marks=pytest.mark.thorough),
    ],
)
def test_we_load_and_merge_what_peft_writes(name, module, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    config = make_base(tmp_path / "base", name)
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=[f"{module}.experts.{name}_proj" for name in ("gate_up", "down")],
        rank_pattern={f"{module}.experts.down_proj": 2},
        alpha_pattern={f"{module}.experts.down_proj": 5},
        use_rslora=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(theirs(tmp_path / "base"), settings)
    model.save_pretrained(tmp_path / "adapter")
    expected, plain = run(model), logits_of(tmp_path / "base")
    adapter = read_adapter(tmp_path / "adapter", config, "float32")
    ranks = {path.rpartition(".")[2]: slot.rank for path, slot in adapter.slots.items()}
    assert ranks == {"q": 3, "gate": 3, "up": 3, "down": 2}
    shapes, _, rebuild = make_params(config, adapter)
    loaded = load_trained(shapes, config, adapter)
    assert_close(our_logits(tmp_path / "base", loaded, rebuild), expected, plain)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert_close(logits_of(tmp_path / "out"), expected, plain)


def test_experts_beside_dense_layers_are_an_expression(tmp_path):
    """PEFT would put pairs at the dense layer by the last part of a name."""
    config = families.config_from_hf({**CONFIGS["qwen3_moe"], "mlp_only_layers": [0]})
    adapter = Adapter(choose_slots(find_linears(config), ["*.experts.*"], LoRASpec(4, 6.0), {}, {}))
    write_peft(make_params(config, adapter)[1], config, adapter, tmp_path, None)
    expression = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    for part in ("gate", "up", "down"):
        assert re.fullmatch(expression, f"model.layers.1.mlp.experts.3.{part}_proj")
        assert not re.fullmatch(expression, f"model.layers.0.mlp.{part}_proj")


@pytest.fixture
def written(tmp_path):
    """(config, adapter, values) of pairs written to tmp_path / adapter."""
    config = make_base(tmp_path / "base", "gpt_oss")
    slots = choose_slots(find_linears(config), ["mlp"], LoRASpec(4, 6.0), {"down": 2}, {})
    adapter = Adapter(slots)
    _, values, _ = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path / "adapter", None)
    return config, adapter, values


def test_the_layout_is_expert_major_and_rank_major(written, tmp_path):
    config, _, values = written
    actual = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert raw["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert raw["r"] == 8 and raw["lora_alpha"] == 12  # gate and up are one pair
    assert raw["rank_pattern"] == {"mlp.experts.down_proj": 2}
    start = "base_model.model.model.layers.1.mlp.experts."
    a, b = (actual[f"{start}base_layer.lora_{part}.weight"] for part in "AB")
    experts, width, hidden = 5, config.hidden_size, config.intermediate_size
    assert a.shape == (experts * 8, width) and b.shape == (2 * hidden, 8 * experts)
    path = "stack.block.mlp.experts.{}.adapter.{}"
    for e in range(experts):
        product = b[:, e::experts] @ a[8 * e : 8 * e + 8]
        for position, part in enumerate(("gate", "up")):
            actual_values = [np.asarray(values[path.format(part, factor)][1, e]) for factor in "ab"]
            np.testing.assert_allclose(
                product[position::2], (actual_values[0] @ actual_values[1]).T, atol=1e-6
            )
    assert actual[f"{start}lora_A.weight"].shape == (experts * 2, hidden)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_parameters": ["mlp.experts.w1"]}, "does not have; it has mlp.experts.down_proj"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "unknown modules|no experts for"),
        ({"target_parameters": [3]}, "target_parameters"),
    ],
    ids=str,
)
def test_pairs_that_fit_nothing_are_refused(change, words, written, tmp_path):
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path / "adapter", written[0], "float32")
    with pytest.raises(UserError, match=words):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()
