"""Reward models from the command line: trained, evaluated, exported, and rows scored with them."""

import json
import random

import numpy as np
import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.comparisons.stepwise import StepwiseReader
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.sample import Dropped
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from tests.docs.metric_names import require_rows

COMMON = f"""{MODEL}
[run]
max_steps = 40
[log]
plot = false
[optim]
learning_rate = 1e-2
[eval]
every = 40
at_start = true
"""
PAIRS = """
[data]
sequence_len = 48
micro_batch_size = 4
[task]
kind = "reward_model"
center_rewards_coefficient = 0.01
"""
STEPS = """
[data]
sequence_len = 48
micro_batch_size = 4
[task]
kind = "reward_model"
labels = "steps"
"""


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_pair(rng):
    """Better is what names the number."""
    number, second = rng.sample(range(10, 99), 2)
    return {"prompt": f"say {number}:", "chosen": f" yes {number}", "rejected": f" no {second}"}


def make_steps(rng):
    """A step is right where it says so."""
    labels = [rng.random() < 0.5 for _ in range(3)]
    words = {True: "good", False: "bad"}
    return {
        "prompt": f"sum {rng.randint(0, 9)}\n",
        "completions": [f"{words[label]} {rng.randint(0, 9)}" for label in labels],
        "labels": labels,
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(folder with the data, its run)."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    long = {"prompt": "long " * 40, "chosen": "a", "rejected": "b"}
    write(folder / "train.jsonl", [long, *(make_pair(rng) for _ in range(64))])
    write(folder / "test.jsonl", [make_pair(rng) for _ in range(16)])
    (folder / "config.toml").write_text(COMMON + PAIRS)
    assert main(arguments(folder, "run")) == 0
    return folder, folder / "run"


def arguments(folder, name, *extra):
    return [
        *("--config", str(folder / "config.toml"), f"run.output_dir={folder / name}"),
        f"data.datasets.0.path={folder / 'train.jsonl'}",
        f"data.eval_datasets.0.path={folder / 'test.jsonl'}",
        *extra,
    ]


@pytest.mark.slow
def test_held_out_accuracy_rises_and_what_is_dropped_is_counted(pairs):
    _, run = pairs
    require_rows(run)
    lines = read(run / "metrics.jsonl")
    first, *_, last = (line for line in lines if "eval/accuracy" in line)
    assert first["eval/loss"] == pytest.approx(np.log(2), abs=0.1)
    assert last["eval/accuracy"] >= 0.9 and last["eval/accuracy"] > first["eval/accuracy"]
    step = next(line for line in lines if "min_reward" in line)
    assert step["num_pairs"] > 4
    assert step["min_reward"] < step["mean_reward"] < step["max_reward"]
    assert max(line.get("data/dropped/prompt_too_long", 0) for line in lines) >= 1


@pytest.mark.slow
def test_score_writes_what_the_exported_model_says_and_keeps_files(pairs, tmp_path, capsys):
    folder, run = pairs
    rows = [
        make_pair(random.Random(5)),
        {"prompt": "say 12:", "completions": [" yes 12", " no 3", " yes 12 or so"]},
        {"prompt": "say 12:", "completion": " yes 12"},
        {"prompt": "say 12:"},
    ]
    data, output = write(tmp_path / "rows.jsonl", rows), tmp_path / "scores.jsonl"
    assert main(["score", str(run), str(data), "--output", str(output)]) == 0
    assert "3 rows in" in capsys.readouterr().out
    pair, several, entry = read(output)
    assert pair["score_chosen"] > pair["score_rejected"] and pair["chosen"] == rows[0]["chosen"]
    assert len(several["scores"]) == 3 and several["scores"][0] > several["scores"][1]
    # Shared prompts, rows and files change nothing but the order of float32 sums.
    assert entry["score"] == pytest.approx(several["scores"][0], abs=1e-5)
    exported = ["score", str(run / "model"), str(data), "--output"]
    assert main([*exported, str(tmp_path / "again.jsonl"), "--batch-size", "1"]) == 0
    again = read(tmp_path / "again.jsonl")
    assert again[0]["score_chosen"] == pytest.approx(pair["score_chosen"], abs=1e-5)

    before = output.read_text()
    assert main([*exported, str(output)]) == 2
    assert main(["score", str(run), str(output), "--output", str(tmp_path / "x.jsonl")]) == 2
    printed = capsys.readouterr().err
    assert "--overwrite" in printed and "--prefix" in printed
    assert output.read_text() == before and not (tmp_path / "x.jsonl").exists()
    assert main(["generate", str(run / "model"), "--prompt", "hi"]) == 2
    assert "reward model" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_on_a_reward_model_goes_on_from_its_head(pairs):
    folder, run = pairs
    extra = [
        f"model.path={run / 'model'}",
        "adapter.kind=lora",
        "adapter.rank=4",
        "run.max_steps=2",
    ]
    config = (folder / "config.toml").read_text()
    start, end = config.index("[model.architecture]"), config.index("[parallel]")
    (folder / "config.toml").write_text(config[:start] + config[end:])
    assert main(arguments(folder, "lora", *extra)) == 0
    first = next(
        line for line in read(folder / "lora" / "metrics.jsonl") if "eval/accuracy" in line
    )
    assert first["eval/accuracy"] >= 0.9
    described = json.loads((folder / "lora" / "model" / "adapter_config.json").read_text())
    assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
    scored = [folder / "a.jsonl", folder / "b.jsonl"]
    for source, output in zip((folder / "lora", folder / "lora" / "model"), scored, strict=True):
        argv = ["score", str(source), str(folder / "test.jsonl"), "--output", str(output)]
        assert main(argv) == 0
    for entry, second in zip(*map(read, scored), strict=True):
        assert entry["score_chosen"] == pytest.approx(second["score_chosen"], abs=1e-5)


@pytest.mark.slow
def test_steps_train_and_are_scored(tmp_path):
    rng = random.Random(1)
    write(tmp_path / "train.jsonl", [make_steps(rng) for _ in range(64)])
    test = write(tmp_path / "test.jsonl", [make_steps(rng) for _ in range(16)])
    (tmp_path / "config.toml").write_text(COMMON + STEPS)
    assert main(arguments(tmp_path, "run")) == 0
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert [line for line in lines if "eval/accuracy" in line][-1]["eval/accuracy"] > 0.9
    output = tmp_path / "scores.jsonl"
    assert main(["score", str(tmp_path / "run" / "model"), str(test), "--output", str(output)]) == 0
    pairs = [
        pair for row in read(output) for pair in zip(row["step_scores"], row["labels"], strict=True)
    ]
    assert np.mean([(score > 0.5) == label for score, label in pairs]) > 0.9


@pytest.fixture(scope="module")
def steps_config(tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "config.toml"
    path.write_text(COMMON + STEPS + "\n[[data.datasets]]\npath = 'x.jsonl'\n")
    return lambda *extra: load_config(str(path), ["eval.every=null", "eval.at_start=false", *extra])


ROW = {"prompt": "2+2+3?", "completions": ["2+2=4", "4+3=8", "so 8"], "labels": [True, False, 0]}


@pytest.mark.parametrize(
    ("last_only", "max_completion", "expected"),
    [(False, None, [1, 0, 0]), (True, None, [0]), (False, 9, [1]), (True, 9, "no trained token")],
)
def test_labels_stand_on_the_last_token_of_separators(
    steps_config, last_only, max_completion, expected
):
    config, tokenizer = steps_config(), load_tokenizer("builtin")
    (dataset,), data = config.data.datasets, config.data
    read = StepwiseReader(dataset, tokenizer, data, "\n##", last_only, max_completion)
    (tree,) = read({"question" if k == "prompt" else k: v for k, v in ROW.items()}, "row 0")
    if isinstance(expected, str):
        assert isinstance(tree, Dropped) and tree.reason == expected
        return
    fields = make_task(config).data.fields
    batch = build_batch([[lay_out(tree, "branch")]], 48, fields)
    places = np.flatnonzero(batch.weights["step"][0])
    assert batch.streams["label"][0, places].tolist() == expected
    text = [tokenizer.decode(batch.tokens[0, : position + 1]) for position in places]
    assert all(entry.endswith("\n##") for entry in text)
    assert text[0].count("\n##") == (3 if last_only else 1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"labels": [True, False, -1]}, "a label is -1"),
        ({"labels": [True]}, "a label for each"),
        ({"completions": "one"}, "a list of steps"),
        ({"prompt": None}, "prompt is missing"),
    ],
)
def test_rows_of_steps_that_cannot_be_read_are_dropped(steps_config, row, reason):
    config = steps_config()
    read = StepwiseReader(config.data.datasets[0], load_tokenizer("builtin"), config.data, "\n")
    (dropped,) = read({**ROW, **row}, "row 0")
    assert reason in dropped.reason


@pytest.mark.parametrize(
    ("override", "output"),
    [
        ("task.center_rewards_coefficient=0.1", "task.labels"),
        ("task.step_separator=", "task.step_separator is empty"),
        ("task.labels=pairs data.too_long=truncate", "where it is scored"),
    ],
)
def test_keys_without_meaning_are_refused(steps_config, override, output):
    with pytest.raises(UserError, match=output):
        steps_config(*override.split())
