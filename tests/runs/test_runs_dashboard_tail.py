"""Files that somebody else writes, cuts, replaces and deletes meanwhile."""

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.runs.dashboard import tail as module
from jaxtrain.runs.dashboard.tail import Tail


def test_lines_come_once_and_only_whole(tmp_path):
    path = tmp_path / "x"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntw")
    assert tail.read() == [b"one"] and tail.read() == []
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert tail.read() == [b"two", b"", b"three"] and tail.restarted == 0


def test_a_file_that_is_another_is_read_again(tmp_path):
    path = tmp_path / "x"
    tail = Tail(path)
    path.write_bytes(b"one\ntwo\n")
    tail.read()
    new = tmp_path / "y"
    new.write_bytes(b"One\nTwo\n")  # of the same size, by rename, as resumed runs do
    new.replace(path)
    assert tail.read() == [b"One", b"Two"] and tail.restarted == 1
    path.write_bytes(b"x\n")  # shorter
    assert tail.read() == [b"x"] and tail.restarted == 2
    path.write_bytes(b"y\nlonger than before\n")  # cut and written on between two readings
    assert tail.read() == [b"y", b"longer than before"] and tail.restarted == 3
    path.unlink()
    assert tail.read() == [] and tail.restarted == 4
    path.write_bytes(b"back\n")
    assert tail.read() == [b"back"]


def test_long_files_come_in_parts_and_endless_lines_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_READ", 10)
    monkeypatch.setattr(module, "MAX_LINE", 25)
    path = tmp_path / "x"
    path.write_bytes(b"a" * 60 + b"\nshort\nb\n")
    tail, actual = Tail(path), []
    for _ in range(20):
        actual += tail.read()
    assert actual == [b"short", b"b"] and not tail.behind


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x")
    assert Tail(tmp_path / "x").read() == []
    assert Tail(tmp_path).read() == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=12))
def test_any_writes_give_the_lines_of_the_whole(parts):
    with tempfile.TemporaryDirectory() as folder:
        path, actual = Path(folder) / "x", []
        tail = Tail(path)
        for part in parts:
            with path.open("ab") as file:
                file.write(part)
            actual += tail.read()
        assert actual == b"".join(parts).split(b"\n")[:-1] and tail.restarted == 0
