"""The token of a run: how it is found, and which files are trusted."""

import os

import pytest

from jaxtrain.distributed.launch import Launch, choose_addresses
from jaxtrain.distributed.run_token import RunToken
from jaxtrain.errors import UserError
from jaxtrain_vllm.listener import LOOPBACK


def test_the_token_file_is_found_by_the_others_and_removed(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = tmp_path / "runs" / "a"
    first = RunToken("host0:99", run, environ)
    token = first.create()
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in first.files)
    assert not run.exists(), "nothing is put into a folder that may hold something else"
    # Another machine: another cache folder, the same shared disk; or the other way round.
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "other")}
    assert RunToken("host0:99", run, elsewhere).read() == [token]
    assert RunToken("host0:99", None, environ).read() == [token]
    assert RunToken("host1:99", None, environ).read() == []
    first.remove()
    assert RunToken("host0:99", run, environ).read() == []


def test_token_files_that_others_may_have_written_are_ignored(tmp_path):
    token = RunToken("localhost:99", tmp_path / "run", {"XDG_CACHE_HOME": str(tmp_path)})
    file = token.files[0]
    file.write_text("x" * 64)
    file.chmod(0o644)
    assert token.read() == []
    file.unlink()
    target = tmp_path / "elsewhere"
    target.write_text("x" * 64)
    target.chmod(0o600)
    file.symlink_to(target)
    assert token.read() == []
    file.unlink()
    os.mkfifo(file, 0o600)
    assert token.read() == [], "nor is it waited for"


def test_the_launchers_token_takes_precedence_and_must_be_long(tmp_path):
    token = RunToken("host0:99", tmp_path / "run", {"JAXTRAIN_TOKEN": "0123456789abcdef"})
    assert token.create() == b"0123456789abcdef" and token.read() == [token.create()]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="JAXTRAIN_TOKEN has 5 characters"):
        RunToken("host0:99", None, {"JAXTRAIN_TOKEN": "short"})


def test_an_unwritable_token_file_advises_the_variable(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = RunToken("h:9", tmp_path / "file" / "run", {"XDG_CACHE_HOME": str(tmp_path / "file")})
    with pytest.raises(UserError, match="export JAXTRAIN_TOKEN"):
        blocked.create()


def test_process_0_listens_as_narrowly_as_the_launch_allows():
    assert choose_addresses(Launch("localhost:9", 0, 2)) == [*LOOPBACK]
    assert choose_addresses(Launch("[::1]:9", 0, 2)) == [*LOOPBACK]
    assert choose_addresses(Launch("gpu03:9", 0, 8, 0, 8)) == [*LOOPBACK], "all on one machine"
    assert choose_addresses(Launch("10.0.0.3:9", 0, 16, 0, 8)) == ["10.0.0.3", *LOOPBACK]
    assert choose_addresses(Launch("gpu03:9", 0, 16, 0, 8)) == [""]
