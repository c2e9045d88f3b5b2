"""Folders in fp8, int8 and int4: what compressed-tensors says that they stand for, what of a folder
is quantized and what stays, what is refused, and that nothing half-written is left."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxtrain.cli.quantize import choose_matrices, list_notes, list_tables
from jaxtrain.errors import UserError
from jaxtrain.huggingface.compressed import BFLOAT16, SCHEMES, encode
from jaxtrain.huggingface.copy import TensorChanges, copy_folder
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.quantize import Layout, cut, quantize_folder
from jaxtrain.huggingface.safetensors import SafetensorsFolder, write_folder
from jaxtrain.main import main
from jaxtrain.models import build, families, loading

sys.path.insert(0, str(Path(__file__).parents[1]))
from doors import run_verb
from tiny_models import RAW, SIZES


def make(folder: Path, raw: dict) -> Path:
    """A folder in bfloat16 whose numbers nobody trained."""
    config = families.config_from_hf({**SIZES, **raw})
    rng = np.random.default_rng(0)
    shapes = {}
    for entry in families.family(config).names(config):
        path = entry.param
        shapes |= entry.op.shapes(param_shapes(config)[path])
    plan = {name: (shape, BFLOAT16) for name, shape in shapes.items()}
    pieces = (SplitPiece(n, s, full_index(s), rng.normal(0, 0.1, s)) for n, s in shapes.items())
    write_folder(folder, plan, pieces)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return folder


def param_shapes(config) -> dict:
    state = nnx.to_flat_state(nnx.state(build.abstract(config)))
    return {".".join(map(str, path)): leaf.get_value().shape for path, leaf in state}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make(tmp_path_factory.mktemp("quantize") / "base", RAW["qwen3"])


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    raw = {**RAW["qwen3"], "tie_word_embeddings": False}
    return make(tmp_path_factory.mktemp("quantize") / "untied", raw)


@pytest.fixture(scope="module")
def names(base):
    return choose_matrices(base)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_stands_for_weights_within_half_a_step(base, names, tmp_path, scheme):
    """By hand, from the stored tensors alone; whatever part is read, and as a plain export."""
    assert len(names) == 14
    quantize_folder(base, tmp_path / "q", scheme, 16, names)
    plain, files = load_file(base / "model.safetensors"), open_folder(tmp_path / "q")
    assert files.tensors.keys() == plain.keys()
    stored = load_file(tmp_path / "q/model.safetensors") if scheme != "fp8" else None
    for name, wide in plain.items():
        read = files.fetch(name, full_index(wide.shape))
        if name not in names:
            assert read.tobytes() == wide.tobytes(), name
            continue
        wide, read = wide.astype(np.float32), read.astype(np.float32)
        groups = wide.reshape(len(wide), -1, 16) if scheme == "int4" else wide[:, None]
        top = np.abs(groups).max(-1, keepdims=True)
        # Half a step of a scale, the largest codes cut; then bfloat16 of scale and product.
        step = {
            "int4": top / 15,
            "int8": top / 255,
            "fp8": np.maximum(np.abs(groups) / 16, top / 448),
        }
        room = step[scheme] + np.abs(groups) / 128 + top * (1 / 128 if scheme != "int4" else 0)
        assert (np.abs(read.reshape(groups.shape) - groups) <= room + 1e-6).all(), name
        for index in [(slice(3, 4), slice(5, 23)), (slice(0, len(wide), 2), slice(1, 32, 7))]:
            assert (files.fetch(name, index).astype(np.float32) == read[index]).all(), index
        if scheme == "int4":
            words = stored[f"{name}_packed"].view(np.uint32)
            code = int((words[2, 1] >> 12) & 15) - 8  # the fourth of the second word: column 11
            scale = np.float32(stored[f"{name}_scale"][2, 0])
            assert read[2, 11] == np.float32((code * scale).astype(BFLOAT16))
            assert (stored[f"{name}_shape"] == wide.shape).all()
    copy_folder(tmp_path / "q", tmp_path / "again")
    assert "quantization_config" not in (tmp_path / "again/config.json").read_text()
    again = load_file(tmp_path / "again/model.safetensors")
    name = min(names)
    assert again[name].tobytes() == files.fetch(name, full_index(plain[name].shape)).tobytes()


def test_rows_of_zeros_and_of_tiny_numbers_stay_finite():
    rows = np.zeros((2, 16), np.float32)
    rows[1, 3] = 1e-45
    for scheme in SCHEMES.values():
        created = encode(scheme, rows, 16)
        assert all(np.isfinite(array.astype(np.float32)).all() for array in created.values())


def test_parts_cover_a_tensor():
    for shape in [(), (5,), (3, 1 << 23), (2, 3, 4)]:
        marked = np.zeros(shape, np.int8)
        for position in cut(shape):
            marked[position] += 1
        assert (marked == 1).all(), shape


def test_experts_are_quantized_one_by_one_and_routers_stay(tmp_path):
    folder = make(tmp_path / "moe", {**RAW["qwen3_moe"], "num_hidden_layers": 1})
    names = choose_matrices(folder)
    assert "model.layers.0.mlp.experts.7.down_proj.weight" in names
    quantize_folder(folder, tmp_path / "q", "int8", 128, names)
    assert "not in int8" in next(list_notes("int8", 128, names))
    assert not list(list_notes("int4", 128, names)) and list(list_notes("int4", 16, names))
    packing = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert packing["ignore"] == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    loading.check_folder(tmp_path / "q", families.read_config(tmp_path / "q"))


def test_what_is_only_carried_along_stays(base, names, tmp_path):
    """A tower's matrices: byte by byte, and named among those that nobody is to expect in bits."""
    files = SafetensorsFolder(base)
    arrays = {n: files.fetch(n, full_index(s.shape)) for n, s in files.tensors.items()}
    arrays["visual.blocks.0.qkv.weight"] = np.ones((6, 2), BFLOAT16)
    folder = tmp_path / "seeing"
    plan = {n: (a.shape, a.dtype) for n, a in arrays.items()}
    write_folder(
        folder, plan, (SplitPiece(n, a.shape, full_index(a.shape), a) for n, a in arrays.items())
    )
    shutil.copy(base / "config.json", folder)
    quantize_folder(folder, tmp_path / "q", "fp8", 128, names)
    packing = json.loads((tmp_path / "q/config.json").read_text())["quantization_config"]
    assert "visual.blocks.0.qkv" in packing["ignore"]
    assert open_folder(tmp_path / "q").tensors["visual.blocks.0.qkv.weight"].dtype == BFLOAT16


@pytest.mark.parametrize(
    ("change", "options", "messages"),
    [
        ({}, ["--scheme", "int4", "--group", "24"], "--group 24 does not divide the 32 inputs"),
        ({}, ["--scheme", "int4"], "such as 16 or 8"),
        ({}, ["--scheme", "int4", "--group", "0"], "no size of a group"),
        ({}, ["--scheme", "int4", "--layout", "torchao"], "torchao has fp8 and int8"),
        ({}, ["--scheme", "int8", "--tables", "all"], "add --layout torchao"),
        ({"tie_word_embeddings": True}, ["--scheme", "int8", "--tables", "head"], "head of Qwen3"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, [], "quantized already"),
        ({"quantization_config": {"quant_method": "fp8"}}, [], "jaxtrain export"),
    ],
)
def test_refused(base, tmp_path, capsys, change, options, messages):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    out = tmp_path / "out"
    code, output = run_verb(
        ["quantize", str(folder), "--output", str(out), *(options or ["--scheme", "fp8"])], capsys
    )
    assert code == 2 and messages in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def save_as(base: Path, folder: Path, rename) -> Path:
    """A copy of a folder with other names of tensors; those that `rename` makes "" are left out."""
    files = SafetensorsFolder(base)
    arrays = {rename(n): files.fetch(n, full_index(t.shape)) for n, t in files.tensors.items()}
    arrays.pop("", None)
    plan = {n: (a.shape, a.dtype) for n, a in arrays.items()}
    pieces = (SplitPiece(n, a.shape, full_index(a.shape), a) for n, a in arrays.items())
    write_folder(folder, plan, pieces)
    shutil.copy(base / "config.json", folder)
    return folder


def test_names_of_wrapped_models_are_read_and_missing_tensors_are_named(base, tmp_path, capsys):
    wrapped = save_as(base, tmp_path / "wrapped", lambda name: f"module._orig_mod.{name}")
    for folder in (base, wrapped):
        words = ["quantize", str(folder), "--output", str(tmp_path / f"q_{folder.name}")]
        assert run_verb([*words, "--scheme", "int8"], capsys)[0] == 0
    first, second = (open_folder(tmp_path / f"q_{path.name}") for path in (base, wrapped))
    assert first.tensors.keys() == second.tensors.keys()
    for name, stored in first.tensors.items():
        index = full_index(stored.shape)
        np.testing.assert_array_equal(first.fetch(name, index), second.fetch(name, index))
    cut_off = save_as(base, tmp_path / "cut", lambda n: "" if n == "model.norm.weight" else n)
    words = [str(cut_off), "--output", str(tmp_path / "out")]
    code, output = run_verb(["quantize", *words, "--scheme", "int8"], capsys)
    assert code == 2 and "missing model.norm.weight" in output
    code, output = run_verb(["export", *words], capsys)
    assert code == 0 and "missing model.norm.weight" in output and "copied as they are" in output


def test_experts_are_refused_in_the_layout_of_torchao(tmp_path, capsys):
    """transformers 5.24 would find none of them and start from random ones."""
    folder = make(tmp_path / "model", RAW["qwen3_moe"])
    argv = ["quantize", str(folder), "--scheme", "fp8", "--output", str(tmp_path / "out")]
    code, output = run_verb([*argv, "--layout", "torchao"], capsys)
    assert code == 2 and "leave experts in torchao's layout at random" in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_numbers_that_are_not_finite_leave_no_folder(base, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    stored = open_folder(folder).tensors["model.layers.1.mlp.up_proj.weight"]
    out = np.memmap(stored.file, stored.dtype, "r+", stored.offset, stored.shape)
    out[3, 3] = np.nan
    out.flush()
    argv = ["quantize", str(folder), "--scheme", "int8", "--output", str(tmp_path / "out")]
    code, output = run_verb(argv, capsys)
    assert code == 2 and "up_proj.weight" in output and "holds NaN" in output, output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_experts_in_one_tensor_are_refused_by_name(tmp_path):
    raw = {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2}
    folder = make(tmp_path / "fused", {**raw, "num_hidden_layers": 1})
    with pytest.raises(UserError, match="GraniteMoeForCausalLM keeps all experts"):
        choose_matrices(folder)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"config_groups": {"g": {"weights": {"symmetric": False}}}}, "symmetric is not read"),
        ({"config_groups": {"g": {"weights": {"type": "int", "num_bits": 3}}}}, "read are fp8"),
        ({"config_groups": {"g": {"weights": None}}}, "g.weights"),
        ({"config_groups": []}, "config_groups"),
    ],
)
def test_folders_of_others_that_are_not_read(base, names, tmp_path, change, messages):
    quantize_folder(base, tmp_path / "q", "int4", 16, names)
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=messages):
        families.read_config(tmp_path / "q")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.slow
def test_transformers_decodes_the_same_numbers(base, names, tmp_path, scheme):
    """Bit for bit; its own forward pass also rounds activations of fp8 and int8, so logits are near
    the decoded model's."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    import torch
    import transformers

    folder = tmp_path / "q"
    quantize_folder(base, folder, scheme, 16, names)
    auto = transformers.AutoModelForCausalLM
    plain = transformers.CompressedTensorsConfig(dequantize=True)
    decoded = auto.from_pretrained(folder, dtype=torch.float32, quantization_config=plain)
    files, count = open_folder(folder), 0
    for name, value in decoded.state_dict().items():
        if name in files.tensors:
            actual_values = files.fetch(name, full_index(files.tensors[name].shape)).astype(
                np.float32
            )
            assert (value.numpy() == actual_values).all(), name
            count += 1
    assert count == len(files.tensors)
    packed = auto.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        error = (packed(ids).logits - decoded(ids).logits).abs().max()
    # Seen, of logits of deviation 0.6: int4 0.01 (bfloat16), int8 0.05, fp8 0.2.
    assert error < {"int4": 0.05, "int8": 0.2, "fp8": 0.6}[scheme]


def tables_too(base, folder, scheme):
    names = choose_matrices(base) | list_tables(base, None, "all")
    quantize_folder(base, folder, scheme, 16, names, layout=Layout("torchao", True))
    return names


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_torchao_holds_the_numbers_of_compressed_tensors(untied, tmp_path, scheme):
    """Names, header and config as torchao 0.18 and transformers 5.24 write them."""
    names = tables_too(untied, tmp_path / "ao", scheme)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= names and len(names) == 16
    quantize_folder(untied, tmp_path / "q", scheme, 16, names)
    folders = [open_folder(tmp_path / name) for name in ("ao", "q")]
    assert folders[0].tensors.keys() == folders[1].tensors.keys()
    for name, stored in folders[0].tensors.items():
        read = [folder.fetch(name, full_index(stored.shape)) for folder in folders]
        assert read[0].tobytes() == read[1].tobytes(), name
    stored = SafetensorsFolder(tmp_path / "ao").tensors
    module = "model.layers.0.self_attn.q_proj"
    assert stored[f"{module}._weight_scale"].dtype == np.float32
    assert (f"{module}._weight_zero_point" in stored) == (scheme == "int8")
    with safe_open(tmp_path / "ao/model.safetensors", "np") as file:
        header = file.metadata()
    assert sorted(json.loads(header["tensor_names"])) == sorted(folders[0].tensors)
    assert json.loads(header["model.norm.weight"]) == {"_type": "Tensor"}
    entry = json.loads(header[f"{module}.weight"])
    assert entry["_type"] == {"int8": "Int8Tensor", "fp8": "Float8Tensor"}[scheme]
    assert entry["_data"]["block_size"] == [1, 32]
    assert entry["_data"]["dtype"] == {"_type": "torch.dtype", "_data": "bfloat16"}
    packing = json.loads((tmp_path / "ao/config.json").read_text())["quantization_config"]
    assert packing["quant_method"] == "torchao" and packing["include_input_output_embeddings"]
    assert packing["modules_to_not_convert"] == []
    loading.check_folder(tmp_path / "ao", families.read_config(tmp_path / "ao"))


def test_a_tied_head_that_is_stored_too_stays_equal_to_the_embeddings(base, tmp_path):
    copies = {"lm_head.weight": "model.embed_tokens.weight"}
    copy_folder(base, tmp_path / "base", changes=TensorChanges(copies=copies))
    names = tables_too(tmp_path / "base", tmp_path / "ao", "int8")
    assert {*copies, *copies.values()} <= names
    loading.check_folder(tmp_path / "ao", families.read_config(tmp_path / "ao"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.slow
def test_transformers_reads_torchao_and_the_same_numbers(base, untied, tmp_path, scheme, tied):
    """Bit for bit, embeddings and head included."""
    pytest.importorskip("torchao.quantization", reason="pip install torchao")
    import torch
    import transformers

    source = base if tied else untied
    names = tables_too(source, tmp_path / "ao", scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ao", dtype=torch.bfloat16)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    files, packed = open_folder(tmp_path / "ao"), 0
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, value in model.named_parameters():  # a table that is the head, too, once
        if hasattr(value, "qdata"):
            value, packed = value.dequantize(), packed + 1
        read = files.fetch(name, full_index(files.tensors[name].shape)).astype(np.float32)
        assert (value.detach().float().numpy() == read).all(), name
    assert packed == len(names)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        error = (model(ids).logits.float() - plain(ids).logits).abs().max()
    # Seen, of logits of deviation 0.07: int8 0.003, fp8 0.01.
    assert error < {"int8": 0.01, "fp8": 0.03}[scheme]


def test_torchao_of_others_that_is_not_read(untied, tmp_path):
    tables_too(untied, tmp_path / "ao", "int8")
    config = json.loads((tmp_path / "ao/config.json").read_text())
    stored = SafetensorsFolder(tmp_path / "ao").tensors["lm_head._weight_zero_point"]
    out = np.memmap(stored.file, stored.dtype, "r+", stored.offset, stored.shape)
    out[1] = 3
    out.flush()
    with pytest.raises(UserError, match="lm_head._weight_zero_point. is not 0"):
        open_folder(tmp_path / "ao")
    config["quantization_config"]["quant_type"]["default"]["_type"] = "Int4WeightOnlyConfig"
    (tmp_path / "ao/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quant_type is .*Int4WeightOnlyConfig"):
        families.read_config(tmp_path / "ao")


@pytest.mark.slow
def test_a_run_with_an_adapter_is_merged_and_measured(tmp_path, capsys):
    base = make(tmp_path / "base", {**RAW["qwen3"], "vocab_size": 512, "num_hidden_layers": 1})
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n' * 8)
    data = f'{{ path = "{tmp_path / "rows.jsonl"}" }}'
    (tmp_path / "config.toml").write_text(
        f"""
[model]
path = "{base}"
tokenizer = "builtin"
compute_dtype = "float32"
[adapter]
kind = "lora"
[data]
datasets = [{data}]
eval_datasets = [{data}]
sequence_len = 32
[optim]
learning_rate = 0.1
[run]
max_steps = 2
output_dir = "{tmp_path / "run"}"
"""
    )
    assert main(["--config", str(tmp_path / "config.toml")]) == 0
    argv = ["quantize", str(tmp_path / "run"), "--scheme", "int4", "--group", "16"]
    assert main(argv) == 0
    output = capsys.readouterr().out
    assert "jaxtrain merge" in output
    line = next(line for line in output.splitlines() if line.startswith("held-out loss of"))
    before, after = (float(word) for word in line.split(": ")[1].split(" (")[0].split(" -> "))
    assert 0 < abs(before - after) < 0.3, line
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "quantized-int4" in names and not any(name.startswith(".q") for name in names)
