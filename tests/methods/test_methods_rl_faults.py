"""Runs whose environments fail, through the front door: they end saved, say why, and go on to the
bits of the run in which nothing failed."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from test_methods_rl import CONFIG, read_params

from jaxtrain.errors import RunStopped
from jaxtrain.generation import event_loop, group_player
from jaxtrain.generation.local.publishers import LocalPublisher
from jaxtrain.main import main
from jaxtrain.runs.checkpoint_folder import find_steps

ENV = f"env.path={Path(__file__).with_name('rl_faulty_env.py')}:Faulty"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(group_player, "pause_before", lambda attempt: 0.001)
    monkeypatch.setattr(event_loop, "CLOSE_SECONDS", 0.5)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "faults.toml"
    path.write_text(CONFIG + 'console = "plain"\n')
    return path


def run(config, folder, *words, flat=False):
    options = f"env.options={{ switch = '{folder}.json', flat = {str(flat).lower()} }}"
    return main(["--config", str(config), f"run.output_dir={folder}", ENV, options, *words])


def read_lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).open()]


def read_whole(folder):
    """Read the deterministic output of training, without clocks."""
    lines = read_lines(folder)
    names = ("step", "loss", "reward", "num_tokens", "policy_version", "groups/replayed")
    samples = [(s["step"], s["prompt_number"]) for s in read_lines(folder, "samples.jsonl")]
    return [[line.get(name) for name in names] for line in lines], samples


def assert_same(folder, full, step=4):
    assert read_whole(folder) == read_whole(full)
    actual_values, reference = read_params(folder, step), read_params(full, step)
    for path, value in reference.items():
        np.testing.assert_array_equal(actual_values[path], value, err_msg=path)


@pytest.fixture(scope="module")
def full_run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(config, folder) == 0
    return folder


def tell(folder, fault):
    """Rounds 1 and 2 are prompts 0 to 7."""
    Path(f"{folder}.json").write_text(json.dumps({"from": 8, "fault": fault}))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", pytest.param("zero", marks=pytest.mark.thorough)])
def test_what_persists_ends_the_run_saved_and_named(config, full_run, tmp_path, capsys, fault):
    folder = tmp_path / "run"
    tell(folder, fault)
    assert run(config, folder, "rollout.max_idle_rounds=4", "checkpoint.every=100") == 1
    captured = capsys.readouterr()
    assert find_steps(folder / "checkpoints") == [2]
    assert "step 2 is saved; the same command goes on from there" in captured.out
    assert "Traceback" not in captured.err and len(captured.err) < 2000
    if fault == "raise":
        assert captured.out.count("an episode failed: ") == 1
        for words in ("rollout.max_failures 0.5", "rl_faulty_env.py:Faulty", "the world is gone"):
            assert words in captured.err
    else:
        for words in ("rollout.max_idle_rounds", "16 zero_advantage", "reward 0 {'even': 0.0}"):
            assert words in captured.err
        idle = [line["idle_rounds"] for line in read_lines(folder) if "idle_rounds" in line]
        assert idle == [1, 2, 3, 4]
        steps = [sample["step"] for sample in read_lines(folder, "samples.jsonl")]
        assert steps == [1, 1, 2, 2, *[3] * 8]
    Path(f"{folder}.json").unlink()
    assert run(config, folder) == 0
    assert_same(folder, full_run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", pytest.param("block", marks=pytest.mark.thorough)])
def test_a_signal_ends_a_hanging_episode_and_saves(config, full_run, tmp_path, capsys, fault):
    folder = tmp_path / "run"
    tell(folder, fault)
    begin = time.monotonic()
    assert run(config, folder) == 0
    assert "SIGTERM: saved step 2 of 4" in capsys.readouterr().out
    assert fault == "hang" or time.monotonic() - begin < 60
    Path(f"{folder}.json").unlink()
    assert run(config, folder) == 0
    assert_same(folder, full_run)


@pytest.mark.slow
def test_weights_that_cannot_be_published_end_the_run_saved(
    config, full_run, tmp_path, monkeypatch
):
    """Simulate the loss of every server: the round before was trained, and counts once."""
    folder, calls, publish = tmp_path / "run", [], LocalPublisher.publish

    def fail_third(self, *args):
        calls.append(args[0])
        if len(calls) == 3:
            raise RunStopped("no server is left")
        return publish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalPublisher, "publish", fail_third)
        assert run(config, folder) == 1
    assert find_steps(folder / "checkpoints") == [2]
    assert run(config, folder) == 0
    assert_same(folder, full_run)


@pytest.mark.slow
def test_the_replay_buffer_comes_back_bit_by_bit(config, tmp_path):
    words = ("rollout.replay_size=3", "rollout.replay_max_lag=3", "checkpoint.every=2")
    assert run(config, tmp_path / "whole", *words, flat=True) == 0
    folder = tmp_path / "run"
    tell(folder, "raise")
    assert run(config, folder, *words, flat=True) == 1
    Path(f"{folder}.json").unlink()
    assert run(config, folder, *words, flat=True) == 0
    # The switch's path is not the only thing that these two runs share.
    assert sum(line.get("groups/replayed", 0) for line in read_lines(folder)) >= 4
    assert_same(folder, tmp_path / "whole")


@pytest.mark.slow
def test_epochs_are_passes_over_the_prompts_whatever_a_round_loses(config, tmp_path):
    """10 prompts, half of them flat: 3 rounds of 4, one or two minibatches each."""
    words = ("run.max_steps=null", "run.num_epochs=1.0", "task.num_minibatches=4")
    words += ("data.datasets.0.max_rows=10", "run.export=false")
    assert run(config, tmp_path / "run", *words, flat=True) == 0
    rounds = [line for line in read_lines(tmp_path / "run") if "policy_version" in line]
    assert [line["policy_version"] for line in rounds] == [0, 1, 2]
    assert max(line["step"] for line in read_lines(tmp_path / "run")) < 12
