"""Runs whose folder or base was copied, moved, made read-only, replaced or thinned out."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main
from tests.rights import read_only
from tests.toy_run import MODEL

CONFIG = f"""
[run]
max_steps = 2
{MODEL.replace("embeddings = 64", "embeddings = 256")}
[data]
sequence_len = 256
micro_batch_size = 1

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 60 }}

[[data.eval_datasets]]
path = "builtin:calculator"
split = "test"
options = {{ num_rows = 8 }}

[log]
plot = false
report = false

[sampling]
max_new_tokens = 4
"""
pytestmark = pytest.mark.slow
LORA = ("adapter.kind=lora", "adapter.rank=2", "optim.learning_rate=0.01")


def run(*words) -> int:
    return main([str(word) for word in words])


def list_files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but its lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    files = SafetensorsFolder(folder)
    return {
        name: files.fetch(name, (slice(None),) * len(stored.shape))
        for name, stored in files.tensors.items()
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with tiny.toml, base/model, and runs on it named by a relative path: full, lora."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tiny.toml").write_text(CONFIG)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run("--config", "tiny.toml", "run.output_dir=first") == 0
        shutil.move("first/model", "base")
        shutil.rmtree("first")
        start = ("--config", "tiny.toml", "model.path=base", "model.architecture=null")
        start += ("model.tokenizer=null",)
        assert run(*start, "run.output_dir=full") == 0
        assert run(*start, "run.output_dir=lora", *LORA) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def moved(made, tmp_path, monkeypatch):
    """A copy of all, in another folder, from which nothing is reached by a relative path."""
    shutil.copytree(made, tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "moved"
    for name in ("full", "lora"):  # as if it had been trained here
        for file in ("config.json", "base/base_of_run.json"):
            text = (folder / name / file).read_text()
            (folder / name / file).write_text(text.replace(str(made), str(folder)))
    return folder


def start(folder: Path, name: str, *words) -> int:
    """The command of a run in `folder`, with absolute paths."""
    lora = LORA if name == "lora" else ()
    base = ("model.architecture=null", "model.tokenizer=null", f"model.path={folder / 'base'}")
    config = ("--config", folder / "tiny.toml", f"run.output_dir={folder / name}")
    return run(*config, *base, *lora, *words)


def test_saved_paths_are_absolute(made):
    for name in ("full", "lora"):
        saved = json.loads((made / name / "config.json").read_text())
        assert saved["model"]["path"] == str(made / "base")
        assert saved["run"]["output_dir"] == str(made / name)
        assert saved["data"]["datasets"][0]["path"] == "builtin:calculator"
    adapter = json.loads((made / "lora/model/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(made / "base")


def test_a_run_is_exported_and_goes_on_without_its_base(moved, capsys):
    exported = read_tensors(moved / "full/model")
    (moved / "base").rename(moved / "away")
    shutil.rmtree(moved / "full/model")
    assert run("export", moved / "full") == 0
    for name, tensor in read_tensors(moved / "full/model").items():
        np.testing.assert_array_equal(tensor, exported[name])
    assert (moved / "full/model/tokenizer.json").exists()
    assert run("generate", moved / "full", "--prompt", "1 + 1?") == 0
    assert start(moved, "full", "run.max_steps=3") == 0
    # Of an adapter the base itself is needed, but not for its own folder.
    shutil.rmtree(moved / "lora/model")
    assert run("export", moved / "lora") == 0
    capsys.readouterr()
    for words in (("merge", moved / "lora"), ("generate", moved / "lora", "--prompt", "1")):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert str(moved / "base") in error and "Traceback" not in error
    place = f"model.path={moved / 'away'}"
    assert run("generate", moved / "lora", "--prompt", "1", place) == 0
    assert run("merge", moved / "lora", place) == 0
    assert run("merge", moved / "lora", "--base", moved / "away", "--output", moved / "m") == 0
    assert run("quantize", moved / "lora", "--scheme", "int8", place) == 0
    assert start(moved, "lora", "run.max_steps=3", place) == 0


def test_a_moved_run_writes_where_it_is(moved, tmp_path):
    (moved / "full").rename(tmp_path / "renamed")
    renamed = tmp_path / "renamed"
    assert run("--config", renamed / "config.json", "run.max_steps=3") == 0
    assert not (moved / "full").exists()
    assert (renamed / "checkpoints/3").is_dir()
    assert json.loads((renamed / "config.json").read_text())["run"]["output_dir"] == str(renamed)


def test_an_adapter_is_refused_over_other_weights(moved, capsys):
    (file,) = (moved / "base").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-64:] = bytes(64)
    file.write_bytes(content)
    before = list_files(moved / "lora")
    for words in (("generate", moved / "lora", "--prompt", "1"), ("merge", moved / "lora")):
        assert run(*words) == 2
        assert "holds other weights" in capsys.readouterr().err
    assert start(moved, "lora", "run.max_steps=3") == 2
    assert "has other weights now" in capsys.readouterr().err
    assert list_files(moved / "lora") == before
    # They are not read where all weights are trained.
    assert start(moved, "full", "run.max_steps=3") == 0


def test_a_refused_start_changes_nothing(moved, capsys):
    before = list_files(moved / "full")
    sink = moved / "sinks.py"
    sink.write_text(
        "class Bad:\n    def __init__(self, *a): pass\n"
        "    def start(self, *a): raise RuntimeError('no')\n"
    )
    mistakes = [
        (
            "run.max_steps=4",
            "data.datasets.0.options={num_rows=-3}",
            "run.allow_config_change=true",
        ),
        ("run.max_steps=4", f"log.sinks=['{sink}:Bad']"),
        ("run.max_steps=4", "model.tokenizer=/none", "run.allow_config_change=true"),
        ("run.max_steps=4", "adapter.kind=lora", "run.allow_config_change=true"),
        ("run.overwrite=true", f"log.sinks=['{sink}:Bad']"),
    ]
    for words in mistakes:
        assert start(moved, "full", *words) == 2, words
        assert capsys.readouterr().err.startswith("error: ")
        assert list_files(moved / "full") == before, words
    assert start(moved, "full", "run.overwrite=true", "run.max_steps=1") == 0
    assert sorted(path.name for path in (moved / "full/checkpoints").iterdir()) == ["1"]
    assert not [path for path in (moved / "full").iterdir() if path.name.startswith(".set")]


def test_lost_checkpoints_are_noticed(moved, capsys):
    shutil.rmtree(moved / "full/checkpoints")
    before = list_files(moved / "full")
    assert start(moved, "full") == 2
    assert "has saved checkpoints, but" in capsys.readouterr().err
    assert list_files(moved / "full") == before
    assert start(moved, "full", "run.overwrite=true", "run.max_steps=1") == 0


def test_a_read_only_run_is_used(moved, tmp_path, capsys):
    folder, outputs = moved / "full", tmp_path
    before = list_files(folder)
    sets = ("eval.sets.0.path=builtin:calculator", "eval.sets.0.options={num_rows=2}")
    sets += ("eval.sets.0.env.kind=calculator",)
    with read_only(folder):
        assert run("quantize", folder, "--scheme", "int8", "--output", outputs / "q") == 0
        assert run("eval", folder, *sets, "--output", outputs / "e") == 0
        assert run("export", folder, "--output", outputs / "x") == 0
        assert run("report", folder, "--output", outputs / "r.html") == 0
        assert run("generate", folder, "--prompt", "1 + 1?") == 0
        capsys.readouterr()
        writing = [("quantize", "--scheme", "int8"), ("eval", *sets), ("export",), ("report",)]
        for verb, *words in writing:
            assert run(verb, folder, *words) == 2
            error = capsys.readouterr().err
            assert "Permission denied" in error and "--output" in error
        assert start(moved, "full", "run.max_steps=3") == 2
        assert "full' cannot be used: Permission denied" in capsys.readouterr().err
        assert list_files(folder) == before


def test_eval_output_is_whole_and_elsewhere(moved, tmp_path, capsys):
    sets = ("eval.sets.0.path=builtin:calculator", "eval.sets.0.options={num_rows=2}")
    sets += ("eval.sets.0.env.kind=calculator",)
    place = tmp_path / "answers"
    for _ in range(2):
        assert run("eval", moved / "full", *sets, "--output", place) == 0
        assert {path.name for path in place.iterdir()} == {
            *("samples.jsonl", "metrics.jsonl", "results.csv", "run.json")
        }
        assert len((place / "samples.jsonl").read_text().splitlines()) == 2
    assert len((place / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (moved / "full/eval").exists()
    assert run("eval", moved / "full", *sets, "--output", moved / "lora") == 2
    assert "is a run's folder" in capsys.readouterr().err


def test_eval_without_data_reads_no_weights(moved, capsys, monkeypatch):
    monkeypatch.setattr("jaxtrain.methods.reopen.load_checkpoint", None)
    assert run("eval", moved / "full", "data.eval_datasets=[]") == 2
    assert "there is nothing to evaluate" in capsys.readouterr().err


def test_missing_folders_are_called_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    verbs = [
        ("eval",),
        ("generate", "--prompt", "1"),
        ("export", "--output", "x"),
        ("merge",),
        ("quantize", "--scheme", "int8", "--output", "x"),
        ("score", "rows.jsonl", "--output", "x"),
        ("plot",),
        ("report",),
        ("watch", "--once"),
    ]
    for verb, *words in verbs:
        for name in ("none", "./a/none", str(tmp_path / "none")):
            assert run(verb, name, *words) == 2
            error = capsys.readouterr().err
            assert str(tmp_path / name.removeprefix("./")) in error, (verb, name, error)
            assert any(text in error for text in ("does not exist", "is not a folder here")), error
