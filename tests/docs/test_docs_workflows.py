"""GitHub's workflows, the devcontainer and the Dockerfile run what the Makefile, .ci/run and
pyproject.toml have."""

import json
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.docs.test_docs_commands import check

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [
    line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
]
STAGES = re.findall(r"^ *stage (?:\S+) make (.+)$", (ROOT / ".ci/run").read_text(), re.M)


def list_jobs():
    """Yield (workflow, job's name, job)."""
    for name, workflow in sorted(WORKFLOWS.items()):
        for job_name, job in workflow["jobs"].items():
            yield name, job_name, job


def list_steps(job, key):
    return [step[key] for step in job["steps"] if key in step]


def test_jobs_are_complete():
    assert set(WORKFLOWS) == {"ci", "release", "site", "thorough"}
    for name, job_name, job in list_jobs():
        place = f"{name}.yml, {job_name}"
        assert job["runs-on"] == "ubuntu-latest", place
        needs = job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        assert set(needs) <= WORKFLOWS[name]["jobs"].keys(), place
        uses = list_steps(job, "uses")
        assert all(re.fullmatch(r"[\w-]+/[\w./-]+@(v\d+|release/v\d+)", use) for use in uses), place
        commands = " ".join(list_steps(job, "run"))
        if re.search(r"\bmake\b|\.ci/|-m build", commands):
            assert uses[0].startswith("actions/checkout@"), place
        # YAML reads a bare `on` as true, and 3.10 as 3.1.
        assert set(WORKFLOWS[name][True]) <= {"push", "pull_request", "schedule"} | {
            "workflow_dispatch"
        }
        for python in list_pythons(job):
            assert python in PYTHONS, f"{place}: Python {python} is not in pyproject.toml"


def list_pythons(job):
    """Return the versions that a job sets up."""
    matrix = job.get("strategy", {}).get("matrix", {}).get("python", [])
    versions = [
        step["with"]["python-version"]
        for step in job["steps"]
        if "python-version" in step.get("with", {})
    ]
    plain = [v for version in versions if "${{" not in str(version) for v in version.split()]
    return [*matrix, *plain]


def test_every_stage_of_ci_runs_in_a_workflow():
    """All of .ci/run in one job, the quick tests on every supported Python, and every night what
    .ci/run leaves out."""
    jobs = WORKFLOWS["ci"]["jobs"]
    assert ".ci/run" in list_steps(jobs["everything"], "run")
    assert {"3.11", "3.12"} == set(list_pythons(jobs["everything"]))  # for test-kernels
    assert "make test" in list_steps(jobs["quick"], "run")
    assert list_pythons(jobs["quick"]) == PYTHONS
    assert list_pythons(WORKFLOWS["release"]["jobs"]["try"]) == PYTHONS
    assert {shlex.split(stage)[0] for stage in STAGES} == {
        *(".venv/installed-test", "types", "site", "test", "test-slow", "test-kernels")
    }
    night = [
        run for job in WORKFLOWS["thorough"]["jobs"].values() for run in list_steps(job, "run")
    ]
    assert "make test-thorough" in night
    assert any("test-kernels" in run and "slow or thorough" in run for run in night)


def list_makes():
    """Return the arguments of every `make`."""
    runs = [run for _, _, job in list_jobs() for run in list_steps(job, "run")]
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    commands = [*runs, container["postCreateCommand"]]
    makes = [match for text in commands for match in re.findall(r"\bmake (.+)", text)]
    return sorted({*makes, *STAGES})


@pytest.mark.parametrize("arguments", list_makes())
def test_targets_are_of_the_makefile(arguments):
    words = [word for word in shlex.split(arguments) if not word.startswith("PYTHON=")]
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_of_workflows_are_taken(monkeypatch):
    monkeypatch.chdir(ROOT)
    runs = [run for _, _, job in list_jobs() for run in list_steps(job, "run")]
    commands = [shlex.split(run)[1:] for run in runs if run.startswith("jaxtrain ")]
    assert commands
    for words in commands:
        check(words)


def test_the_containers_have_a_supported_python_and_known_extras():
    docker = (ROOT / "Dockerfile").read_text()
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    (image,) = re.findall(r"^FROM python:(\d\.\d+)-slim$", docker, re.M)
    assert {image, container["image"].rpartition(":")[2]} <= set(PYTHONS)
    (extras,) = re.findall(r'pip install --no-cache-dir "/src\[([\w,-]+)\]"', docker)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert f'ENTRYPOINT ["{next(iter(PROJECT["scripts"]))}"]' in docker
    path = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert container["postCreateCommand"].startswith(f"make {path.split('/')[0]}/")
