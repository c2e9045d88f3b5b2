"""Folders as other programs save them: names, buffers, prefixes, and files of torch."""

import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.models import families, loading

torch = pytest.importorskip("torch", reason="reference weights are saved with torch")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama's folder, and its state dict."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES, num_key_value_heads=2)
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


def copy(folder, target, state=None, **keys):
    """Copy a folder with another state dict and other keys of config.json."""
    shutil.copytree(folder, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **keys}))
    if state is not None:
        save_file({name: t.contiguous() for name, t in state.items()}, target / "model.safetensors")
    return target


def read(folder):
    return {name: np.asarray(value) for name, value in loading.read_params(folder)}


def check_same(folder, other):
    ours, theirs = read(folder), read(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("name", ["LLaMAForCausalLM", "LlamaModel", "FSDPLlamaForCausalLM"])
def test_other_names_of_the_architecture(saved, tmp_path, name):
    folder = copy(saved[0], tmp_path / "copy", architectures=[name])
    assert families.read_config(folder) == families.read_config(saved[0])
    check_same(folder, saved[0])


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"model.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}".replace(".mlp", "._fsdp_wrapped_module.mlp"),
        lambda name: f"module._orig_mod.{name}",
    ],
    ids=["without model.", "torch.compile", "DDP", "model. twice", "FSDP", "both"],
)
def test_prefixes_of_names(saved, tmp_path, rename):
    folder = copy(saved[0], tmp_path / "copy", {rename(n): t for n, t in saved[1].items()})
    assert open_folder(folder).tensors.keys() == saved[1].keys()
    check_same(folder, saved[0])


def test_buffers_are_no_weights(saved, tmp_path):
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 8),
        "model.layers.1.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "model.layers.1.self_attn.masked_bias": torch.tensor(-1e4),
        "model.causal_mask": torch.ones(8, 8, dtype=torch.bool),
        "model.embed_tokens.position_ids": torch.arange(8),
    }
    check_same(copy(saved[0], tmp_path / "copy", {**saved[1], **buffers}), saved[0])


def test_a_name_that_is_there_twice_is_refused(saved, tmp_path):
    doubled = saved[1] | {"module.lm_head.weight": saved[1]["lm_head.weight"] + 1}
    with pytest.raises(UserError, match="lm_head.weight.* twice"):
        open_folder(copy(saved[0], tmp_path / "copy", doubled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_files_of_torch(saved, tmp_path, dtype):
    state = {name: tensor.to(dtype) for name, tensor in saved[1].items()}
    expected = copy(saved[0], tmp_path / "safetensors", state)
    folder = copy(saved[0], tmp_path / "torch")
    (folder / "model.safetensors").unlink()
    names, homes = sorted(state), {}
    for part, chosen in enumerate((names[:5], names[5:])):
        file = f"pytorch_model-0000{part + 1}-of-00002.bin"
        torch.save({name: torch.nn.Parameter(state[name]) for name in chosen}, folder / file)
        homes |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    check_same(folder, expected)


@pytest.mark.parametrize("kind", ["code", "old format", "view", "truncated"])
def test_files_of_torch_that_are_not_read_name_the_command(saved, tmp_path, kind):
    folder = copy(saved[0], tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    file, marker = folder / "pytorch_model.bin", tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    state = {"w": torch.ones(4, 2)}
    if kind == "code":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"w": Runs()}))
    elif kind == "view":
        torch.save({"w": state["w"].T}, file)
    else:
        torch.save(state, file, _use_new_zipfile_serialization=kind != "old format")
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match="pytorch_model.bin is not read.*save_pretrained"):
        open_folder(folder)
    assert not marker.exists()
