"""Temporary folders of servers, removed whatever ends the server; stable ones, shared."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile

import pytest

from jaxtrain_vllm import folders, serve
from jaxtrain_vllm.folders import find_stable_folder, make_temporary_folder, remove_abandoned

KEEP = """
import sys, time
from jaxtrain_vllm.folders import make_temporary_folder
print(make_temporary_folder("jaxtrain-adapters-"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start():
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", KEEP], stdin=pipe, stdout=pipe, text=True)
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("killed", [True, False])
def test_a_folder_goes_with_its_process_or_with_the_next_one(temporary, killed):
    process, folder = start()
    living, other = start()
    if killed:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.path.isdir(folder) == killed
    new = make_temporary_folder("jaxtrain-adapters-")
    assert not os.path.exists(folder) and os.path.isdir(other) and new.is_dir()
    living.communicate()
    assert [path.name for path in temporary.iterdir()] == [new.name]


def test_a_folder_that_another_server_removes_before_it_is_locked_is_made_again(
    temporary, monkeypatch
):
    flock, removed = fcntl.flock, []

    def remove_first(lock, how):
        if how == fcntl.LOCK_EX and not removed:
            removed.extend(temporary.iterdir())
            for folder in removed:
                remove_abandoned(folder)
        flock(lock, how)

    monkeypatch.setattr(folders.fcntl, "flock", remove_first)
    new = make_temporary_folder("jaxtrain-adapters-")
    assert removed and new not in removed
    assert list(temporary.iterdir()) == [new] and (new / folders.LOCK).is_file()


def test_servers_share_the_metadata_of_the_plugin(temporary, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "cache"))
    monkeypatch.setattr(serve.importlib.metadata, "entry_points", lambda **_: ())
    paths = {serve.build_environment()["PYTHONPATH"].split(os.pathsep)[1] for _ in range(2)}
    (path,) = paths
    assert os.listdir(temporary) == ["cache"] and path.startswith(str(temporary / "cache"))
    (described,) = os.listdir(path)
    assert sorted(os.listdir(f"{path}/{described}")) == ["METADATA", "entry_points.txt"]
    (plugin,) = serve.importlib.metadata.distributions(path=[path])
    assert [point.value for point in plugin.entry_points] == ["jaxtrain_vllm:register"]


def test_without_a_cache_folder_there_is_a_temporary_one(temporary, monkeypatch):
    (temporary / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "file"))
    assert find_stable_folder("x", "").parent == temporary
