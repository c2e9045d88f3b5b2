"""The observer hub, by the Hub's own client over HTTP, against a server that may fail."""

import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
from hub_server import TOKEN, Server
from scripted import make_run

from jaxtrain.errors import UserError
from jaxtrain.runs.observers import hub, push
from jaxtrain.runs.observers.hub import MetricsHub


@pytest.fixture
def server(monkeypatch):
    """A Hub; pushes go there from this process, not from one of their own."""
    from huggingface_hub import constants

    created = Server()
    monkeypatch.setattr(constants, "ENDPOINT", created.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(MetricsHub, "_ask", lambda self, job: push.push(job))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(hub, "PAUSE", 0.0)
    yield created
    created.close()


def make(run=None, **options):
    metrics_hub = MetricsHub(MetricsHub.Section(**{"repo": "me/mine", **options}))
    if run is not None:
        metrics_hub.start(run)
    return metrics_hub


def make_checkpoint(folder, step, data=b"x"):
    path = folder / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (path / "a.bin").write_bytes(data + str(step).encode())
    (path / "note.json").write_text("{}")
    return path


def make_model(folder):
    (folder / "model").mkdir()
    (folder / "model/w.bin").write_bytes(b"weights" * 1000)
    (folder / "model/README.md").write_text("card")


def wait_for(happened):
    for _ in range(2000):
        if happened():
            return
        threading.Event().wait(0.005)  # time.sleep is nobody's here
    raise AssertionError("it never happened")


def paths(server, branch="main"):
    return sorted(path for index, path in server.files if index == branch)


def test_checkpoints_and_the_model_arrive(server, tmp_path):
    output: list[str] = []
    push = make(make_run(tmp_path, output), strategy="all_checkpoints", branch="dev", repo="mine")
    for step in (2, 4):
        path = make_checkpoint(tmp_path, step)
        push.checkpoint(step, path)
        shutil.rmtree(path)  # as checkpoint.keep would
    make_model(tmp_path)
    push.end("finished", "")
    assert server.repos == {"me/mine": True} and "dev" in server.branches
    assert server.commits == [
        ("dev", "checkpoint of step 2"),
        ("dev", "checkpoint of step 4"),
        ("dev", "model of step 10"),
    ]
    pair = [f"checkpoints/{step}/{name}" for step in (2, 4) for name in ("a.bin", "note.json")]
    assert paths(server, "dev") == ["README.md", *pair, "w.bin"]
    assert server.files["dev", "w.bin"] == b"weights" * 1000
    assert not (tmp_path / "observers/one").exists()
    assert output[-1] == "model of step 10 pushed to mine"


def test_the_last_checkpoint_takes_the_place_of_the_one_before(server, tmp_path):
    output: list[str] = []
    push = make(make_run(tmp_path, output), strategy="checkpoint")
    path = make_checkpoint(tmp_path, 2)
    (path / "old.bin").write_bytes(b"old")
    push.checkpoint(2, path)
    wait_for(lambda: server.commits)
    push.checkpoint(4, make_checkpoint(tmp_path, 4))
    push.end("stopped", "SIGTERM")  # no model: it is not through
    assert paths(server) == ["last-checkpoint/a.bin", "last-checkpoint/note.json"]
    assert server.files["main", "last-checkpoint/a.bin"] == b"x4"


@pytest.mark.parametrize(
    "fault",
    [
        ("/commit/", 503),
        ("/lfs/", "cut"),
        pytest.param(("/preupload/", 500), marks=pytest.mark.slow),
        pytest.param(("/repos/create", "cut"), marks=pytest.mark.slow),
    ],
)
def test_what_breaks_off_once_is_tried_again(server, tmp_path, fault):
    server.faults.append(fault)
    output: list[str] = []
    push = make(make_run(tmp_path, output))
    make_model(tmp_path)
    push.end("finished", "")
    assert paths(server) == ["README.md", "w.bin"] and not server.faults
    assert output == ["model of step 10 pushed to me/mine"]
    # Files that are there are not sent again.
    sent = sum("PUT" in entry for entry in server.asked)
    push = make(make_run(tmp_path, output))
    push.end("finished", "")
    assert sum("PUT" in entry for entry in server.asked) == sent and len(server.commits) == 2


@pytest.mark.parametrize(
    ("token", "faults", "messages"),
    [
        ("hf_wrong", [], "does not know the token (status 401)"),
        (TOKEN, [("/create", 403)] * 9, "may not write to me/mine (status 403)"),
        (TOKEN, [("/commit/", 503)] * 99, "status 503: HfHubHTTPError"),
        pytest.param(TOKEN, [("/lfs/", 507)] * 99, "status 507", marks=pytest.mark.slow),
    ],
)
def test_what_the_hub_refuses_is_told_and_the_run_goes_on(
    server, tmp_path, monkeypatch, token, faults, messages
):
    monkeypatch.setenv("HF_TOKEN", token)
    server.faults = list(faults)
    output: list[str] = []
    push = make(make_run(tmp_path, output), strategy="checkpoint")
    path = make_checkpoint(tmp_path, 2)
    push.checkpoint(2, path)
    make_model(tmp_path)
    push.end("finished", "")
    assert not server.commits and messages in output[-1]
    assert output[-1].endswith(f"hf upload me/mine {tmp_path / 'model'}")
    assert TOKEN not in str(output) and not (tmp_path / "observers/one").exists()
    if token != TOKEN or faults[0][1] == 403:
        # Known at the start, told then and with the model, and asked no oftener.
        assert "nothing can be pushed" in output[0] and len(output) == 2
        assert len(server.asked) <= 4


EXPORTED = """
import pathlib, sys
run = pathlib.Path(sys.argv[1])
[step] = (run / "checkpoints").iterdir()
assert (run / "config.json").exists()
if step.name == "3":
    sys.exit("error: no room")
(run / "model").mkdir()
(run / "model/w.bin").write_text(step.name)
"""


def test_every_save_pushes_a_model_of_each_checkpoint(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "EXPORT", [sys.executable, "-c", EXPORTED])
    (tmp_path / "config.json").write_text("{}")
    output: list[str] = []
    push = make(make_run(tmp_path, output), strategy="every_save")
    for step in (2, 3):
        push.checkpoint(step, make_checkpoint(tmp_path, step))
        wait_for(lambda messages=f" {step} ": messages in str(output))
    assert server.files == {("main", "w.bin"): b"2"}
    assert output[1] == "warning: the model of step 3 was not exported: error: no room"
    make_model(tmp_path)
    push.end("finished", "")
    assert server.commits == [("main", "model of step 2"), ("main", "model of step 10")]
    assert paths(server) == ["README.md", "w.bin"]


@pytest.mark.slow
def test_a_silent_hub_does_not_hold_up_the_end_of_the_run(tmp_path, monkeypatch):
    """The process that pushes is ended, and what it began is told; a good one pushes."""
    server, output = Server(), []
    for name, value in (("HF_ENDPOINT", server.url), ("HF_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    make_model(tmp_path)
    push = make(make_run(tmp_path, output))
    push.end("finished", "")
    assert paths(server) == ["README.md", "w.bin"], output
    server.faults.append(("/commit/", "silent"))
    push = make(make_run(tmp_path, output), seconds=4.0)
    began = time.monotonic()
    push.end("finished", "")
    assert time.monotonic() - began < 8 and "was not over after 4 s" in output[-1]
    push._thread.join(10)
    assert not push._thread.is_alive() and len(server.commits) == 1
    # A run that is killed closes the pipe.
    server.faults.append(("/create", "silent"))
    child = subprocess.Popen(hub.PUSH, stdin=subprocess.PIPE, text=True)
    child.stdin.write(json.dumps(push._job("repository", 0, None)) + "\n")
    child.stdin.close()
    assert child.wait(10) == 1
    server.close()


def test_the_hub_wants_a_token_and_something_to_push(server, tmp_path, monkeypatch):
    import huggingface_hub

    with pytest.raises(UserError, match="run.export is false"):
        make(make_run(tmp_path, [], export=False))
    with pytest.raises(ValueError, match='must be "name" or "owner/name"'):
        MetricsHub.Section(repo="a/b/c")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="no token to push to me/mine with; set HF_TOKEN"):
        make()
