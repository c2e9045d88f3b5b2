"""examples/plugin is installed as people would, listed, and trains by its own config."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import install

from jaxtrain.config import load_config
from jaxtrain.config.provenance import list_outside
from jaxtrain.core.export import write_card
from jaxtrain.main import main

EXAMPLE = Path(__file__).parents[2] / "examples/plugin"
SMALL = (
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64"),
    *("model.architecture.num_hidden_layers=1", "data.sequence_len=128"),
    *("sampling.max_new_tokens=16", "run.max_steps=4", "rollout.reward_workers=1"),
    *("log.report=false", "log.plot=false"),
)


def importable(monkeypatch, *folders: Path) -> None:
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])


def test_its_names_are_told_without_importing_it(tmp_path, monkeypatch, capsys):
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"], project["entry-points"])
    importable(monkeypatch, tmp_path, EXAMPLE / "src")
    before = {name for name in sys.modules if name.startswith("jaxtrain_example")}
    assert main(["plugins", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert {name for name in sys.modules if name.startswith("jaxtrain_example")} == before
    assert payload["problems"] == []
    assert payload["groups"]["observers"]["builtin"][0] == "early_stop"
    assert payload["groups"]["envs"]["installed"] == [
        {
            "name": "countdown",
            "object": "jaxtrain_example.countdown:countdown",
            "distribution": "jaxtrain-example",
            "version": "0.1",
        }
    ]
    config = load_config(EXAMPLE / "countdown.toml")
    used = list_outside(config)
    assert sorted((entry["group"], entry["name"]) for entry in used) == [
        ("curators", "growing"),
        ("envs", "countdown"),
        ("observers", "time_budget"),
        ("rewards", "digits"),
    ]
    assert {(entry["distribution"], entry["version"]) for entry in used} == {
        ("jaxtrain-example", "0.1")
    }
    assert "- envs: `countdown`, of jaxtrain-example 0.1\n" in write_card(config, 3)


def test_clashes_typos_and_broken_imports_are_problems(tmp_path, monkeypatch, capsys):
    groups = {"jaxtrain.rewards": {"math": "json:loads"}, "jaxtrain.observer": {"x": "json:loads"}}
    install(tmp_path, "other", {**groups, "jaxtrain.sinks": {"gone": "no_such_module:Sink"}})
    importable(monkeypatch, tmp_path)
    assert main(["plugins"]) == 2
    output = capsys.readouterr().out
    assert "problem: jaxtrain.rewards: 'math' is built in, but other brings another one" in output
    assert "jaxtrain.observer; did you mean 'observers'?" in output
    assert "+ math   other 0.1   json:loads" in output and "no_such_module is" not in output
    assert main(["plugins", "--load"]) == 2
    assert "problem: jaxtrain.sinks 'gone' cannot be imported" in capsys.readouterr().out


def test_files_and_packages_that_are_not_installed_are_told_as_well(tmp_path):
    from test_plugins_page import make_config

    (tmp_path / "r.py").write_text("def f(**columns): ...\n")
    config = make_config(
        task={"kind": "rl"},
        sampling={"temperature": 1.0, "max_new_tokens": 8},
        rewards=[{"function": f"{tmp_path}/r.py:f"}, {"function": "math"}],
        optim={"name": "optax:adan"},
    )
    by_group = {entry["group"]: entry for entry in list_outside(config)}
    assert len(by_group["rewards"]["sha256"]) == 16
    assert by_group["optimizers"]["distribution"] == "optax"
    assert by_group.keys() == {"rewards", "optimizers"}  # the model's family is built in
    assert "of a file, sha256" in write_card(config, 1)


@pytest.mark.thorough
def test_it_installs_and_trains(tmp_path, monkeypatch):
    sources, site, work = tmp_path / "sources", tmp_path / "site", tmp_path / "work"
    shutil.copytree(EXAMPLE, sources)  # a build leaves folders behind
    work.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    subprocess.run([*pip, *options, str(sources)], check=True)
    importable(monkeypatch, site)
    monkeypatch.chdir(work)
    runpy.run_path(str(sources / "make_rows.py"))
    words = ["--config", str(sources / "countdown.toml"), *SMALL]
    assert main([*words, "observers.0.options.minutes=1e-9"]) == 0
    [attempt] = (work / "runs/countdown/attempts.jsonl").read_text().splitlines()
    assert {entry["name"] for entry in json.loads(attempt)["plugins"]} == {
        *("countdown", "digits", "time_budget", "growing")
    }
    card = (work / "runs/countdown/model/README.md").read_text()
    assert "- curators: `growing`, of jaxtrain-example 0.1" in card
    lines = [
        json.loads(x) for x in (work / "runs/countdown/metrics.jsonl").read_text().splitlines()
    ]
    steps = [line for line in lines if "loss" in line]
    # The first step compiles and has no step_seconds; rounds are read before the next one is drawn.
    assert [line["step"] for line in steps] == [1, 2]
    assert any("digits" in name for name in steps[0])
