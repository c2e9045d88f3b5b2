"""PEFT folders against the real peft package in torch, import, refusals, and merging."""

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_added import FAMILIES as ADDED
from families_attn import FAMILIES
from families_gemma import FAMILIES as GEMMA4
from safetensors.numpy import load_file, save_file
from tiny_models import RAW, SIZES, compute_logits, documents, pack

from jaxtrain.adapters.attach import attach
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import (
    adapter_entries,
    load_trained,
    read_adapter,
    write_peft,
)
from jaxtrain.adapters.peft_folder import open_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

RAW = RAW | {name: {**SIZES, **GEMMA4[name]} for name in ("gemma4_moe", "gemma4_per_layer")}
JOINT = ("falcon_groups", "lfm3", "gpt_neox", "apertus", "youtu", "granitemoe_swa", "olmo_hybrid")
JOINT += ("phi", "gptj", "codegen", "gpt2", "gpt_bigcode", "gpt_neo", "opt")
RAW |= {
    name: {key: value for key, value in {**SIZES, **ADDED[name]}.items() if value is not None}
    for name in (*JOINT, "phimoe")
}

CASES = {
    "lora": dict(),
    "rslora": dict(rslora=True),
    "dora": dict(dora=True),
    "attention with two ranks": dict(target=["attention"], ranks={"q_proj": 2}),
    "embeddings": dict(target=["mlp"], full=("embed.embedding",)),
    "gates with another rank": dict(ranks={"gate_proj": 2}),
}
REPEATED = ("rslora", "attention with two ranks")
"""Cases whose scale and ranks quick tests of other cases cover."""
GEMMA = [
    pytest.param("lora", name, marks=pytest.mark.thorough)
    for name in ("gemma4_moe", "gemma4_per_layer")
]
EXPERTS = [
    pytest.param("lora", "qwen3_moe_mixed", marks=pytest.mark.slow),
    pytest.param("rslora", "mixtral", marks=pytest.mark.thorough),
    GEMMA[1],
]
# PEFT 0.21 fuses the adapters of experts as transformers 5 fuses the experts, but not rsLoRA's
# scale nor those of models that have dense layers, too.
EXPERTS_IN_PEFT = [
    pytest.param("lora", "qwen3_moe", marks=pytest.mark.slow),
    pytest.param("lora", "mixtral", marks=pytest.mark.thorough),
]


def make_base(folder, name="qwen3"):
    config = families.config_from_hf({**SIZES, **{**ADDED, **RAW}[name]})
    saving.save(build.init(config, seed=3), config, folder)
    return families.read_config(folder)


def make_params(config, adapter, seed=0):
    """(shapes with places, random values, rebuild) of the adapted model."""
    mesh = make_mesh(jax.devices()[:1])
    shapes, rebuild = split_model(attach(build.abstract(config), adapter))
    named_sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    rng = np.random.default_rng(seed)
    shapes = {
        path: jax.ShapeDtypeStruct(s.shape, jnp.float32, sharding=named_sharding)
        for path, s in sorted(shapes.items())
        if adapter.trains(path)
    }
    values = {
        path: jnp.asarray(
            (1 if path.endswith("magnitude") else 0) + 0.3 * rng.standard_normal(s.shape),
            jnp.float32,
        )
        for path, s in shapes.items()
    }
    return shapes, values, rebuild


def make_adapter(config, target=("all-linear",), full=(), ranks=None, **slot):
    linears = find_linears(config)
    separate = any(linear.modules[0].endswith(".v_proj") for linear in linears.values())
    slots = choose_slots(
        linears,
        target,
        LoRASpec(4, 6.0, **slot),
        ranks or {},
        {"v_proj": 3.0} if separate and {"attention", "all-linear"} & {*target} else {},
    )
    return Adapter(slots, tuple(full))


def logits_of(model):
    return compute_logits(model, pack([[row] for row in TOKENS], 30))


def our_logits(base, values, rebuild):
    params = split_model(loading.load(base))[0]
    return np.asarray(logits_of(rebuild({**params, **values})))


def write_case(tmp_path, case, name="qwen3"):
    """Write folders base and adapter into tmp_path; return (config, adapter, values, rebuild)."""
    folder, *result = create_case(case, name)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return result


@functools.cache
def create_case(case, name):
    """Return (a folder for `write_case` to copy, config, adapter, values, rebuild)."""
    temporary = tempfile.TemporaryDirectory(prefix="jaxtrain-tests-peft-")
    atexit.register(temporary.cleanup)
    tmp_path = Path(temporary.name)
    config = make_base(tmp_path / "base", name)
    experts = ".experts." in " ".join(make_adapter(config, **CASES[case]).slots)
    rate = 0.0 if experts else 0.25
    adapter = dataclasses.replace(make_adapter(config, **CASES[case]), dropout=rate)
    _, values, rebuild = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path / "adapter", str(tmp_path / "base"))
    return tmp_path, config, adapter, values, rebuild


TOKENS = np.stack(documents(4, 30, 30))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "qwen3") for case in ("lora", "dora", "embeddings")),
        *(pytest.param(case, "qwen3", marks=pytest.mark.slow) for case in REPEATED),
        pytest.param("lora", "llama", marks=pytest.mark.thorough),
        pytest.param("lora", "falcon_groups", marks=pytest.mark.slow),
        pytest.param("dora", "gpt2", marks=pytest.mark.thorough),
        pytest.param("attention with two ranks", "phimoe", marks=pytest.mark.thorough),
        *(pytest.param("lora", name, marks=pytest.mark.thorough) for name in JOINT[1:]),
        pytest.param("gates with another rank", "lfm3", marks=pytest.mark.thorough),
        *EXPERTS_IN_PEFT,
        *GEMMA,
    ],
)
def test_peft_loads_what_we_write(case, name, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    import transformers

    name = name if name in RAW else next(key for key in RAW if key.startswith(name))
    config, _, values, rebuild = write_case(tmp_path, case, name)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    actual_values = our_logits(tmp_path / "base", values, rebuild)
    # fp32 sums in another order.
    assert np.abs(actual_values - expected).max() < 1e-4 * np.abs(expected).max()
    plain = np.asarray(logits_of(loading.load(tmp_path / "base")))
    assert np.abs(plain - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("nemotron_h", ["in_proj", "q_proj", "mlp"], marks=pytest.mark.thorough),
        pytest.param("bamba", ["all-linear"], marks=pytest.mark.thorough),
        pytest.param("falcon_h1", ["in_proj", "q_proj", "mlp"], marks=pytest.mark.thorough),
        pytest.param("jamba", ["attention"], marks=pytest.mark.thorough),
        pytest.param("jamba_dense", ["all-linear"], marks=pytest.mark.thorough),
        ("qwen3_5", ["all-linear"]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_recurrent_layers_go_to_peft_and_come_back(name, target, tmp_path):
    """Read by PEFT as we write it; what PEFT writes, read and merged by us. Nemotron-H's folders
    say `backbone.` where PEFT says `model.`, and PEFT takes no adapter of Mamba's `out_proj`."""
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    import transformers

    config = make_base(tmp_path / "base", name)
    load = transformers.AutoModelForCausalLM.from_pretrained

    def run(model):
        with torch.no_grad():
            return model(torch.from_numpy(TOKENS).long(), use_cache=False).logits.numpy()

    def assert_same(actual_values, reference):
        assert np.abs(actual_values - reference).max() < 1e-4 * np.abs(reference).max()
        assert np.abs(reference - plain).max() > 0.1 * np.abs(reference).max()

    plain = run(load(tmp_path / "base", attn_implementation="eager"))
    adapter = Adapter(choose_slots(find_linears(config), target, LoRASpec(4, 6.0), {}, {}))
    _, values, rebuild = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path / "ours", str(tmp_path / "base"))
    base = load(tmp_path / "base", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "ours"))
    assert_same(our_logits(tmp_path / "base", values, rebuild), run(model))

    payload = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=5,
        target_modules=payload["target_modules"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(load(tmp_path / "base", attn_implementation="eager"), settings)
    model.save_pretrained(tmp_path / "theirs")
    again = read_adapter(tmp_path / "theirs", config, "float32")
    shapes, _, rebuild = make_params(config, again)
    loaded = load_trained(shapes, config, again)
    assert_same(our_logits(tmp_path / "base", loaded, rebuild), run(model))
    merge_adapter(tmp_path / "base", tmp_path / "theirs", tmp_path / "merged")
    assert_same(run(load(tmp_path / "merged", attn_implementation="eager")), run(model))


@pytest.mark.parametrize(
    ("target", "slot"),
    [
        (["attention.z", "attention.b"], {"rslora": True}),
        (["attention"], {"dora": True}),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_pairs_of_two_matrices_are_one_of_pefts(target, slot, tmp_path):
    """Qwen3-Next's in_proj_qkvz and in_proj_ba: PEFT, we after reading it back, and the merged
    model compute the same."""
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    import transformers

    config = make_base(tmp_path / "base", "qwen3_next")
    adapter = make_adapter(config, target, **slot)
    _, values, rebuild = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path / "adapter", str(tmp_path / "base"))
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    close = 1e-4 * np.abs(expected).max()
    assert np.abs(our_logits(tmp_path / "base", values, rebuild) - expected).max() < close
    again = read_adapter(tmp_path / "adapter", config, "float32")
    shapes, _, rebuild = make_params(config, again)
    loaded = load_trained(shapes, config, again)
    assert np.abs(our_logits(tmp_path / "base", loaded, rebuild) - expected).max() < close
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = np.asarray(logits_of(loading.load(tmp_path / "merged")))
    assert np.abs(merged - expected).max() < close


@pytest.mark.parametrize(
    ("name", "target", "rslora"),
    [
        pytest.param("qwen3_next", ["attention"], False, marks=pytest.mark.slow),
        pytest.param("qwen3_next", ["attention.z", "attention.b"], True, marks=pytest.mark.slow),
        ("granitemoehybrid_dense", ["mlp"], False),
        ("phi3", ["attention.q", "attention.v"], False),
    ],
    ids=str,
)
def test_the_joint_pair_is_the_sum_of_ours(name, target, rslora, tmp_path):
    """Tensor by tensor: scale B A of the folder against our products, written as weights are; and
    read back."""
    config = families.config_from_hf({**SIZES, **{**RAW, **FAMILIES}[name]})
    adapter = make_adapter(config, target, rslora=rslora)
    _, values, _ = make_params(config, adapter)
    write_peft(values, config, adapter, tmp_path, None)
    expected = {}
    for entry in families.family(config).names(config):
        path = entry.param.removesuffix(".kernel")
        if path in adapter.slots:
            a, b = (np.asarray(values[f"{path}.adapter.{part}"], np.float64) for part in "ab")
            for piece in entry.op.write(adapter.slots[path].scale * (a @ b), np.asarray):
                full = expected.setdefault(piece.name, np.zeros(piece.shape))
                full[piece.index] = piece.array
    actual = load_file(tmp_path / "adapter_model.safetensors")
    slots = open_peft(tmp_path).modules()
    assert {f"{module}.weight" for module in slots} == set(expected)
    for module, slot in slots.items():
        name = f"base_model.model.{module}.lora_"
        a, b = (actual[f"{name}{part}.weight"].astype(np.float64) for part in "AB")
        product = slot.scale * (b @ a)
        assert np.abs(product - expected[f"{module}.weight"]).max() < 1e-12 * np.abs(product).max()
    again = read_adapter(tmp_path, config, "float32")
    loaded = load_trained(make_params(config, again)[0], config, again)
    for path, slot in adapter.slots.items():
        actual_values, reference = (
            provided.scale * np.asarray(v[f"{path}.adapter.a"] @ v[f"{path}.adapter.b"])
            for provided, v in ((slot, values), (again.slots[path], loaded))
        )
        np.testing.assert_allclose(
            reference, actual_values, atol=1e-5 * np.abs(actual_values).max()
        )


def test_parts_of_one_matrix_need_one_rank(tmp_path):
    config = families.config_from_hf(RAW["qwen3_next"])
    odd = make_adapter(config, ["attention"], ranks={"attention.z": 2})
    with pytest.raises(UserError, match="one matrix in PEFT, in_proj_qkvz; give them the same"):
        adapter_entries(config, odd)
    dora = make_adapter(config, ["attention.z"], dora=True)
    with pytest.raises(UserError, match="all parts of it, as DoRA needs"):
        adapter_entries(config, dora)


@pytest.mark.parametrize("dora", [False, True])
def test_we_load_what_peft_writes(dora, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    import transformers

    config = make_base(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    torch.manual_seed(0)
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        rank_pattern={"down_proj": 3},
        use_dora=dora,
        use_rslora=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    adapter = read_adapter(tmp_path / "adapter", config, "float32")
    shapes, _, rebuild = make_params(config, adapter)
    values = load_trained(shapes, config, adapter)
    actual_values = our_logits(tmp_path / "base", values, rebuild)
    assert np.abs(actual_values - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("case", "name"), [*((case, "qwen3") for case in CASES), *EXPERTS])
def test_round_trip_is_bit_identical(case, name, tmp_path):
    config, adapter, values, _ = write_case(tmp_path, case, name)
    actual = read_adapter(tmp_path / "adapter", config, "float32")
    assert actual.slots == adapter.slots and actual.full == adapter.full
    assert actual.dropout == adapter.dropout
    shapes, _, _ = make_params(config, actual)
    loaded = load_trained(shapes, config, actual)
    assert set(loaded) == set(values)
    for path, value in values.items():
        np.testing.assert_array_equal(loaded[path], value)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *((case, "qwen3") for case in CASES if case not in REPEATED),
        *(pytest.param(case, "qwen3", marks=pytest.mark.slow) for case in REPEATED),
        *EXPERTS,
        GEMMA[0],
        pytest.param("lora", "gpt2", marks=pytest.mark.slow),
        pytest.param("dora", "gpt2", marks=pytest.mark.thorough),
    ],
)
def test_merged_equals_unmerged(case, name, tmp_path):
    _, _, values, rebuild = write_case(tmp_path, case, name)
    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", max_shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1, "shard by shard"
    logits = np.asarray(logits_of(loading.load(tmp_path / "out")))
    actual_values = our_logits(tmp_path / "base", values, rebuild)
    # fp32 sums in another order.
    assert np.abs(logits - actual_values).max() < 1e-4 * np.abs(actual_values).max()


def test_merging_to_bfloat16_rounds_once(tmp_path):
    write_case(tmp_path, "lora")
    for dtype in (None, "bfloat16"):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / f"{dtype}", dtype)
    exact, rounded = SafetensorsFolder(tmp_path / "None"), SafetensorsFolder(tmp_path / "bfloat16")
    for name, stored in rounded.tensors.items():
        everything = tuple(slice(0, size) for size in stored.shape)
        assert str(stored.dtype) == "bfloat16"
        expected = exact.fetch(name, everything).astype(stored.dtype)
        np.testing.assert_array_equal(rounded.fetch(name, everything), expected)


def test_what_a_merge_loses_to_rounding_is_measured(tmp_path):
    """The share of the adapter's changes that rounding takes, by the folders that were written."""
    write_case(tmp_path, "lora")
    exact = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "exact", "float32")
    rounded = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "bfloat16")
    base, wide, narrow = (SafetensorsFolder(tmp_path / name) for name in ("base", "exact", "out"))
    error = change = 0.0
    for name, stored in base.tensors.items():
        everything = tuple(slice(0, size) for size in stored.shape)
        before, merged, written = (
            folder.fetch(name, everything).astype(np.float64) for folder in (base, wide, narrow)
        )
        if (before != merged).any():
            error += np.square(written - merged).sum()
            change += np.square(merged - before).sum()
    assert exact.lost == 0 and exact.changed == rounded.changed > 0
    assert rounded.lost == pytest.approx(np.sqrt(error / change), rel=1e-5) and rounded.lost > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "VERA"}, "only LORA"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"use_dora": True}, "missing tensors"),
    ],
    ids=str,
)
def test_what_we_do_not_compute_is_refused(change, words, tmp_path):
    config, *_ = write_case(tmp_path, "lora")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path / "adapter", config, "float32")
    with pytest.raises(UserError, match=words):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path):
    write_case(tmp_path, "lora")
    raw = {**RAW["qwen3"], "hidden_size": 64}
    second = families.config_from_hf(raw)
    saving.save(build.init(second, seed=0), second, tmp_path / "other")
    with pytest.raises(UserError, match=r"cannot be merged.*is \(.*and \d+ more"):
        merge_adapter(tmp_path / "other", tmp_path / "adapter", tmp_path / "out")
    adapter = read_adapter(tmp_path / "adapter", second, "float32")
    with pytest.raises(UserError, match="this model needs"):
        load_trained(make_params(second, adapter)[0], second, adapter)


def test_an_adapter_that_holds_no_numbers_is_named(tmp_path):
    config, *_ = write_case(tmp_path, "lora")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = dict(load_file(file))
    name = next(name for name in tensors if "layers.1" in name and "lora_B" in name)
    tensors[name][0, 0] = np.nan
    save_file(tensors, file)
    adapter = read_adapter(tmp_path / "adapter", config, "float32")
    with pytest.raises(UserError, match=f"{name}.* holds 1 value of NaN"):
        load_trained(make_params(config, adapter)[0], config, adapter)
    with pytest.raises(UserError, match="merged in holds NaN or infinite"):
        merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_the_names_are_those_of_vllm(tmp_path):
    write_case(tmp_path, "lora")
    tensors = open_peft(tmp_path / "adapter").files.tensors
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert tensors[name].shape == (4, 32)
    assert tensors[name.replace("lora_A", "lora_B")].shape == (64, 4)
    raw = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert raw["r"] == 4 and raw["lora_alpha"] == 6 and raw["alpha_pattern"] == {"v_proj": 3}
    assert raw["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
