"""The verb on this machine, and on one whose jax fails or hangs."""

import json
import sys

import pytest

from jaxtrain.main import main
from jaxtrain.runs.doctor import collect
from jaxtrain.runs.doctor import command as open
from jaxtrain.runs.doctor.command import read_needs
from jaxtrain.runs.doctor.probe import probe_jax, run_quietly

WORKS = """print('@{"stage": "done", "backend": "cpu", "devices": [], "seconds": 1.5}')"""
HANGS = """
import time
print('@{"stage": "find devices"}', flush=True)
time.sleep(600)
"""


def test_a_jax_that_hangs_does_not_hang_the_doctor():
    actual = probe_jax(1.0, HANGS)
    assert (actual["state"], actual["stage"], actual["devices"]) == ("timeout", "find devices", [])


def test_a_jax_that_fails_says_why():
    program = "import sys, warnings; warnings.warn('no plugin'); raise OSError('no library')"
    actual = probe_jax(60.0, program)
    assert (actual["state"], actual["message"]) == ("failed", "OSError: no library")
    assert actual["warnings"] == ["no plugin"]
    assert probe_jax(60.0, "import os; os.kill(os.getpid(), 11)")["code"] == -11


def test_commands_that_are_missing_or_hang():
    assert run_quietly(["/no/such/nvidia-smi"], 5.0) == ("missing", "No such file or directory")
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert run_quietly(wait, 0.2)[0] == "timeout"


@pytest.fixture
def quick(monkeypatch):
    """jax is not asked: others' tests start it often enough."""
    monkeypatch.setattr(collect, "probe_jax", lambda seconds: probe_jax(seconds, WORKS))


def test_the_verb(quick, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "ready in 1.5 s" in output and "all well" in output
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind


def test_json_and_a_config(quick, monkeypatch, capsys):
    expected = ["run.output_dir=/proc/nowhere", "log.wandb_project=mine"]
    find = collect.find_version
    monkeypatch.setattr(collect, "find_version", lambda n: None if n == "wandb" else find(n))
    assert main(["doctor", "--config", "quickstart", *expected, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    wrong = {entry["name"]: entry for entry in answer["findings"] if entry["level"] == "error"}
    assert not answer["ok"] and set(wrong) == {"config", "output"}
    assert "wandb>=0.18" in wrong["config"]["do"]
    assert answer["facts"]["packages"]["versions"]["jax"]


def test_a_config_that_cannot_be_read_is_a_finding(quick, capsys):
    assert main(["doctor", "--config", "no/such.toml"]) == 1
    assert "no/such.toml" in capsys.readouterr().out
    assert main(["doctor", "run.max_steps=3"]) == 2


def test_what_a_config_needs():
    needs = read_needs("rl_vllm_local")
    assert needs["vllm"] and needs["compute_dtype"] and not needs["problem"]
    assert read_needs("quickstart", ["log.tensorboard=true"])["packages"] == [
        ("log.tensorboard", "tensorboardX")
    ]


def test_collectors_never_raise(monkeypatch):
    def broken():
        raise RuntimeError("strange")

    monkeypatch.setattr(collect, "collect_hub", broken)
    monkeypatch.setattr(collect, "probe_jax", lambda seconds: {"state": "failed", "message": "m"})
    facts = collect.collect(1.0, collect.Path("runs"))
    assert facts["hub"] == {"failed": "RuntimeError: strange"}
    assert "could not be looked at: RuntimeError: strange" in open.render(open.judge(facts))
