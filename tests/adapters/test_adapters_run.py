"""From the command line: train with LoRA, resume, evaluate, export, merge, generate."""

import json
import re
import shutil

import numpy as np
import pytest

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main
from jaxtrain.models import build, families, saving

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
CONFIG = """
[run]
max_steps = 3

[model]
path = "BASE"
tokenizer = "builtin"
compute_dtype = "float32"

[adapter]
kind = "lora"
rank = 4
alpha = 16
rank_pattern = { mlp = 2 }

[data]
sequence_len = 256
micro_batch_size = 1

[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 200 }

[[data.eval_datasets]]
path = "builtin:calculator"
split = "test"
options = { num_rows = 20 }

[optim]
learning_rate = 3e-2

[eval]
at_start = true

[sampling]
max_new_tokens = 4
"""


def run(*words) -> int:
    return main([str(word) for word in words])


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder, key="loss"):
    return [line[key] for line in read_metrics(folder) if key in line]


def shown_loss(capsys):
    return float(re.search(r"loss ([\d.]+)", capsys.readouterr().out)[1])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    config = families.config_from_hf(ARCHITECTURE)
    saving.save(build.init(config, seed=0), config, folder)
    return folder


@pytest.fixture(scope="module")
def config(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "lora.toml"
    path.write_text(CONFIG.replace("BASE", str(base)))
    return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    assert run("--config", config, f"run.output_dir={folder}") == 0
    return folder


def test_only_the_adapter_is_trained_and_saved(base, trained):
    first, last = losses(trained, "eval/loss")[0], losses(trained, "eval/loss")[-1]
    assert last < first - 0.05
    (checkpoint,) = (trained / "checkpoints").glob("[0-9]*")
    arrays = json.loads((checkpoint / "manifest.json").read_text())["arrays"]
    weights = [name for name in arrays if "stack" in name or "embed" in name]
    assert weights and all(".adapter." in name for name in weights)
    assert "of 0.0" in (trained / "log.txt").read_text(), "trained of all parameters"


@pytest.mark.slow
def test_resuming_repeats_the_uninterrupted_run(config, trained, tmp_path):
    folder = f"run.output_dir={tmp_path / 'two'}"
    constant = "optim.lr_scheduler=constant"
    assert run("--config", config, folder, constant, "run.max_steps=2", "run.export=false") == 0
    assert run("--config", config, folder, constant) == 0
    full = f"run.output_dir={tmp_path / 'whole'}"
    assert run("--config", config, full, constant, "run.export=false") == 0
    assert losses(tmp_path / "two") == losses(tmp_path / "whole")


def test_export_merge_and_eval_give_the_same_loss(config, base, trained, tmp_path, capsys):
    last = losses(trained, "eval/loss")[-1]
    assert run("eval", trained) == 0
    assert shown_loss(capsys) == pytest.approx(last, rel=1e-5)

    assert run("export", trained, "--output", tmp_path / "adapter") == 0
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    again = ["--config", config, "adapter.rank=16", "adapter.alpha=32", "adapter.rank_pattern={}"]
    assert run("eval", *again, f"adapter.path={tmp_path / 'adapter'}") == 0
    assert shown_loss(capsys) == pytest.approx(last, rel=1e-5)

    assert run("merge", trained, "--output", tmp_path / "merged") == 0
    assert "14 tensors of" in capsys.readouterr().out
    plain = ["--config", config, "adapter.kind=none", "adapter.rank=16", "adapter.alpha=32"]
    plain += ["adapter.rank_pattern={}", f"model.path={tmp_path / 'merged'}"]
    assert run("eval", *plain) == 0
    # Six digits are shown; the merged weights are rounded to float32 once more.
    assert shown_loss(capsys) == pytest.approx(last, rel=1e-5)

    assert run("merge", tmp_path / "adapter", "--output", tmp_path / "merged2") == 0
    entry, two = SafetensorsFolder(tmp_path / "merged"), SafetensorsFolder(tmp_path / "merged2")
    assert set(entry.tensors) == set(two.tensors) == set(SafetensorsFolder(base).tensors)
    for name, stored in entry.tensors.items():
        everything = tuple(slice(0, size) for size in stored.shape)
        np.testing.assert_array_equal(entry.fetch(name, everything), two.fetch(name, everything))
    # Answers end as the adapter's own template ends them, whatever the base's files say.
    end = load_tokenizer(str(tmp_path / "adapter")).convert_tokens_to_ids("<|im_end|>")
    for folder in ("merged", "merged2"):
        payload = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert end in payload["eos_token_id"]


def test_merge_overwrites_neither_base_nor_adapter(trained, base, tmp_path, monkeypatch, capsys):
    local_copy = tmp_path / "base"
    shutil.copytree(base, local_copy)
    assert run("export", trained, "--output", tmp_path / "adapter") == 0
    (tmp_path / "link").symlink_to(local_copy)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    monkeypatch.chdir(tmp_path)
    for output in (local_copy, "base/", "link", "link/../base", tmp_path / "adapter", trained, "."):
        for source in (tmp_path / "adapter", trained):
            assert run("merge", source, "--base", local_copy, "--output", output) == 2, output
            assert "is there already and holds" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert run("merge", trained) == run("merge", trained) == 0


@pytest.mark.slow
def test_generate_with_a_run_and_with_its_export(trained, capsys):
    answers = []
    for name in (trained, trained / "model"):
        words = ["model.tokenizer=builtin", "sampling.max_new_tokens=4"]
        assert run("generate", name, *words, "--prompt", "What is 1 + 1?") == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and ">>> What is 1 + 1?" in answers[0]


@pytest.mark.slow
def test_dry_run_counts_what_is_trained(config, tmp_path, capsys):
    assert run("--config", config, "--dry-run", f"run.output_dir={tmp_path / 'no'}") == 0
    shown = capsys.readouterr().out
    assert "of these trained" in shown and "2,944" in shown


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["adapter.target=qproj"], "names no Linear"),
        (["adapter.kind=none"], "adapter.rank has no effect"),
        (["adapter.lora_r=8"], "here it is adapter.rank"),
        (["adapter.lora_target_linear=true"], "adapter.target"),
        (["adapter.path=nowhere"], "adapter_config.json does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_cost_one_message(config, tmp_path, capsys, overrides, expected):
    assert run("--config", config, f"run.output_dir={tmp_path / 'run'}", *overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error, error


def test_merge_refuses_what_is_no_adapter(base, tmp_path, capsys):
    assert run("merge", base, "--output", tmp_path / "out") == 2
    assert "neither a run with an adapter nor a PEFT folder" in capsys.readouterr().err


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "family"),
    [("nf4", {}), pytest.param("nf4_fused", EXPERTS, marks=pytest.mark.thorough)],
    ids=["nf4", "fused"],
)
def test_a_run_beside_nf4_weights(kind, family, config, base, tmp_path, capsys):
    wide = tmp_path / "wide"
    raw = {**ARCHITECTURE, "hidden_size": 64, "num_attention_heads": 4, **family}
    architecture = families.config_from_hf(raw)
    saving.save(build.init(architecture, seed=0), architecture, wide)
    folder = tmp_path / "run"
    words = [f"run.output_dir={folder}", f"model.path={wide}", f"adapter.quantize={kind}"]
    assert run("--config", config, *words) == 0
    last = losses(folder, "eval/loss")[-1]
    capsys.readouterr()
    assert run("eval", folder) == 0
    assert shown_loss(capsys) == pytest.approx(last, rel=1e-5)
    assert run("merge", folder) == 0
    plain = ["--config", config, "adapter.kind=none", "adapter.rank=16", "adapter.alpha=32"]
    plain += ["adapter.rank_pattern={}", f"model.path={folder / 'merged'}"]
    capsys.readouterr()
    assert run("eval", *plain) == 0
    assert shown_loss(capsys) == pytest.approx(last, rel=1e-5)
