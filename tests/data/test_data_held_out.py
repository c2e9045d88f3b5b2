"""data.validation_split: which rows are held out, and that the two sides never meet."""

import json
import pickle

import pytest

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.load import load_config
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sides(path, share, **keys):
    data = DataConfig(datasets=[DatasetConfig(path=path, **keys)], validation_split=share)
    rows = [open_rows(entry) for entry in (data.datasets[0], data.eval_datasets[0])]
    return [[part[index] for index in range(len(part))] for part in rows]


def chat(question, answer):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (chat, {}),
        (lambda q, a: {"messages": json.dumps(chat(q, a)["messages"])}, {}),  # of a CSV file
        (lambda q, a: {"question": q, "completion": a}, {"fields": {"prompt": "question"}}),
        (lambda q, a: {"instruction": "do", "input": q, "output": a}, {}),
        (lambda q, a: {"question": a, **chat(q, a)}, {}),  # messages are what is read
        (lambda q, a: {"question": q, "chosen": chat(q, a)["messages"][1:], "rejected": "no"}, {}),
        (
            lambda q, a: {
                "conversations": [{"from": "human", "value": q}, {"from": "x", "value": a}]
            },
            {"roles": {"x": "assistant"}},
        ),
        (
            lambda q, a: {"chosen": chat(q, a)["messages"], "rejected": chat(q, "no")["messages"]},
            {},
        ),
    ],
)
def test_a_prompt_is_on_one_side(make, keys, tmp_path):
    rows = [
        make(f"question {number}", f"answer {copy}") for number in range(40) for copy in range(3)
    ]
    train, held = sides(write(tmp_path / "a.jsonl", rows), 0.25, **keys)
    assert len(train) + len(held) == 120 and len(held) == 30
    requests = [
        {json.dumps(row).split("question ")[1].split('"')[0] for row in side}
        for side in (train, held)
    ]
    assert not requests[0] & requests[1]


def test_the_same_rows_in_any_order_and_nearly_the_same_among_more(tmp_path):
    rows = [chat(f"question {number}", "answer") for number in range(100)]
    texts = lambda side: {json.dumps(row) for row in side}  # noqa: E731
    _, held = sides(write(tmp_path / "a.jsonl", rows), 10)
    _, turned = sides(write(tmp_path / "b.jsonl", rows[::-1]), 10)
    assert len(held) == 10 and texts(held) == texts(turned)
    extra = [*rows, *(chat(f"new {number}", "answer") for number in range(10))]
    _, after = sides(write(tmp_path / "c.jsonl", extra), 0.1)
    assert len(texts(held) & texts(after)) >= 7


def test_rows_keep_their_names_and_travel_to_workers(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(9)])
    full = open_rows(DatasetConfig(path=path))
    rows = open_rows(DatasetConfig(path=path, held_out=3, part="held_out"))
    again = pickle.loads(pickle.dumps(rows))
    for index in range(3):
        number = int(rows[index]["text"].split()[-1])
        assert again[index] == rows[index] == full[number]
        assert rows.origin(index) == full.origin(number)


def config(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(f'[run]\nmax_steps = 1\n[model]\npath = "x"\n{text}')
    return load_config(path)


SPLIT = '[data]\nvalidation_split = 0.1\n[[data.datasets]]\npath = "a.jsonl"\nweight = 2.0\n'


def test_a_saved_config_divides_as_it_did(tmp_path):
    actual = config(tmp_path, SPLIT + "[eval]\nevery = 1\n")
    again = type(actual).model_validate(actual.model_dump())
    assert again == actual
    assert [eval_dataset.part for eval_dataset in actual.data.eval_datasets] == ["held_out"]
    assert actual.data.datasets[0].held_out == actual.data.eval_datasets[0].held_out == 0.1


def test_a_dataset_s_own_number_counts_for_it_alone(tmp_path):
    second = '[[data.datasets]]\npath = "b.jsonl"\nheld_out = 7\n'
    actual = config(tmp_path, SPLIT + second)
    sides = [actual.data.datasets, actual.data.eval_datasets]
    assert [[eval_dataset.held_out for eval_dataset in side] for side in sides] == [
        [0.1, 7],
        [0.1, 7],
    ]
    alone = "[data]\n" + second.replace("7", "0.2") + '[[data.eval_datasets]]\npath = "c.jsonl"\n'
    actual = config(tmp_path, alone)
    assert [
        (eval_dataset.path, eval_dataset.part) for eval_dataset in actual.data.eval_datasets
    ] == [
        ("c.jsonl", "train"),
        ("b.jsonl", "held_out"),
    ]
    assert type(actual).model_validate(actual.model_dump()) == actual


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (SPLIT + '[[data.eval_datasets]]\npath = "b.jsonl"\n', "both set"),
        (SPLIT.replace("0.1", "1.5"), "neither a share"),
        (SPLIT + "held_out = 2.5\n", "data.datasets.0.held_out 2.5 is neither a share"),
        (SPLIT + "streaming = true\n", "needs the number of rows"),
        (SPLIT.replace("a.jsonl", "builtin:calculator"), "makes its rows"),
    ],
)
def test_what_cannot_be_divided_is_refused(text, messages, tmp_path):
    with pytest.raises(UserError, match=messages):
        config(tmp_path, text)


def test_a_side_without_rows_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat("the same", str(number)) for number in range(4)])
    with pytest.raises(UserError, match="no row is left to train on"):
        sides(path, 2)
    with pytest.raises(UserError, match="none would be held out"):
        sides(path, 0.1)
