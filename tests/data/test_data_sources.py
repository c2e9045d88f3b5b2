import json
import pickle

import pyarrow
import pyarrow.parquet
import pytest

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.sources import dataset as sources
from jaxtrain.data.sources import jsonl
from jaxtrain.data.sources.dataset import SplitSpec, open_rows, parse_split
from jaxtrain.errors import UserError
from jaxtrain.safe_io import POINTER

ROWS = [{"text": f"row {i} é", "n": i} for i in range(10)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """datasets keeps what it converts; tests keep theirs to themselves."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)


def write(path, rows=ROWS):
    """Rows in the form that the file's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows, indent=1))
        case ".csv":
            lines = [f'"{row["text"]}",{row["n"]}' for row in rows]
            path.write_text("\n".join(["text,n", *lines]) + "\n")
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
        case ".arrow":
            table = pyarrow.Table.from_pylist(rows)
            with pyarrow.ipc.new_stream(path, table.schema) as out:
                out.write_table(table, max_chunksize=4)
    return path


def opened(path, **options):
    return open_rows(DatasetConfig(path=str(path), **options))


KINDS = ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file(tmp_path, name):
    rows = opened(write(tmp_path / name))
    as_text = name.endswith("csv")
    expected = [{**row, "n": str(row["n"])} if as_text else row for row in ROWS]
    assert len(rows) == 10 and [rows[i] for i in range(10)] == expected
    copy = pickle.loads(pickle.dumps(rows))
    assert copy[7] == rows[7] == expected[7]
    assert rows.origin(0).startswith(name)


@pytest.mark.parametrize("name", KINDS)
def test_streaming_gives_the_same_rows(tmp_path, name):
    path = write(tmp_path / name)
    rows, stream = opened(path), opened(path, streaming=True)
    assert not hasattr(stream, "__len__")
    assert list(stream) == list(stream) == [rows[i] for i in range(10)]


def test_arrow_file_form(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    rows = opened(tmp_path / "a.arrow")
    assert [rows[i] for i in range(len(rows))] == ROWS


@pytest.mark.parametrize("split, expected", [("train", ROWS), ("test", ROWS[:2])])
def test_saved_dataset(tmp_path, split, expected):
    from datasets import Dataset, DatasetDict

    dataset_dict = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:2]))
    dataset_dict.save_to_disk(tmp_path / "saved")
    rows = opened(tmp_path / "saved", split=split)
    assert [rows[i] for i in range(len(rows))] == expected
    with pytest.raises(UserError, match="no split 'dev', only train, test"):
        opened(tmp_path / "saved", split="dev")


def test_nulls_of_a_table_are_absent_keys(tmp_path):
    call = {"name": "f", "arguments": {"x": 1}}
    second = {"name": "g", "arguments": {"y": "2"}}
    messages = [{"role": "user"}, {"role": "assistant", "calls": [call, second]}]
    rows = opened(write(tmp_path / "a.parquet", [{"messages": messages, "tools": None}]))
    assert rows[0] == {"messages": messages, "tools": None}


@pytest.mark.parametrize(
    "split, expected",
    [
        ("train", range(10)),
        ("train[:50%]", range(5)),
        ("train[50%:]", range(5, 10)),
        ("train[2:4]", range(2, 4)),
        ("train[-3:]", range(7, 10)),
        ("train[:-20%]", range(8)),
        ("train[10%:3]", range(1, 3)),
        ("train[:99]", range(10)),
        ("anything[1:2]", range(1, 2)),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_split_slices(tmp_path, name, split, expected):
    rows = opened(write(tmp_path / name), split=split)
    assert [rows[i]["n"] for i in range(len(rows))] == list(expected)
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_slices_of_percentages_share_out_all_rows():
    for total in (1, 7, 10, 101, 7473):
        low, high = SplitSpec("train", None, "90%"), SplitSpec("train", "90%", None)
        assert low.bounds(total)[1] == high.bounds(total)[0]


@pytest.mark.parametrize("text", ["train[:", "train[1]", "train[a:b]", "", "train[:5%%]", "a b"])
def test_wrong_splits(text):
    with pytest.raises(UserError, match="split"):
        parse_split(text)


def test_max_rows(tmp_path):
    path = write(tmp_path / "a.jsonl")
    rows = opened(path, split="train[4:]", max_rows=3)
    assert [rows[i]["n"] for i in range(len(rows))] == [4, 5, 6]
    assert rows.origin(0) == "a.jsonl line 5"
    stream = opened(path, split="train[4:]", max_rows=3, streaming=True)
    assert [row["n"] for row in stream] == [row["n"] for row in stream] == [4, 5, 6]


def test_stream_cannot_be_cut_by_share(tmp_path):
    with pytest.raises(UserError, match="streaming = false"):
        opened(write(tmp_path / "a.jsonl"), split="train[:10%]", streaming=True)


def test_folder_takes_the_files_of_the_split(tmp_path):
    write(tmp_path / "train-00000-of-00002.jsonl", ROWS[:4])
    write(tmp_path / "train-00001-of-00002.jsonl", ROWS[4:9])
    write(tmp_path / "test.jsonl", ROWS[9:])
    (tmp_path / "README.md").write_text("x")
    train, test = opened(tmp_path), opened(tmp_path, split="test")
    assert [train[i]["n"] for i in range(len(train))] == list(range(9))
    assert [test[i]["n"] for i in range(len(test))] == [9]
    assert train.origin(4) == "train-00001-of-00002.jsonl line 1"
    assert pickle.loads(pickle.dumps(train))[8] == ROWS[8]
    with pytest.raises(UserError, match="no files for split 'dev'.*test.jsonl"):
        opened(tmp_path, split="dev")


def test_an_empty_shard_has_no_rows(tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:5])
    for name in ("0.jsonl", "z.jsonl"):
        (tmp_path / name).touch()
    for path in (tmp_path, f"{tmp_path}/*.jsonl"):
        assert len(opened(path)) == len(list(opened(path, streaming=True))) == 5
    none = tmp_path / "none.parquet"  # as Spark writes partitions without rows
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), none)
    with pytest.raises(UserError, match="none.parquet is empty: it has no rows"):
        opened(none)
    with pytest.raises(UserError, match="is empty"):
        opened(f"{tmp_path}/[0z].jsonl")


def test_folder_without_split_names_is_all_train(tmp_path):
    write(tmp_path / "x.jsonl", ROWS[:5])
    write(tmp_path / "deep" / "y.jsonl", ROWS[5:])
    rows = opened(tmp_path)
    assert sorted(rows[i]["n"] for i in range(len(rows))) == list(range(10))


def test_folder_of_mixed_kinds(tmp_path):
    write(tmp_path / "x.jsonl")
    write(tmp_path / "y.csv")
    with pytest.raises(UserError, match="mixes kinds"):
        opened(tmp_path)
    assert len(opened(tmp_path / "*.csv")) == 10


def test_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no data in .*jsonl"):
        opened(tmp_path)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("block", [7, 1 << 24])
def test_jsonl_blank_lines_and_line_ends(tmp_path, monkeypatch, ending, last, block):
    monkeypatch.setattr(jsonl, "BLOCK", block)
    text = ending.join(['{"n": 0}', "", "  ", '{"n": 1}', '{"n": "two words"}'])
    path = tmp_path / "a.jsonl"
    path.write_bytes((ending + text + (ending if last else "")).encode())
    rows = opened(path)
    assert [rows[i] for i in range(len(rows))] == [{"n": 0}, {"n": 1}, {"n": "two words"}]
    assert [rows.origin(i) for i in range(3)] == [f"a.jsonl line {n}" for n in (2, 5, 6)]
    assert list(opened(path, streaming=True)) == [rows[i] for i in range(3)]


def test_broken_json_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 0}\n{"n": \n[1]\n')
    rows = opened(path)
    assert rows[0] == {"n": 0}
    with pytest.raises(UserError, match=r"a\.jsonl line 2 is not valid JSON"):
        rows[1]
    with pytest.raises(UserError, match=r"a\.jsonl line 3: expected an object, found a list"):
        rows[2]
    with pytest.raises(UserError, match=r"a\.jsonl line 2"):
        list(opened(path, streaming=True))


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"n": 0}\n{"n": 1}\n', [{"n": 0}, {"n": 1}]),
        ('{"n": 0}\n', [{"n": 0}]),
        ('[{"n": 0}]', [{"n": 0}]),
        ('{"version": "1", "data": [{"n": 0}, {"n": 1}]}', [{"n": 0}, {"n": 1}]),
        ('{\n"data": [\n{"n": 0}]}', [{"n": 0}]),
    ],
)
def test_json_in_its_forms(tmp_path, text, expected):
    (tmp_path / "a.json").write_text(text)
    rows = opened(tmp_path / "a.json")
    assert [rows[i] for i in range(len(rows))] == expected


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n\n \n", "is empty"),
        ("a.json", b"", "is empty"),
        ("a.json", b"  \n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.json", b"[1, ", "not valid JSON"),
        ("a.json", b'{\n"a": 1}', "no list of rows"),
        ("a.csv", b"text,n\n", "is empty"),
        ("a.csv", POINTER + b"v1\noid sha256:00\nsize 5\n", "pointer of Git LFS"),
        ("a.jsonl.gz", POINTER + b"v1\noid sha256:00\nsize 5\n", "pointer of Git LFS"),
        ("a.csv", b"text,n\na\n", "row 1: 1 values.*2 columns"),
        ("a.csv", b"\xff\xfe", "not a readable csv"),
        ("a.parquet", b"nonsense", "not a readable parquet"),
        ("a.arrow", b"nonsense", "not a readable arrow"),
        ("a.arrow", b"ARROW1nonsense", "not a readable arrow"),
        ("a.doc", b"hello", r"unknown kind of file.*\.jsonl, \.json"),
        ("a", b"hello", "unknown kind of file"),
    ],
)
def test_unreadable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        opened(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


def test_rows_that_are_no_objects(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="a.json row 2: expected an object, found 2"):
        opened(tmp_path / "a.json")[1]


@pytest.mark.parametrize("path", ["missing.jsonl", "./missing", "a/b/c", "/no/such/folder"])
def test_missing_files(path):
    with pytest.raises(UserError, match="no such file or folder.*data.datasets"):
        opened(path)


def test_pattern_without_files(tmp_path):
    with pytest.raises(UserError, match="no file matches"):
        opened(tmp_path / "*.jsonl")


def test_split_that_selects_nothing(tmp_path):
    with pytest.raises(UserError, match="selects none of its 10 rows"):
        opened(write(tmp_path / "a.jsonl"), split="train[20:]")


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_out_of_reach(monkeypatch, streaming):
    def refuse(*args, **options):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match=r"no file here.*cannot be reached.*no route\)"):
        opened("someone/something", streaming=streaming)


def test_hub_rows(monkeypatch):
    from datasets import Dataset

    requests = {}

    def load(path, name, **options):
        requests.update(path=path, name=name, **options)
        table = Dataset.from_list(ROWS)
        return table.to_iterable_dataset() if options["streaming"] else table

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = opened("someone/something", name="main", split="test[5:7]")
    assert requests == {
        "path": "someone/something",
        "name": "main",
        "split": "test",
        "streaming": False,
    }
    assert [rows[i] for i in range(len(rows))] == ROWS[5:7]
    stream = opened("someone/something", streaming=True)
    position = stream.state_dict()
    assert list(stream) == ROWS
    stream.load_state_dict(position)
    assert next(iter(stream)) == ROWS[0]


def test_hub_subset_that_does_not_exist(monkeypatch):
    def refuse(*args, **options):
        raise ValueError("Unknown split 'dev'. Should be one of ['train'].")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(UserError, match="Unknown split 'dev'.*data.datasets"):
        opened("someone/something", split="dev")


def test_builtin(tmp_path):
    rows = opened("builtin:calculator", options={"num_rows": 30, "seed": 2}, split="test[:50%]")
    assert len(rows) == 15 and rows[3]["problems"]
    assert rows.origin(3) == "builtin:calculator test row 3"
    with pytest.raises(UserError, match="no option 'rows'.*num_rows"):
        opened("builtin:calculator", options={"rows": 3})
    with pytest.raises(UserError, match="builtin:calculator"):
        opened("builtin:chess")
    with pytest.raises(UserError, match="options are for"):
        opened(write(tmp_path / "a.jsonl"), options={"seed": 1})


def test_builtin_as_a_stream():
    stream = opened("builtin:calculator", options={"num_rows": 3}, streaming=True)
    assert len(list(stream)) == 3


def test_a_folder_without_end_is_not_walked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_ENTRIES", 3)
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text("{}")
    with pytest.raises(UserError, match="more than 3 files and folders"):
        sources._find(str(tmp_path), "train")


def test_lines_of_a_text_file_are_rows(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufefffirst line\r\n\n  \n second é\nlast".encode())
    want = [{"text": "first line"}, {"text": " second é"}, {"text": "last"}]
    rows = opened(path)
    assert [rows[i] for i in range(len(rows))] == want
    assert list(opened(path, streaming=True)) == want
    assert rows.origin(1) == "a.txt line 4"
    (tmp_path / "b.txt").write_bytes(b"fine\n\xff\xff\n")
    with pytest.raises(UserError, match="b.txt line 2 is not UTF-8"):
        opened(tmp_path / "b.txt")[1]
    # Beside data it is a note.
    write(tmp_path / "train.jsonl", ROWS[:4])
    assert len(opened(tmp_path)) == 4
