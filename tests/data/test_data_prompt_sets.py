"""The benchmarks: words, draw and columns, on rows made by hand and on real files."""

import json
import os
from pathlib import Path
from typing import get_args

import pytest

from jaxtrain.config import EvalSetConfig, validate_config
from jaxtrain.config.evals import Benchmark
from jaxtrain.data.sources.prompt_sets import SETS, open_prompt_set, read_turns, sample
from jaxtrain.errors import UserError
from jaxtrain.generation.evaluation.problem_sets import read_problems

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXTRAIN_TEST_DATA", ROOT.parent / "shared" / "data"))
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
ASKED = (
    "You are an expert Python programmer. You will be given a question (problem specification) and"
    " will generate a correct Python program that matches the specification and passes all tests."
    " You will NOT return anything except for the program\n\n### Question:\nAdd.\n\n### Format: "
)
ANSWER = "\n```\n\n### Answer: (use the provided format with backticks)"


@pytest.mark.parametrize(
    "name, row, turns",
    [
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, ["1 + 1?" + BOXED]),
        ("math500", {"problem": "{x}", "answer": "x"}, ["{x}" + BOXED]),
        ("aime24", {"problem": "p"}, ["p" + BOXED]),
        ("aime25", {"problem": "p"}, ["p" + BOXED]),
        (
            "humaneval",
            {"prompt": "def f():\n"},
            [
                "Write a solution to the following problem and make sure that it passes the tests:"
                "\n```python\ndef f():\n\n```"
            ],
        ),
        ("mbpp", {"prompt": "Write a function."}, ["Write a function."]),
        (
            "livecodebench",
            {"question_content": "Add.", "starter_code": "class A:"},
            [f"{ASKED}Use the following code structure:\n```python\nclass A:{ANSWER}"],
        ),
        (
            "livecodebench",
            {"question_content": "Add.", "starter_code": ""},
            [
                f"{ASKED}Write your code in the following format:\n```python\n"
                f"# YOUR CODE HERE{ANSWER}"
            ],
        ),
        (
            "swe-bench",
            {"problem_statement": "It breaks."},
            ["Problem Statement:\nIt breaks.\nPlease fix the issue described above."],
        ),
        ("mt-bench", {"turns": ["one", "two"]}, ["one", "two"]),
        ("mt-bench", {"prompt": ["one", "two"], "reference": []}, ["one", "two"]),
        ("alpaca", {"instruction": "Add", "input": "1, 1"}, ["Add\n\nInput:\n1, 1"]),
        ("alpaca", {"instruction": "Add", "input": ""}, ["Add"]),
    ],
)
def test_the_words_of_each_set(name, row, turns):
    assert read_turns(name, row, "row 1") == tuple(turns)


def test_every_set_can_be_named_in_a_config():
    assert tuple(SETS) == get_args(Benchmark)
    assert {name: entry.size for name, entry in SETS.items() if entry.size != 128} == {
        "aime24": 30,
        "aime25": 30,
        "amc23": 40,
        "humaneval": 164,
        "mt-bench": 80,
    }


@pytest.mark.parametrize("total, most", [(1319, 128), (129, 128), (128, 128), (3, 128), (10, 4)])
def test_the_draw_is_that_of_datasets(total, most):
    from datasets import Dataset

    rows = Dataset.from_dict({"n": range(total)})
    if total > most:
        rows = rows.shuffle(seed=0).select(range(most))
    assert sample(total, most) == list(rows["n"])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_files(tmp_path):
    file = write(tmp_path / "gsm8k.jsonl", [{"question": f"{i}?", "id": i} for i in range(200)])
    prompt_set = open_prompt_set(f"gsm8k={file}")
    order = sample(200, 128)
    assert [row["id"] for row in prompt_set.rows] == order
    assert prompt_set.turns[3] == (f"{order[3]}?{BOXED}",)
    assert prompt_set.origins[3] == f"gsm8k.jsonl line {order[3] + 1}"
    assert open_prompt_set(f"gsm8k={file}", most=2).turns == prompt_set.turns[:2]
    # Files of a folder are read in their order, though "test2" does not carry the split's name.
    folder = tmp_path / "lcb"
    folder.mkdir()
    for part in ("", "2"):
        write(folder / f"test{part}.jsonl", [{"question_content": f"q{part}"}])
    (first,), (second,) = open_prompt_set(f"livecodebench={folder}").turns
    assert "Question:\nq\n" in first and "Question:\nq2\n" in second
    talks = write(tmp_path / "talks.jsonl", [{"turns": ["a", "b"]}])
    assert open_prompt_set(f"mt-bench={talks}").turns == [("a",)]
    assert open_prompt_set(f"mt-bench={talks}", all_turns=True).turns == [("a", "b")]


def test_what_is_missing_is_named(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"question": "q", "id": 1}])
    for provided, words in [
        ("gsm9k", r"no prompt set 'gsm9k': there are gsm8k, math500, .*, alpaca; with a file"),
        (f"math500={file}", r"math500: rows.jsonl line 1 has no column 'problem'; its columns"),
        (f"math500={file}", r"'question', 'id'.*https://huggingface.co/datasets/HuggingFaceH4/MA"),
        ("gsm8k=no.jsonl", r"no such file.*key gsm8k=PATH.*split test of its subset main of http"),
        ("livecodebench", r"cannot be read from the Hub; download .*files test\*.jsonl.*=PATH"),
        ("aime24", r"cannot be reached.*aime24=PATH.*split train of https://.*/aime_2024"),
    ]:
        with pytest.raises(UserError, match=words):
            open_prompt_set(provided)
    for name, row in [
        ("gsm8k", {"question": None}),
        ("mbpp", {"prompt": 3}),
        ("mt-bench", {"turns": [1]}),
        ("mt-bench", {"turns": []}),
        ("humaneval", {"prompt": ["x"]}),
        ("alpaca", {"instruction": "x", "input": 3}),
    ]:
        with pytest.raises(UserError, match=f"{name}: row 7.* text"):
            read_turns(name, row, "row 7")


def test_a_set_of_problems_may_be_a_benchmark(tmp_path):
    rows = [{"problem": f"p{i}", "solution": "s", "prompt": "?"} for i in range(40)]
    eval_set_config = EvalSetConfig(
        path=str(write(tmp_path / "aime.jsonl", rows)),
        benchmark="aime24",
        fields={"answer": "solution"},
    )
    problems = read_problems(0, eval_set_config)
    assert [row["prompt"] for row in problems] == [f"p{i}{BOXED}" for i in range(40)]
    assert problems[0]["answer"] == "s"
    drawn = read_problems(0, eval_set_config.model_copy(update={"max_rows": 5}))
    assert [row["prompt"] for row in drawn] == [f"p{i}{BOXED}" for i in sample(40, 5)]
    with pytest.raises(UserError, match="eval.sets.0.path"):
        read_problems(0, eval_set_config.model_copy(update={"path": "no.jsonl"}))
    base = {"run": {"max_steps": 1}, "model": {"path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    sets = [{"path": "a", "benchmark": "mbpp", "split": "train"}]
    with pytest.raises(UserError, match="eval.sets.0.split has no effect while eval.sets.0.bench"):
        validate_config({**base, "eval": {"sets": sets}, "rewards": [{"function": "math"}]}, "test")


@pytest.mark.parametrize(
    "name, file, rows, begins",
    [
        ("gsm8k", "gsm8k_test.jsonl", 128, None),
        ("math500", "math500_test.jsonl", 128, None),
        ("mt-bench", "mt_bench_questions.jsonl", 80, "Compose an engaging travel blog post"),
    ],
)
def test_real_files(name, file, rows, begins):
    if not (DATA / file).exists():
        pytest.skip(f"no {DATA / file}; JAXTRAIN_TEST_DATA names the folder")
    prompt_set = open_prompt_set(f"{name}={DATA / file}", all_turns=True)
    assert len(prompt_set.turns) == len({turns[0] for turns in prompt_set.turns}) == rows
    assert prompt_set.turns[0][0].startswith(begins or "")
    assert {len(turns) for turns in prompt_set.turns} == ({2} if name == "mt-bench" else {1})
