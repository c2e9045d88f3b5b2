"""Rows and files from strangers: a bad row is dropped under a reason, a bad file named."""

import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.messages import MAX_TEXT, MalformedRow, read_messages, read_tools
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.comparisons.preference_row import COLUMNS as COLUMNS_OF_PAIRS
from jaxtrain.data.comparisons.preferences import RankedReader
from jaxtrain.data.sample import Dropped, RowNote
from jaxtrain.data.sources import jsonl
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError
from jaxtrain.safe_io import UnreadableRow
from jaxtrain.text_safety import UNSEEN

ASK = {"role": "user", "content": "Q"}
SAY = {"role": "assistant", "content": "A"}
DEEP = "[" * 300 + "]" * 300
TRIES = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def tokenize(tokenizer):
    """Rows of any format, by their columns, to samples and drops."""
    return RowTokenizer(DatasetConfig(path="x.jsonl"), tokenizer, 64, "drop")


def write(folder, content, name="x.jsonl"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return DatasetConfig(path=str(path))


def read_all(dataset):
    rows = open_rows(dataset)
    return [rows[index] for index in range(len(rows))]


def refuse(dataset):
    with pytest.raises(UserError) as error:
        read_all(dataset)
    assert len(str(error.value)) <= 2000 and not UNSEEN.search(str(error.value))
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"prompt": "a", "completion": "\udfff"}, "half a surrogate pair"),
        ({"messages": [ASK, {**SAY, "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [ASK, {**SAY, "\ud800": 1}]}, "half a surrogate pair"),
        ({"messages": [{**ASK, "role": ["user"]}, SAY]}, "a role is a list"),
        (
            {"messages": [{**ASK, "role": None}, SAY]},
            "a message without role (its keys: 'content', 'role')",
        ),
        ({"messages": [{**ASK, "role": {}}, SAY]}, "a role is a table"),
        ({"messages": [{**ASK, "content": 5}, SAY]}, "content is a number"),
        ({"messages": [{**ASK, "content": [{"type": "image"}]}, SAY]}, "only text content"),
        ({"messages": [{**ASK, "name": ["x"]}, SAY]}, "name is a list"),
        ({"messages": [ASK, {**SAY, "tool_calls": 5}]}, "tool_calls must be a list"),
        ({"messages": [ASK, {**SAY, "tool_calls": [5]}]}, "needs function.name"),
        ({"messages": [ASK, {**SAY, "tool_calls": [DEEP]}]}, "nested deeper"),
        ({"messages": [ASK, {**SAY, "tool_calls": "[" * 5000}]}, "nested deeper"),
        ({"messages": [ASK, SAY], "tools": "[" * 5000}, "nested deeper"),
        ({"messages": [ASK, SAY], "tools": 5}, "tools must be a list"),
        ({"messages": [ASK, SAY], "tools": [[]]}, "tools must be a list"),
        ({"messages": [ASK, SAY], "tools": [{"function": "f"}]}, "tools must be a list"),
        ({"messages": [ASK, SAY], "tools": [{"function": {"name": 5}}]}, "name of a tool"),
        ({"messages": [ASK, SAY], "tools": [{"name": f"f{i}"} for i in range(5000)]}, "tools"),
        ({"messages": [ASK, SAY] * 5000}, "more than 4,000 messages"),
        (
            {"messages": [ASK, {**SAY, "content": "a" * 2**20}] * 9},
            "more than 8,388,608 characters",
        ),
        ({"messages": [ASK, {**SAY, "x": json.loads(DEEP)}]}, "nested deeper"),
        ({"text": "a" * (MAX_TEXT + 1)}, "more than 2,097,152 characters"),
        ({"segments": [{"text": 5, "train": True}]}, "string text"),
        ({"segments": [{"text": "a", "train": 1}]}, "string text"),
        ({"instruction": "a", "output": "b", "input": ["c"]}, "not a text"),
        (UnreadableRow("a reason"), "a reason"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_rows_are_dropped_under_a_reason(tokenize, row, reason):
    (actual,) = tokenize(row, "x.jsonl row 1")
    assert isinstance(actual, Dropped) and reason in actual.reason and len(actual.reason) < 200


def test_calls_and_tools_as_json_strings():
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    (message,) = read_messages([{**SAY, "tool_calls": [call]}], {}, {})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert read_tools([json.dumps({"name": "f"})]) == [{"name": "f"}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "line 2 is not valid JSON: not UTF-8"),
        ("x.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16 text"),
        ("x.jsonl", '{"text": "a"}\n{"text": ', "line 2 is not valid JSON"),
        ("x.jsonl", '{"text": "a"}\n[1]', "line 2: expected an object, found a list"),
        ("x.jsonl", "\0\0\0\0", "line 1 is not valid JSON"),
        ("x.jsonl", "  \n\t\n", "is empty"),
        ("x.jsonl", "", "is empty"),
        ("x.json", "[" * 100_000, "not valid JSON: nested deeper"),
        ("x.json", "[1, 2]", "row 1: expected an object, found 1"),
        ("x.json", "[" + "[]," * 5_000_000 + "[]]", "too large to be held in memory"),
        ("x.csv", "a,a\n1,2\n", "several columns called 'a'"),
        ("x.csv", "a,b\n1\n", "row 1: 1 values"),
        ("x.csv", 'a\n"b\n', "not a readable csv file"),
        ("x.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "not a readable parquet file"),
        ("x.arrow", b"ARROW1\0\0" + b"\xff" * 100, "not a readable arrow file"),
        ("x.arrow", b"\xff" * 100, "not a readable arrow file"),
        ("x.gz", gzip.compress(b"{}")[:-4], "unknown kind of file"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "bytes",
)
def test_bad_files_are_named(tmp_path, name, content, expected):
    message = refuse(write(tmp_path, content, name))
    assert expected in message and name in message


def test_rows_that_no_memory_needs_to_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_ROW", 100)
    monkeypatch.setattr(jsonl, "BLOCK", 7)  # borders of blocks fall everywhere
    lines = ['{"text": "a"}', "", '{"text": "' + "b" * 200 + '"}', "  ", '  {"text": "c"}\r', DEEP]
    dataset = write(tmp_path, "\n".join(lines))
    rows = open_rows(dataset)
    actual = [rows[index] for index in range(len(rows))]
    assert [row.get("text") for row in actual] == ["a", None, "c", None]
    assert [rows.origin(i) for i in range(4)] == [f"x.jsonl line {n}" for n in (1, 3, 5, 6)]
    assert isinstance(actual[1], UnreadableRow) and "MiB" in actual[1].reason
    assert list(jsonl.read_lines(dataset.path)) == actual
    monkeypatch.setattr(jsonl, "MAX_ROW", 10_000)
    assert "nested" in open_rows(dataset)[3].reason


def test_a_long_cell_of_csv(tmp_path):
    (row,) = read_all(write(tmp_path, "text\n" + "a" * 200_000 + "\n", "x.csv"))
    assert len(row["text"]) == 200_000


def test_places_that_are_no_data(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "pipe or a device" in refuse(DatasetConfig(path=str(tmp_path / "pipe.jsonl")))
    assert "no regular file" in refuse(DatasetConfig(path=str(tmp_path / "pipe*.jsonl")))
    assert "no data in" in refuse(DatasetConfig(path=str(tmp_path / "folder.jsonl")))
    assert "pipe or a device" in refuse(DatasetConfig(path="/dev/zero"))
    assert "too long" in refuse(DatasetConfig(path="/" + "x" * 5000))
    assert "no such file" in refuse(DatasetConfig(path="~nobody-here/x.jsonl"))


def test_saved_folders(tmp_path):
    from datasets import Dataset

    good = tmp_path / "good"
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(good))
    assert read_all(DatasetConfig(path=str(good))) == [{"text": "a"}]
    state = json.loads((good / "state.json").read_text())
    for content in (
        "",
        "[]",
        "5",
        "{}",
        "[" * 5000,
        json.dumps({**state, "_data_files": [{"filename": "../x.arrow"}]}),
        json.dumps({**state, "_data_files": [{"filename": "none.arrow"}]}),
        json.dumps({**state, "_data_files": 5}),
    ):
        (good / "state.json").write_text(content)
        assert "good is not a readable folder" in refuse(DatasetConfig(path=str(good)))
    (good / "state.json").write_text(json.dumps(state))
    (good / "dataset_info.json").write_text('{"features": [1]}')
    assert "good is not a readable folder" in refuse(DatasetConfig(path=str(good)))
    many = tmp_path / "many"
    many.mkdir()
    (many / "dataset_dict.json").write_text('{"splits": ["../good"]}')
    assert "must name its splits" in refuse(DatasetConfig(path=str(many)))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "tool_calls", "function", "name", "arguments", "text"]
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
COLUMNS = st.sampled_from(
    ["messages", "conversations", "tools", "prompt", "completion", "text", "segments", "system"]
    + ["instruction", "output", "input"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.text()},
        optional={"tool_calls": VALUES, "reasoning_content": VALUES, "name": VALUES},
    ),
    max_size=4,
)


@TRIES
@given(st.dictionaries(COLUMNS, VALUES) | st.fixed_dictionaries({"messages": MESSAGES}))
def test_any_row(tokenize, row):
    for actual in tokenize(row, "x row 1"):
        if isinstance(actual, RowNote):
            assert actual.reason and len(actual.reason) < 300
        else:
            assert len(actual.tokens) == len(actual.weights) <= 64
            assert np.isfinite(actual.weights).all()


PAIRS = [
    {"prompt": [ASK], "chosen": "A", "rejected": ["B", "C"]},
    {"chosen": [ASK, SAY], "rejected": [ASK, {**SAY, "content": "B"}]},
    {"prompt": "Q", "completions": [{"text": "A", "score": 1}, "B"], "ranks": [1, 2]},
    {"messages": [ASK, SAY], "label": True},
]


@TRIES
@given(
    st.sampled_from(PAIRS),
    st.dictionaries(st.sampled_from(COLUMNS_OF_PAIRS), VALUES | MESSAGES, max_size=3),
    st.sampled_from(["pairs", "labels"]),
    st.booleans(),
)
def test_any_preference(tokenizer, row, changed, want, group):
    """A row of preference data with some columns replaced by anything, alone or grouped."""
    dataset = DatasetConfig(path="x.jsonl", pairing="all", group_prompts=group)
    reader = RankedReader(dataset, tokenizer, 64, "truncate", want)
    row = {**row, **changed}
    reader.key(row)
    results = reader({"group": [row, row, {}]} if group else row, "x row 1")
    assert results
    for result in results:
        if isinstance(result, RowNote):
            assert result.reason and len(result.reason) < 300
        else:
            assert bool(result.pairs) != bool(result.labels) and len(result.prompt)
            for answer in result.answers:
                assert len(result.prompt) + len(answer.tokens) <= 64 and answer.weights.any()


@TRIES
@given(st.sampled_from(["jsonl", "json", "csv", "arrow"]), st.binary(max_size=200))
def test_any_file(tmp_path, kind, content):
    try:
        read_all(write(tmp_path, content, f"x.{kind}"))
    except UserError as error:
        assert len(str(error)) <= 2000 and not UNSEEN.search(str(error))


@TRIES
@given(VALUES)
def test_any_messages(value):
    try:
        read_messages(value, {}, {})
    except MalformedRow as error:
        assert len(str(error)) < 300
    try:
        read_tools(value)
    except MalformedRow as error:
        assert len(str(error)) < 300
