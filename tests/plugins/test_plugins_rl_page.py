"""The files at the beginning of docs/rl.md do what the page says, from its very text."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.main import main

PAGE = (Path(__file__).parents[2] / "docs/rl.md").read_text()
TITLED = re.compile(r"```\w+\n# ([\w./]+)[^\n]*\n(.*?)```", re.DOTALL)
ROWS = re.compile(r"`(\w+\.jsonl)`[^\n]*:\n\n```json\n(.*?)```", re.DOTALL)
QWEN = '[model]\npath = "Qwen/Qwen3-0.6B"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, with a model that trains in milliseconds."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in [*TITLED.findall(PAGE), *ROWS.findall(PAGE)]:
        assert not (folder / name).exists(), f"the page has two files {name}"
        (folder / name).write_text(text.replace(QWEN, MODEL))
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


CONFIGS = [name for name, _ in TITLED.findall(PAGE) if name.endswith(".toml")]


def test_the_page_has_what_it_is_meant_to_have():
    assert CONFIGS == ["my_reward.toml", "my_env.toml", "my_tools.toml"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_page_is_valid(folder, name):
    assert load_config(folder / name, []).task.kind == "rl"
    assert (QWEN in PAGE) and MODEL in (folder / name).read_text()


def test_the_reward_is_judged_by_hand_as_the_page_says(capsys):
    runpy.run_path("check_reward.py")
    assert capsys.readouterr().out == "[1.0, 0.0]\n"


def test_the_environment_is_played_by_hand_as_the_page_says(capsys):
    runpy.run_path("check_env.py")
    first, *output = capsys.readouterr().out.splitlines()
    assert first == "{'guess': 1.0}"
    assert [line.split(": ")[1] for line in output[1:]] == ["5", "Higher.", "7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("my_reward.toml", {"rewards/right/mean", "rewards/short/mean"}),
        ("my_env.toml", {"rewards/guess/mean", "env/turns"}),
        pytest.param(
            "my_tools.toml",
            {"rewards/right/mean", "env/tool_calls", "env/tool_errors"},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_config_of_the_page_trains(folder, name, metrics):
    words = [
        "run.max_steps=1",
        "run.export=false",
        "log.plot=false",
        "rollout.zero_advantage=keep",
        "rollout.samples=all",
        "sampling.max_new_tokens=8",
        "data.sequence_len=512",
        "model.architecture.max_position_embeddings=512",
    ]
    assert main(["--config", name, *words]) == 0
    output = folder / "outputs" / name.removesuffix(".toml")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "loss" in line]
    assert metrics <= set(step)
    assert len((output / "samples.jsonl").read_text().splitlines()) == 64


@pytest.mark.slow
def test_the_dry_run_of_the_page_plays_an_episode(capsys):
    words = ["model.architecture.max_position_embeddings=4096"]
    assert main(["--config", "my_env.toml", "--dry-run", *words]) == 0
    assert "played one episode" in capsys.readouterr().out
