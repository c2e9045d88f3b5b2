"""Rows behind URLs, of databases and of tar files: what a local file of the same rows gives."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import sqlite3
import tarfile

import pyarrow
import pytest

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.sources import remote
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError

ROWS = [{"prompt": f"{i}+1?", "completion": str(i + 1)} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FIRST = LINES[: LINES.index("\n") + 1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxtrain" / "downloads"


@pytest.fixture
def memory():
    fsspec = pytest.importorskip("fsspec", reason="fsspec reads URLs")
    system = fsspec.filesystem("memory")
    system.pipe({"/bucket/train.jsonl": LINES.encode(), "/bucket/test.jsonl": FIRST.encode()})
    system.pipe("/bucket/LICENSE", b"words")
    yield system
    system.rm("/bucket", recursive=True)


def read(path, **dataset):
    rows = open_rows(DatasetConfig(path=str(path), **dataset))
    return [rows[i] for i in range(len(rows))]


def test_a_file_a_folder_and_a_pattern_behind_a_url(memory, tmp_path):
    assert read("memory://bucket/train.jsonl") == ROWS
    assert read("memory://bucket") == ROWS and read("memory://bucket", split="test") == ROWS[:1]
    assert read("memory://bucket/t*.jsonl") == ROWS[:1] + ROWS  # by name: test, train
    (tmp_path / "a b.jsonl").write_text(LINES)
    assert read((tmp_path / "a b.jsonl").as_uri().replace("%20", " ")) == ROWS
    stream = DatasetConfig(path="memory://bucket/train.jsonl", split="train[3:]", streaming=True)
    assert list(open_rows(stream)) == ROWS[3:]


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_compressed_files_are_read_beside_others(kind, tmp_path, cache):
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    pack["zst"] = lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text(LINES)
    file = folder / f"b.jsonl.{kind}"
    file.write_bytes(pack[kind](FIRST.encode()))
    (folder / "c.NDJSON").write_text(FIRST)
    assert read(folder / f"*.{kind}") == ROWS[:1]
    assert read(folder) == ROWS + 2 * ROWS[:1]
    assert list(open_rows(DatasetConfig(path=str(folder), streaming=True))) == ROWS + 2 * ROWS[:1]
    [copy] = cache.glob("*/b.jsonl")
    copy.write_text(LINES)
    assert read(file) == ROWS  # the copy is not made again
    file.write_bytes(pack[kind](LINES.encode())[:-9])
    with pytest.raises(UserError, match=f"b.jsonl.{kind} cannot be unpacked"):
        read(file)
    assert not [*cache.rglob("*.part")]


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK", 1 << 16)
    (tmp_path / "x.jsonl.bz2").write_bytes(bz2.compress(b" " * (1 << 24)))
    with pytest.raises(UserError, match="more than 1,000 times its size"):
        read(tmp_path / "x.jsonl.bz2")


def test_a_replaced_compressed_file_gives_its_new_rows(tmp_path):
    """Files of the same size and time stamp."""
    file = tmp_path / "a.jsonl.gz"
    for text in ("old", "new"):
        file.write_bytes(gzip.compress(json.dumps({"text": text}).encode(), mtime=0))
        os.utime(file, (0, 0))
        assert read(file) == [{"text": text}]


@pytest.mark.parametrize("static", [False, True])
def test_what_is_there_is_not_copied_again(memory, cache, static, monkeypatch):
    if static:  # as fsspec's files of the web
        monkeypatch.setattr(type(memory), "ukey", lambda system, path: path)
        info, signatures = type(memory).info, itertools.count()
        monkeypatch.setattr(
            type(memory), "info", lambda *args: {**info(*args), "url": f"?key={next(signatures)}"}
        )
    path = "memory://bucket/train.jsonl"
    [file] = read(path) and list(cache.rglob("*.jsonl"))
    before = file.stat().st_mtime_ns
    assert read(path) == ROWS and file.stat().st_mtime_ns == before
    memory.pipe("/bucket/train.jsonl", FIRST.encode())
    assert read(path) == ROWS[:1], "another state is another copy"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://bucket/none.jsonl", "no file at 'memory://bucket/none.jsonl'"),
        ("memory://bucket/*.csv", "no file at"),
        ("nosuch://bucket/a.jsonl", "cannot be read"),
    ],
)
def test_urls_without_rows(memory, path, message):
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        read(path)


@pytest.mark.parametrize(
    ("scheme", "extra", "package"), [("s3", "s3", "s3fs"), ("gs", "gcs", "gcsfs")]
)
def test_a_missing_package_names_its_extra(scheme, extra, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UserError, match=rf"{scheme}:// need.*jaxtrain\[{extra}\]"):
        read(f"{scheme}://bucket/a.jsonl")


def test_tables_and_queries_of_a_database(tmp_path):
    pytest.importorskip("sqlalchemy", reason="databases are read by SQLAlchemy")
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("CREATE TABLE pairs (prompt TEXT, completion TEXT, score REAL)")
        rows = [(*row.values(), None if i else 0.5) for i, row in enumerate(ROWS)]
        database.executemany("INSERT INTO pairs VALUES (?, ?, ?)", rows)
    database.close()
    url = f"sqlite:///{tmp_path}/rows.db"
    assert read(url, name="pairs") == [{**ROWS[0], "score": 0.5}, *ROWS[1:]]
    query = "SELECT prompt, completion FROM pairs WHERE score IS NULL"
    assert read(url, name=query, split="train[1:]") == ROWS[2:]
    for name, message in [
        (None, "name a table, or a query"),
        ("nosuch", "nosuch"),
        ("SELECT nosuch FROM pairs", "nosuch"),
    ]:
        with pytest.raises(UserError, match=message):
            read(url, name=name)
    with pytest.raises(UserError, match="set streaming to false"):
        read(url, name="pairs", streaming=True)


def test_samples_of_a_tar_file(tmp_path):
    members = [(f"a/{i}.json", json.dumps(row).encode()) for i, row in enumerate(ROWS[:2])]
    members += [("a/1.cls", b"7"), ("b/1.txt", "é".encode()), ("b/1.png", b"\x89\xff")]
    with tarfile.open(tmp_path / "rows.tar", "w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    expected = [ROWS[0], {**ROWS[1], "cls": "7"}, {"text": "é", "png": "2 bytes"}]
    assert read(tmp_path / "rows.tar") == expected
    rows = open_rows(DatasetConfig(path=str(tmp_path / "rows.tar")))
    assert rows.origin(2) == "rows.tar b/1"
    stream = DatasetConfig(path=str(tmp_path / "rows.tar"), streaming=True)
    assert list(open_rows(stream)) == expected
    (tmp_path / "bad.tar").write_bytes(b"no archive" * 100)
    with pytest.raises(UserError, match="not a readable tar file"):
        read(tmp_path / "bad.tar")
