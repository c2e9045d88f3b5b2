"""GGUF files: what is written reads back within the format's error, and transformers' reader
agrees; tokenizers give the same tokens."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy_run

from jaxtrain.core.architecture import find_folder
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.huggingface.tokenizer import PROBES
from jaxtrain.main import main
from jaxtrain.models import build, families, saving

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
from jaxtrain.huggingface import gguf_quants as quants  # noqa: E402
from jaxtrain.models import gguf as gguf_models  # noqa: E402

ERRORS = {"f16": 1e-3, "bf16": 4e-3, "q8_0": 7e-3, "q4_0": 0.11, "q4_k": 0.09}
"""Root mean square of the error of normal numbers, as a part of theirs. q8_0: steps of the largest
of 32 numbers (about 2.1 deviations) / 127, so 2.1 / 127 / sqrt(12) = 0.005; q4_0: / 8: 0.08; q4_k:
within 15 steps of a group's range, 0.07."""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "LlamaForCausalLM": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 5e5,
    },
    "MistralForCausalLM": {"sliding_window": None},
    "Qwen2ForCausalLM": {"head_dim": None, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"tie_word_embeddings": False},
    "Qwen3MoeForCausalLM": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 64},
    "Gemma3ForCausalLM": {"query_pre_attn_scalar": 64},
    "Phi3ForCausalLM": {"head_dim": None, "pad_token_id": 0},
    "SmolLM3ForCausalLM": {"pad_token_id": 0},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_models, "HF_HOME", str(tmp_path / "cache"))


def make(folder, architecture, seed=0):
    model_type = families.find_family(architecture).Config.model_type
    raw = {"architectures": [architecture], "model_type": model_type, **SIZES}
    config = families.config_from_hf(raw | FAMILIES[architecture])
    saving.save(build.init(config, seed), config, folder)
    load_tokenizer("builtin").save_pretrained(folder)
    return config


def perturb(folder, seed):
    """Add noise to vectors, which are all ones or zeros in a new model."""
    from safetensors.numpy import load_file, save_file

    rng = np.random.default_rng(seed)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, array in tensors.items():
            if array.ndim == 1:
                tensors[name] = array + rng.normal(0, 0.2, array.shape).astype(array.dtype)
        save_file(tensors, path, metadata={"format": "pt"})


def read(folder, name):
    files = open_folder(folder)
    return np.asarray(files.fetch(name, full_index(files.tensors[name].shape)), np.float32)


TIERS = {
    "Qwen2ForCausalLM": pytest.mark.slow,
    "Qwen3ForCausalLM": pytest.mark.slow,
    "Qwen3MoeForCausalLM": pytest.mark.slow,
    "Gemma3ForCausalLM": pytest.mark.slow,
    "Gemma2ForCausalLM": pytest.mark.thorough,
    "MistralForCausalLM": pytest.mark.thorough,
    "Phi3ForCausalLM": pytest.mark.thorough,
    "SmolLM3ForCausalLM": pytest.mark.thorough,
}


@pytest.mark.parametrize(
    "architecture", [pytest.param(n, marks=TIERS.get(n, ())) for n in FAMILIES]
)
def test_written_and_read_back(tmp_path, architecture):
    config = make(tmp_path / "model", architecture)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    gguf_models.export_gguf(tmp_path / "model", tmp_path / "model.gguf", "q8_0", tokenizer)
    folder = find_folder(str(tmp_path / "model.gguf"), weights=True)
    again = families.read_config(folder)
    assert again.num_hidden_layers == 2 and again.tie_word_embeddings == config.tie_word_embeddings
    expected, actual = config.encodings(), again.encodings()
    for name in expected:
        np.testing.assert_allclose(actual[name][0], expected[name][0], rtol=1e-6)
    names = open_folder(tmp_path / "model").tensors
    assert names.keys() == open_folder(folder).tensors.keys()
    for name in names:
        want, got = read(tmp_path / "model", name), read(folder, name)
        exact = want.ndim == 1 or name.endswith("mlp.gate.weight")
        error = np.sqrt(np.square(got - want).mean()) / max(want.std(), 1e-6)
        # Norms are float32, around 1 in Gemma's files: half a unit of the last place of 1.
        assert np.abs(got - want).max() <= 6e-8 if exact else error < ERRORS["q8_0"], name
    restored = load_tokenizer(str(folder))
    for text in PROBES:
        assert restored(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert restored.chat_template == tokenizer.chat_template
    assert restored.eos_token == tokenizer.eos_token


@pytest.mark.parametrize("kind", [pytest.param("f16", marks=pytest.mark.slow), *list(ERRORS)[1:]])
def test_types_stay_within_their_error(tmp_path, kind):
    make(tmp_path / "model", "Qwen3ForCausalLM")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    gguf_models.export_gguf(tmp_path / "model", tmp_path / "model.gguf", kind, tokenizer)
    folder = find_folder(str(tmp_path), weights=True)  # a folder with the one file
    name = "model.layers.1.mlp.up_proj.weight"
    want, got = read(tmp_path / "model", name), read(folder, name)
    assert np.sqrt(np.square(got - want).mean()) < ERRORS[kind] * want.std()
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert types["blk.1.ffn_up.weight"] == kind.upper()
    assert types["blk.1.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.slow)],
)
def test_transformers_reads_the_same_weights(tmp_path, architecture):
    """Its reader of GGUF is independent of ours."""
    pytest.importorskip("torch", reason="transformers reads GGUF with torch")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    make(tmp_path / "model", architecture)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    path = tmp_path / "model.gguf"
    gguf_models.export_gguf(tmp_path / "model", path, "f16", tokenizer)
    loaded = load_gguf_checkpoint(str(path), return_tensors=False)
    assert loaded["config"]["hidden_size"] == 256 and loaded["config"]["num_hidden_layers"] == 2
    reader = gguf.GGUFReader(path)
    q = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight").data
    want = read(tmp_path / "model", "model.layers.0.self_attn.q_proj.weight")
    if architecture == "LlamaForCausalLM":  # rotated pairs lie side by side
        want = want.reshape(4, 2, 32, 256).swapaxes(1, 2).reshape(256, 256)
    np.testing.assert_allclose(q.astype(np.float32), want, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_llama_cpp_computes_the_same_logits(tmp_path, architecture):
    """A file in float16 beside the folder in float32. llama.cpp rounds activations, too; keys and
    values are float32."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python, a build of llama.cpp, is not installed"
    )
    from jaxtrain.api import Model

    make(tmp_path / "model", architecture)
    perturb(tmp_path / "model", 1)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    gguf_models.export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16", tokenizer)
    exact = {"type_k": 0, "type_v": 0, "flash_attn": False, "swa_full": False}
    options = {"n_ctx": 64, "logits_all": True, "n_threads": 1, "verbose": False}
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), **options, **exact)
    tokens = np.random.default_rng(2).integers(0, 512, 48)
    llama.eval(tokens.tolist())
    (expected,) = Model(tmp_path / "model").logits([tokens])
    error = np.abs(llama.scores[:48] - expected).max() / expected.std()
    assert error < 1e-2, error  # half of it was seen
    for text in PROBES:
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        # llama.cpp composes no characters, as the normalizer of Qwen2's tokenizers does.
        if architecture != "Qwen2ForCausalLM" or text.isascii():
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_an_adapter_names_a_base_that_peft_opens(tmp_path):
    make(tmp_path / "model", "Qwen3ForCausalLM")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    gguf_models.export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16", tokenizer)
    (tmp_path / "config.toml").write_text(
        f"""
        run = {{ output_dir = "{tmp_path / "run"}", max_steps = 1 }}
        model = {{ path = "{tmp_path / "model.gguf"}", compute_dtype = "float32" }}
        adapter = {{ kind = "lora", rank = 2 }}
        [data]
        sequence_len = 128
        micro_batch_size = 1
        datasets = [{{ path = "builtin:calculator", options = {{ num_rows = 20 }} }}]
        """
    )
    assert main(["--config", str(tmp_path / "config.toml")]) == 0
    raw = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    base = Path(raw["base_model_name_or_path"])
    assert base.parent == tmp_path / "cache" / gguf_models.CACHE
    assert (base / "config.json").is_file()
    shutil.rmtree(base)
    with pytest.raises(UserError, match=r"generate FILE.gguf"):
        find_folder(str(base), weights=True)


@pytest.mark.slow
def test_a_run_by_the_command(tmp_path, capsys):
    """A run's checkpoint in RUN/model-q4_k.gguf, within the format's error; nothing overwritten."""
    sizes = ("vocab_size = 512", "hidden_size = 256", "intermediate_size = 256")
    model = toy_run.MODEL
    for line in sizes:
        key = line.partition(" =")[0]
        model = re.sub(rf"^{key} = \d+$", line, model, flags=re.M)
    run = tmp_path / "run"
    (tmp_path / "config.toml").write_text(
        f"""
        run = {{ output_dir = "{run}", max_steps = 1 }}
        {model}
        [data]
        sequence_len = 64
        micro_batch_size = 1
        datasets = [{{ path = "{tmp_path / "rows.jsonl"}" }}]
        """
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n' * 20)
    assert main(["--config", str(tmp_path / "config.toml")]) == 0
    assert main(["export", str(run), "--gguf", "q4_k"]) == 0
    file = run / "model-q4_k.gguf"
    assert f"{file}, " in capsys.readouterr().out
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["blk.0.ffn_up.weight"] == "Q4_K" and types["blk.0.attn_norm.weight"] == "F32"
    folder = find_folder(str(file), weights=True)
    name = "model.layers.0.mlp.up_proj.weight"
    want, got = read(run / "model", name), read(folder, name)
    assert np.sqrt(np.square(got - want).mean()) < ERRORS["q4_k"] * want.std()
    assert main(["export", str(run), "--gguf", "q4_k"]) == 2
    assert "exists; remove it" in capsys.readouterr().err
    assert main(["export", str(run), "--gguf", "q8_0", "--output", str(run / "x.bin")]) == 2
    assert "--output FILE.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_window_that_llama_cpp_ignores_limits_the_context(name):
    """Beyond the window its answers would differ: 3.7 deviations of the logits were seen."""
    family = next(entry for entry in gguf_models.FAMILIES if entry.name == name)
    raw = {"head_dim": 64, "vocab_size": 512, "rope_parameters": {"rope_theta": 1e4}}
    raw |= {"max_position_embeddings": 4096, "sliding_window": 2047}
    assert gguf_models.describe(raw, family, "f16")[f"{name}.context_length"] == 2047
    raw["sliding_window"] = None
    assert gguf_models.describe(raw, family, "f16")[f"{name}.context_length"] == 4096


def test_q4_k_of_odd_blocks():
    kind = gguf.GGMLQuantizationType.Q4_K
    for value in (0.0, 3.0, -3.0):
        block = np.full((1, 256), value, np.float32)
        decoded = gguf.quants.dequantize(quants.encode(block, quants.Q4_K), kind)
        np.testing.assert_allclose(decoded, block, rtol=1e-3)


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGUF", b"nonsense" * 10, b"GGUF\3\0\0\0" + b"\xff" * 16):
        path.write_bytes(content)
        with pytest.raises(UserError, match="no readable GGUF"):
            find_folder(str(path), weights=True)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(UserError, match="x.gguf is a pointer of Git LFS"):
        find_folder(str(path), weights=True)
    with pytest.raises(UserError, match="missing.gguf' is not a file here"):
        find_folder("folder/missing.gguf", weights=True)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "several").mkdir(exist_ok=True)
        (tmp_path / "several" / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"a.gguf, b.gguf"):
        find_folder(str(tmp_path / "several"), weights=True)


@pytest.mark.slow
def test_smollm2(tmp_path):
    """A real file; JAXTRAIN_TEST_GGUF names SmolLM2-135M-Instruct.Q4_1.gguf."""
    path = os.environ.get("JAXTRAIN_TEST_GGUF")
    if not path or not Path(path).is_file():
        pytest.skip("JAXTRAIN_TEST_GGUF does not name SmolLM2-135M-Instruct's GGUF file")
    from jaxtrain.api import Model

    question = "What is the capital of France? Answer in one sentence."
    model = Model(path)
    prompt = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    (answer,) = model.generate([prompt], temperature=0.0, max_new_tokens=16)
    assert "The capital of France is Paris." in model.tokenizer.decode(answer.tokens)
