"""Reinforcement learning through the front door: a toy task's reward rises, a resumed run is the
run that was never stopped, and what the config asks for is what the numbers show."""

import json
from pathlib import Path

import numpy as np
import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.adapters.spec import Adapter
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.reference_model import find_reference
from tests.docs.metric_names import require_rows

CONFIG = f"""
[run]
max_steps = 4
export = false
{MODEL}
[data]
sequence_len = 64
micro_batch_size = 1

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 200 }}

[task]
kind = "rl"

[rollout]
prompts_per_step = 4
group_size = 4

{EVEN_TOKENS}
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[log]
plot = false
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "rl.toml"
    path.write_text(CONFIG)
    return path


def run(config, folder, *words) -> list[dict]:
    code = main(["--config", str(config), f"run.output_dir={folder}", *words])
    assert code == 0
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def read_params(folder, step):
    from jaxtrain.methods.reopen import open_trained

    held = open_trained(str(folder), [], step).snapshot
    return {path: np.asarray(value) for path, value in held.params().items()}


def test_the_reward_of_a_toy_task_rises(config, tmp_path):
    words = ("run.max_steps=8", "rollout.group_size=8", "optim.learning_rate=0.2")
    lines = run(config, tmp_path / "run", *words)
    rewards = [line["reward"] for line in lines]
    # Half of all tokens are even; random choice stays within 0.05 of that with 256 draws.
    assert abs(rewards[0] - 0.5) < 0.15
    assert np.mean(rewards[-3:]) > 0.85
    first = lines[0]
    # The sampler and the trainer compute the same numbers but for the order of sums in float32.
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert first["ratio/min"] == first["ratio/max"] == 1.0
    assert first["policy_version"] == 0 and lines[-1]["policy_version"] == 7
    assert all(line["lag/max"] == 0 for line in lines)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert samples[0]["reward"] >= samples[1]["reward"]
    assert samples[0]["rewards"] == {"even": samples[0]["reward"]}


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_never_stopped(config, tmp_path):
    options = ("checkpoint.every=2", "optim.name=sgd")
    completed = run(config, tmp_path / "whole", *options)
    run(config, tmp_path / "parts", *options, "run.max_steps=2")
    parts = run(config, tmp_path / "parts", *options, "run.allow_config_change=true")
    clocks = ("time", "seconds", "per_second", "memory", "mfu", "tflops")
    for a, b in zip(completed, parts, strict=True):
        names = {name for name in a.keys() | b.keys() if not any(c in name for c in clocks)}
        assert {k: a.get(k) for k in names} == {k: b.get(k) for k in names}
    first, right = read_params(tmp_path / "whole", 4), read_params(tmp_path / "parts", 4)
    for path, value in first.items():
        np.testing.assert_array_equal(value, right[path], err_msg=path)


REVERSED = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rl_toy_env import EvenTokens
class Reversed(EvenTokens):
    async def run(self, row, engine, sampling, index):
        episode = await super().run(row, engine, sampling, index)
        await asyncio.sleep(0.1 * (3 - index // 16 % 4))  # the round's last prompt ends first
        return episode
"""


@pytest.mark.slow
def test_asynchronous_rounds_without_lag_have_the_bits_of_synchronous_ones(config, tmp_path):
    (tmp_path / "reversed.py").write_text(REVERSED)
    words = (f"env.path={tmp_path}/reversed.py:Reversed", "rollout.devices=2", "run.max_steps=2")
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        run(config, folder, *words, f"rollout.mode={mode}", "rollout.max_lag=0")
    sync, asynchronous = (read_params(tmp_path / mode, 2) for mode in ("sync", "async"))
    for path, value in sync.items():
        np.testing.assert_array_equal(asynchronous[path], value, err_msg=path)


SLOW = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from rl_toy_env import EvenTokens
class Slow(EvenTokens):
    async def run(self, row, engine, sampling, index):
        episode = await super().run(row, engine, sampling, index)
        if index == 80:  # the first episode of the sixth prompt never ends
            await asyncio.sleep(1000)
        return episode
"""


@pytest.mark.slow
def test_the_local_engine_works_ahead_on_devices_of_its_own(config, tmp_path):
    """Gives up what no round can take any more, leaves out what is solved, replays."""
    (tmp_path / "slow.py").write_text(SLOW)
    lines = run(
        config,
        tmp_path / "run",
        *("rollout.mode=async", "rollout.devices=2", "rollout.max_lag=2", "run.max_steps=8"),
        *("task.importance_correction=token_truncate", "checkpoint.every=4"),
        *(f"env.path={tmp_path}/slow.py:Slow", "rollout.prompts_per_step=4"),
        *("rollout.curator=solved", "rollout.curator_options={threshold=0.5, bound=0.3}"),
        *("rollout.replay_share=0.25", "rollout.replay_size=8", "rollout.replay_max_lag=1"),
        "data.datasets.0.options={num_rows=12}",
    )
    lags = [line["lag/max"] for line in lines]
    total = {name: sum(line.get(name, 0) for line in lines) for line in lines for name in line}
    # Two rounds behind at most, and a round more where one is replayed.
    assert lags[0] == 0 and 2 <= max(lags) <= 3
    assert [line["policy_version"] for line in lines] == list(range(8))
    # Drawn by versions 0, 3 and 6; the third has not become too old.
    assert total["cancelled/stale"] == 2
    assert total["groups/replayed"] >= 6 and total["curator/skipped"] > 0
    # Weights of the token's own version drew it: with lag 0 both sides compute the same numbers.
    assert lines[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert lines[-1]["sampling/sampling_logp_difference/max"] > 1e-3


@pytest.mark.slow
def test_minibatches_and_iterations_are_steps_under_one_version(config, tmp_path):
    lines = run(
        config,
        tmp_path / "run",
        *("task.num_minibatches=2", "task.num_iterations=2", "run.max_steps=8"),
        *("task.beta=0.01", "task.objective=dapo"),
    )
    versions = [line["policy_version"] for line in lines if "policy_version" in line]
    assert versions == [0, 1] and "policy_version" in lines[4]
    # The first minibatch starts from the old policy and the reference; later ones have moved.
    assert lines[0]["ratio/max"] == pytest.approx(1.0, abs=1e-4)
    assert lines[1]["ratio/max"] > 1.01
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[4]["kl"] > 1e-4


@pytest.mark.slow
def test_a_rounds_numbers_wait_for_the_next_line_that_is_written(config, tmp_path):
    words = ("task.num_minibatches=2", "run.max_steps=4", "log.every=2")
    lines = run(config, tmp_path / "run", *words)
    assert [(line["step"], line["policy_version"]) for line in lines] == [(2, 0), (4, 1)]
    assert all("reward" in line for line in lines)


@pytest.mark.thorough
def test_a_mixed_reference_follows_and_comes_back_with_the_checkpoint(config, tmp_path):
    options = ("task.beta=0.01", "task.reference=mixed", "task.reference_every=2")
    options += ("task.reference_alpha=1.0", "checkpoint.every=3")
    completed = run(config, tmp_path / "whole", *options)
    # After step 2 the reference is the policy, so step 3 has no divergence.
    assert completed[1]["kl"] > 1e-5
    assert completed[2]["kl"] == pytest.approx(0.0, abs=1e-6)
    run(config, tmp_path / "parts", *options, "run.max_steps=3")
    parts = run(config, tmp_path / "parts", *options, "run.allow_config_change=true")
    assert parts[3]["kl"] == completed[3]["kl"]


def test_a_dry_run_plays_one_scripted_episode_and_draws_nothing(config, tmp_path, capsys):
    assert main(["--config", str(config), f"run.output_dir={tmp_path / 'run'}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "200 prompts" in out and "played one episode" in out and "{'even': 0." in out
    assert not (tmp_path / "run").exists()
    assert main(["preprocess", "--config", str(config)]) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (["my_rewards.py:needs"], "missing 1 required positional argument: 'gold'"),
        (["my_rewards.py:nothing_there"], "has no 'nothing_there'"),
        (["my_rewards.py:nan"], "returned NaN for a completion"),
        (["my_rewards.py:fine", "{prompt = 'q'}"], "'q' (for prompt), but the columns"),
        (["my_rewards.py:fine", "{prompt = 'question'}"], ""),
    ],
)
def test_a_dry_run_tries_rewards_and_columns(tmp_path, capsys, monkeypatch, words, message):
    """On rows of one's own, whose columns are renamed as in supervised training."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "def needs(completions, gold): return [1.0]\n"
        "def nan(completions, **columns): return [float('nan')]\n"
        "def fine(completions, prompt, question, **columns):\n"
        "    assert prompt == question == ['why?'] and completions == ['I do not know.']\n"
        "    return [0.5]\n"
    )
    (tmp_path / "rows.jsonl").write_text(3 * '{"question": "why?", "answer": "so"}\n')
    function, fields = [*words, "{prompt = 'question'}"][:2]
    (tmp_path / "rl.toml").write_text(
        CONFIG.partition("[[data.datasets]]")[0]
        + f'[[data.datasets]]\npath = "rows.jsonl"\nfields = {fields}\n[task]\nkind = "rl"\n'
        + f'[[rewards]]\nfunction = "{function}"\n[sampling]\ntemperature = 1.0\n'
        + "max_new_tokens = 8\n"
    )
    code = main(["--config", "rl.toml", "--dry-run", "rollout.retries=0"])
    captured = capsys.readouterr()
    assert (code, message in captured.err) == ((2, True) if message else (0, True)), captured
    if not message:
        assert "rewards {'fine': 0.5}" in captured.out


@pytest.mark.slow  # a compilation each; the losses themselves have fast tests
@pytest.mark.parametrize(
    "objective",
    [
        *"gspo cispo rloo reinforce_baseline m2po_clip".split(),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in "dr_grpo bnpo gdpo reinforce sapo luspo vespo gmpo".split()
        ),
    ],
)
def test_every_objective_takes_a_step(config, tmp_path, objective):
    (line,) = run(
        config,
        tmp_path / "run",
        *("run.max_steps=1", f"task.objective={objective}"),
    )
    assert line["grad_norm"] > 0 and np.isfinite(line["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, name",
    [
        (["task.objective=m2po_mask"], "m2/masked_share"),
        pytest.param(
            ["task.objective=rloo", "task.beta=0.1", "task.reward_clip_range=[0.2, 0.9]"],
            "kl",
            marks=pytest.mark.thorough,
        ),
        (["adapter.kind=lora", "task.beta=0.1", "task.entropy_coef=0.01"], "kl"),
    ],
)
def test_what_needs_more_than_the_loss_is_there(config, tmp_path, words, name):
    (line,) = run(config, tmp_path / "run", "run.max_steps=1", *words)
    assert name in line and line["grad_norm"] > 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["sampling.temperature=0"], "sampling.temperature above 0"),
        (["sampling.top_p=0.9"], "sampling.top_p cuts"),
        (["rollout.mode=async"], "set rollout.devices to how many"),
        (["rollout.mode=async", "rollout.devices=4"], "at least one must be left"),
        (["rollout.group_size=1"], "task.baseline group compares"),
        (["task.num_minibatches=3"], "does not divide"),
        (["task.reward_clip_range=[1, 0]"], "give the lower bound first"),
        (["task.objective=gdpo", "task.reward_clip_range=[0, 1]"], "bounds a sum of rewards"),
        (["task.reference=adapter_off", "task.beta=0.1"], "needs an adapter"),
        (["task.kind=sft"], "has no effect without task.kind"),
        (["sampling.max_new_tokens=64"], "leaves no room for a prompt within data.sequence_len 64"),
        (["task.objectiv=grpo"], "did you mean 'objective'"),
    ],
)
def test_mistakes_are_named(config, tmp_path, capsys, words, message):
    assert main(["--config", str(config), f"run.output_dir={tmp_path / 'run'}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_tables_that_an_adapter_folder_trains_in_full_are_part_of_the_reference():
    """With adapter.path the config does not say so: only the folder's adapter does."""
    tables = Adapter({}, ("embed.embedding",))
    assert find_reference("auto", None) == "start"
    assert find_reference("auto", Adapter({})) == "bare"
    assert find_reference("auto", tables) == "start"
    assert find_reference("frozen", tables) == "start"
    with pytest.raises(UserError, match="embed.embedding"):
        find_reference("adapter_off", tables)
