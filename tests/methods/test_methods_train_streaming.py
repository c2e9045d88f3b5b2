"""Streamed rounds through the front door: an optimizer step is made while answers of its round are
still out, a run that is stopped within a round goes on with what it has not trained, and what
cannot be streamed is refused."""

import json
from pathlib import Path

import pytest
from test_methods_rl import CONFIG

from jaxtrain.main import main

GROUP = 4
ENV = f"env.path={Path(__file__).with_name('rl_late_env.py')}:LateTail"

VLLM = ("rollout.engine=vllm", "rollout.devices=0", 'rollout.vllm.servers=["http://127.0.0.1:1"]')


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "streaming.toml"
    path.write_text(CONFIG)
    return path


def run(config, folder, late, *words, **options) -> list[dict]:
    folder.mkdir(exist_ok=True)
    options = {"folder": str(folder), "late": late, "group_size": GROUP, **options}
    table = ", ".join(
        f"{name} = {{ {', '.join(f'{k} = {v}' for k, v in value.items())} }}"
        if isinstance(value, dict)
        else f"{name} = {json.dumps(value)}"
        for name, value in options.items()
    )
    code = main(
        [
            *("--config", str(config), f"run.output_dir={folder}", ENV),
            f"env.options={{ {table} }}",
            *("rollout.streaming=true", "rollout.devices=2", "task.num_minibatches=2"),
            *("rollout.zero_advantage=keep", "optim.name=sgd", *words),
        ]
    )
    assert code == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def asked(folder) -> list[int]:
    return [int(line) for line in (folder / "asked.txt").read_text().split()]


@pytest.mark.slow
def test_the_first_minibatch_is_trained_before_the_last_answers_come(config, tmp_path):
    """Prompts 3 and 5 of the rounds 0-3 and 4-7 wait for the first step of their round."""
    lines = run(config, tmp_path / "run", {3: 1, 5: 3}, "optim.learning_rate=0.5")
    assert [line["part"] for line in lines] == [0, 1, 0, 1]
    assert [line["part/groups"] for line in lines] == [2, 2, 2, 2]
    assert [line["policy_version"] for line in lines if "policy_version" in line] == [0, 1]
    for early, last in (lines[:2], lines[2:]):
        assert "reward" not in early and last["groups"] == 4
        assert 0 < last["reward"] < 1 and last["lag/max"] == 0
        assert last["rollout/seconds"] >= last["part/seconds"] > 0
        assert early["ratio/min"] == last["ratio/max"] == 1.0
        # The policy that drew the answers trains the first part, one that has moved the second.
        assert early["sampling/sampling_logp_difference/max"] < 1e-4
        assert last["sampling/sampling_logp_difference/max"] > 1e-3
    assert sorted(set(asked(tmp_path / "run"))) == list(range(8))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert {sample["step"] for sample in samples} == {2, 4} and len(samples) == 4


@pytest.mark.slow
def test_a_run_that_is_stopped_within_a_round_trains_the_rest_of_it_later(config, tmp_path):
    folder = tmp_path / "run"
    lines = run(config, folder, {7: 3}, stop_at=7)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    cut = lines[-1]  # the numbers of the round that was cut short
    assert "loss" not in cut and (cut["groups"], cut["policy_version"]) == (2, 1)
    first = asked(folder)
    assert sorted(set(first)) == list(range(8))

    lines = run(config, folder, {}, "run.allow_config_change=true", "run.max_steps=5")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert lines[-1]["policy_version"] == 2
    later = set(asked(folder)[len(first) :])
    trained = set(range(8)) - later
    assert len(trained) == 6 and 7 not in trained and set(range(4)) <= trained
    assert later - set(range(8)) == {8, 9}


@pytest.mark.parametrize(
    "words, message",
    [
        (["task.num_minibatches=1"], "task.num_minibatches is 1; set it to 2 or more"),
        (["task.num_iterations=2"], "passes over the whole round"),
        (["task.scale_rewards=batch"], 'task.scale_rewards "batch" needs the whole round'),
        (["task.objective=reinforce_baseline"], "normalize_advantages needs the whole round"),
        (["task.baseline=batch"], 'task.baseline "batch" needs the whole round'),
        (["task.objective=gdpo"], '"normalize_then_sum" needs the whole round'),
        (["task.objective=m2po_mask"], 'take "m2po_clip"'),
        (["task.normalize_advantages=true"], "normalize_advantages needs the whole round"),
        ([*VLLM, "rollout.vllm.sleep=true"], "rollout.vllm.sleep stops"),
        (["task.num_minibatches=3"], "does not divide"),
        (["rollout.devices=0"], "set rollout.devices to how many"),
    ],
)
def test_what_needs_the_whole_round_is_refused(config, tmp_path, capsys, words, message):
    options = ["rollout.streaming=true", "rollout.devices=2", "task.num_minibatches=2", *words]
    assert main(["--config", str(config), f"run.output_dir={tmp_path / 'run'}", *options]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["prefetch", "async"])
def test_streaming_goes_with_drawing_ahead(config, tmp_path, mode):
    words = (f"rollout.mode={mode}", "rollout.max_lag=2", "run.max_steps=12")
    lines = run(config, tmp_path / "run", {3: 1, 9: 3, 14: 5}, *words)
    rounds = [line for line in lines if "reward" in line]
    assert [line["policy_version"] for line in rounds] == list(range(6))
    lags = [line["lag/max"] for line in rounds]
    assert lags[0] == 0 and 1 <= max(lags) <= (1 if mode == "prefetch" else 2)
    trained = sum(line["part/groups"] for line in lines)
    assert trained == sum(line["groups"] for line in rounds) == 24
