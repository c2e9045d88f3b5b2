"""A whole method from outside: trained, resumed, evaluated, shown and exported by its name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from jaxtrain.methods.reopen import open_trained
from jaxtrain.runs.manifest import read_manifest

METHOD = Path(__file__).parent / "toy_method.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("method") / "config.toml"
    teacher = MODEL.replace("[model", "[task.teacher").partition("[parallel]")[0]
    teacher = teacher.replace("num_hidden_layers = 1", "num_hidden_layers = 3")
    path.write_text(
        f"""{MODEL}
[run]
max_steps = 6
[data]
sequence_len = 32
micro_batch_size = 4
datasets = [{{ path = "40" }}]
eval_datasets = [{{ path = "8" }}]
[optim]
learning_rate = 1e-2
[eval]
every = 3
[checkpoint]
every = 3
[task]
kind = "{METHOD}"
{teacher}"""
    )
    return path


def read(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}, [
        line for line in lines if "eval/apart" in line
    ]


@pytest.fixture(scope="module")
def run(config):
    folder = config.parent / "run"
    assert main(["--config", str(config), f"run.output_dir={folder}"]) == 0
    return folder


@pytest.mark.slow
def test_it_trains_with_its_own_rows_loss_and_preparation(run):
    steps, evaluations = read(run)
    assert steps[6]["loss"] < steps[1]["loss"]
    assert all(line["moved"] > 0 for line in steps.values())
    assert [line["step"] for line in evaluations] == [3, 6]
    last = evaluations[-1]
    # The loss's components, each divided by its own denominator, and the method's own number.
    assert last["eval/loss"] == pytest.approx(last["eval/nll"] + 0.5 * last["eval/pull"])
    assert last["eval/apart"] > 0


@pytest.mark.slow
def test_only_the_student_is_saved_and_a_resumed_run_is_the_same(config, run, tmp_path):
    saved = read_manifest(run / "checkpoints" / "3")["arrays"]
    assert not [name for name in saved if "teacher" in name]
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    assert main(["--config", str(config), f"run.output_dir={folder}"]) == 0
    assert {**read(folder)[0][6], "time": 0}["loss"] == read(run)[0][6]["loss"]
    actual_values, full = (
        open_trained(str(position), []).snapshot.params() for position in (folder, run)
    )
    for path, value in full.items():
        np.testing.assert_array_equal(actual_values[path], value)


@pytest.mark.slow
def test_it_is_exported_and_evaluated_its_own_way(run, tmp_path, capsys):
    assert json.loads((run / "model" / "followed.json").read_text())["layers"] == [0, 1]
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "followed.json").exists()
    assert main(["eval", str(run)]) == 0
    printed = capsys.readouterr().out
    number = next(line.split()[1] for line in printed.splitlines() if "eval/apart" in line)
    assert float(number) == pytest.approx(read(run)[1][-1]["eval/apart"], rel=1e-4)


def test_its_data_are_shown(config, capsys):
    assert main(["--config", str(config), "--dry-run"]) == 0
    assert main(["preprocess", "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "40 rows that count" in printed and "other models, GiB" in printed


def test_mistakes_in_its_section_are_told_as_anywhere(config):
    for key, message in [
        ("task.layer=3", "task.layer: unknown key 'layer'; did you mean 'layers'"),
        ("task.pull=0", "teach nothing"),
        ("task.teacher.path=7", "task.teacher.path: input should be a valid string"),
    ]:
        with pytest.raises(UserError, match=message):
            load_config(config, [key])
    with pytest.raises(UserError, match="task.teacher: the model has 16 tokens"):
        make_task(load_config(config, ["task.teacher.architecture.vocab_size=16"]))
