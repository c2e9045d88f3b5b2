"""rollout.vllm.launch = "local": whose GPUs are whose, what is started, and what becomes of servers
that end."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_child import write_python

from jaxtrain.config import SamplingConfig, validate_config
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.distributed import gpus, processes
from jaxtrain.distributed.orphans import read_stat
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import ServerGone, call
from jaxtrain.generation.vllm.launch import (
    LaunchedServer,
    Launcher,
    build_command,
    build_environment,
    check_python,
    find_ports,
    open_launcher,
)
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.main import main
from jaxtrain.runs.folder import list_names


def make(output_dir="out", adapter="none", model=None, **vllm):
    table = {
        "run": {"max_steps": 1, "output_dir": str(output_dir)},
        "task": {"kind": "rl"},
        "model": {"path": "some/model", "tokenizer": "builtin", **(model or {})},
        "adapter": {"kind": adapter},
        "data": {"datasets": [{"path": "builtin:calculator"}], "sequence_len": 512},
        "env": {"kind": "calculator"},
        "sampling": {"temperature": 1.0, "max_new_tokens": 8},
        "rollout": {"engine": "vllm", "vllm": {"launch": "local", **vllm}},
    }
    return validate_config(table, "test")


@pytest.fixture(autouse=True)
def nothing_set_aside(monkeypatch):
    monkeypatch.setattr(gpus, "_for_servers", None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    "visible, settings, trainer, servers",
    [
        ("0,1,2,3", {"replicas": 2, "gpus": 2}, "0,1", [["2"], ["3"]]),
        ("4,5,6,7", {"gpus": 2}, "4,5", [["6", "7"]]),
        ("GPU-a, GPU-b,-1,GPU-c", {}, "GPU-a", [["GPU-b"]]),
        ("0", {"sleep": True}, "0", [["0"]]),
        ("0,1", {"gpus": 0, "replicas": 2}, "0,1", [[], []]),
        ("", {"replicas": 2}, "", [[], []]),
    ],
)
def test_the_last_gpus_are_the_servers(visible, settings, trainer, servers):
    vllm, environ = VllmConfig(launch="local", **settings), {"CUDA_VISIBLE_DEVICES": visible}
    gpus.set_aside(vllm, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == (visible if not any(servers) else trainer)
    assert gpus.assign(vllm, environ) == servers
    # Two on one GPU: jax must not take it whole; a user's own number stays.
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in environ) == bool(settings.get("sleep"))


def test_too_few_gpus_are_told_before_jax_is_there():
    for visible, settings, output in [
        ("0,1", {"gpus": 3}, "to have 3 GPUs and there are 2"),
        ("0,1", {"gpus": 2}, "none the trainer's.*sleep = true"),
    ]:
        with pytest.raises(UserError, match=output):
            gpus.set_aside(
                VllmConfig(launch="local", **settings), {"CUDA_VISIBLE_DEVICES": visible}
            )
    with pytest.raises(UserError, match="jax has all GPUs already"):
        gpus.assign(VllmConfig(launch="local"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    environ = {"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}
    gpus.set_aside(VllmConfig(launch="local"), environ)  # a trainer that needs none
    assert environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("verb", ["train", "eval", "eval of a run"])
def test_the_command_line_leaves_gpus_before_anything_looks_for_devices(
    monkeypatch, tmp_path, verb
):
    seen = []

    def join(*_):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise UserError("enough")

    monkeypatch.setattr(processes, "join_by_config", join)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(make(tmp_path).saved()))
    source = {"eval of a run": [str(tmp_path)]}.get(verb, ["--config", str(path)])
    assert main([*([] if verb == "train" else ["eval"]), *source]) == 2
    assert seen == ["0,1"]


@pytest.mark.parametrize(
    "settings, output",
    [
        ({"launch": "none", "servers": ["http://a:1"], "replicas": 2}, "replicas has no effect"),
        ({"launch": "none"}, 'or have jaxtrain start them with rollout.vllm.launch = "local"'),
        ({"gpus": 3, "replicas": 2}, "cannot be split evenly"),
        ({"args": ["--port=8000"]}, "'--port=8000' is set by nothing: a free one is taken"),
        ({"args": ["-tp", "2"]}, "set by rollout.vllm.gpus divided by"),
        ({"model": {"path": None, "architecture": {}}}, "model.path, which is not set"),
    ],
)
def test_what_cannot_be_is_refused_by_its_keys(settings, output):
    with pytest.raises(UserError, match=output):
        make(**settings)


def test_the_command_says_what_the_config_says(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    vllm = {"python": "/vllm/python", "args": ["--max-model-len", "99"], "sleep": True, "gpus": 4}
    command = build_command(make(**vllm, weight_dtype="float32"), 81, ranks=4, longest=300)
    serve, options = command[: command.index("--")], command[command.index("--") + 1 :]
    assert serve[:3] == ["/vllm/python", "-m", "jaxtrain_vllm.serve"]
    local_value = (
        "--model some/model --host 127.0.0.1 --port 81 --sync full --drain-seconds 0 --sleep"
    )
    assert serve[3:] == local_value.split()
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert pairs[0] == ("--max-model-len", "300") and pairs[-1] == ("--max-model-len", "99")
    assert {("--dtype", "float32"), ("--tensor-parallel-size", "4")} <= set(pairs)
    lora = build_command(make(adapter="lora", sync="lora"), 81)
    assert lora[lora.index("--max-lora-rank") + 1] == "64" and "--dtype" not in lora
    random = build_command(make(model={"init": "random"}), 81)
    assert random[random.index("--load-format") + 1] == "dummy"  # the first sync brings weights

    # vLLM's Python sees none of this one's packages but jaxtrain_vllm.
    monkeypatch.setenv("PYTHONPATH", "/other")
    env = build_environment(tmp_path / "path", "secret", ["2", "3"], "/vllm/python")
    assert env["PYTHONPATH"] == str(tmp_path / "path") and env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert os.listdir(tmp_path / "path") == ["jaxtrain_vllm"] and env["VLLM_API_KEY"] == "secret"
    assert (tmp_path / "path" / "jaxtrain_vllm" / "serve.py").is_file()
    assert build_environment(tmp_path / "path", None, [], None)["PYTHONPATH"].endswith(":/other")

    with pytest.raises(UserError, match=r"/no/python cannot be run.*rollout\.vllm\.python"):
        check_python("/no/python")
    monkeypatch.setenv("VLLM_PYTHON", "/bin/false")
    with pytest.raises(UserError, match="/bin/false has no vLLM.*VLLM_PYTHON"):
        check_python(None)
    assert "servers" in list_names(make()) and "servers" not in list_names(
        make(launch="none", servers=["http://127.0.0.1:1"])
    )


class Scripted:
    """A ServerProcess that ends when it is told to."""

    command = ("serve",)

    def __init__(self):
        self.status, self.stopped = None, False

    def start(self):
        pass

    def poll(self):
        return self.status

    def stop(self, seconds):
        self.stopped = True


def test_three_restarts_in_ten_minutes_then_the_run_goes_on_without(tmp_path):
    current_time, created, output, lost, failed = [0.0], [], [], [], []

    def start():
        created.append(Scripted())
        return created[-1]

    servers = [
        LaunchedServer(f"http://a:{position}", start, tmp_path / f"{position}.log")
        for position in (0, 1)
    ]
    launcher = Launcher(servers, output.append, lambda: current_time[0])
    launcher.start()
    launcher._watching = True

    def fail(server, seconds):
        current_time[0] += seconds
        server.process.status = 9
        launcher.inspect(lambda *label: lost.append(label), failed.append)

    for _ in range(3):
        fail(servers[0], 201)
    fail(servers[0], 201)  # the first is more than ten minutes ago
    assert launcher.restarts == 4 and len(created) == 6 and servers[0].process.poll() is None
    fail(servers[0], 1)
    assert servers[0].given_up and "ended 4 times within 10 minutes" in output[-1]
    assert lost[-1] == ("http://a:0", f"its process ended with status 9; {tmp_path}/0.log")
    assert [entry.url for entry in launcher.poll()] == ["http://a:0", "http://a:1"]
    launcher.inspect(lambda *label: lost.append(label), failed.append)
    assert len(lost) == 5 and not failed
    for _ in range(4):
        fail(servers[1], 1)
    assert isinstance(failed[-1], RunStopped) and "all vLLM servers" in str(failed[-1])
    launcher.close()
    fail(servers[1], 1)
    assert all(process.stopped for process in created[-1:]) and len(created) == 9


def wait_for(label, seconds=20.0):
    end = time.monotonic() + seconds
    while not (actual := label()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return actual


def test_a_server_that_does_not_come_up_ends_the_run_with_its_last_words(tmp_path):
    python = write_python(tmp_path, 'echo "no kernel image $2"; exit 3')
    launcher = open_launcher(make(python=str(python)), tmp_path / "servers", str)
    with pytest.raises(UserError, match=r"(?s)status 3.*no kernel image jaxtrain_vllm\.serve"):
        try:
            launcher.start()
            wait_for(lambda: not launcher.poll())
        finally:
            launcher.close()


@pytest.mark.slow
def test_a_killed_server_comes_back_with_the_newest_weights(tmp_path):
    """And what is started ends with the run, whose folder says where the logs are."""
    output, folder = [], tmp_path / "servers"
    config = make(tmp_path, python=str(write_python(tmp_path)), health_seconds=0.1)
    with ExitStack() as stack:
        launcher = open_launcher(config, folder, output.append)
        stack.callback(launcher.close)
        launcher.start()
        key = os.environ["VLLM_API_KEY"]
        assert len(key) > 30
        draw = SamplingConfig(max_new_tokens=8)
        servers = Servers(config.rollout.vllm, draw, output.append, None, [launcher])
        stack.callback(servers.close)
        servers.push_weights = lambda server: servers.mark_up(server, 0)
        servers.open()
        [server] = servers.all
        servers.mark_up(server, 0)
        launcher.watch(servers.report_ended, servers.fail)
        [entry] = launcher.servers
        first = entry.process._process.pid
        assert (folder / "0.json").exists() and key not in entry.log_file.read_text()
        [child] = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        os.kill(int(child), signal.SIGKILL)
        wait_for(lambda: launcher.restarts == 1 and server.state == "up")
        again = f"vllm {server.url} is started again (1 of 3): its process ended with status 137"
        assert f"{again}; {entry.log_file}" in output and servers.measure()["processes_ended"] == 1
        assert any("is back with version 0" in line for line in output)
        assert entry.log_file.read_text().count("--- ") == 2
    with pytest.raises(ServerGone):
        call(server.url, "GET", "/health", timeout=5)
    assert sorted(os.listdir(folder)) == ["0.log", "path"]


OWNER = """
import pathlib, sys, time
from jaxtrain.distributed.child_processes import ServerProcess
engine = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
server = f'''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {engine!r}], start_new_session=True)
time.sleep(600)
'''
ServerProcess([sys.executable, "-c", server], None, pathlib.Path(sys.argv[1]), 0).start()
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["owner", "owner and its children"])
def test_an_engine_in_a_session_of_its_own_ends_whoever_is_killed(tmp_path, killed):
    """Ray kills an actor's children together with it; the server dies, its engine would stay."""
    log = tmp_path / "server.log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log)])
    try:
        engine = int(wait_for(lambda: log.is_file() and log.read_text().strip(), 60))
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        for pid in [*(children if "children" in killed else []), owner.pid]:
            os.kill(int(pid), signal.SIGKILL)
        wait_for(lambda: (read_stat(engine) or "Z")[0] == "Z", 60)
    finally:
        owner.kill()
        owner.wait()


def test_ports_differ():
    assert len({*find_ports(20)}) == 20
