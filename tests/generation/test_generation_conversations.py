"""A run of conversations through the front door: two datasets with environments and rewards of
their own, a template that rewrites history, rewarded turns, all answers kept."""

import json

import pytest
from toy_run import MODEL

from jaxtrain.config import validate_config
from jaxtrain.errors import UserError
from jaxtrain.main import main

DROPS_THOUGHTS = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
WORLD = """
async def ask(row, chat):
    for question in row["questions"]:
        chat.say(question)
        answer = await chat.draw()
        chat.reward(len(answer.raw) % 3)
    parts = len(chat._history.sequences)
    return chat.finish(reward={"length": float(len(answer.raw))}, parts=parts)

def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]

def odd(completion_ids, parity, **columns):
    return [float(p == "odd") for p in parity]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversations")
    (folder / "template.jinja").write_text(DROPS_THOUGHTS)
    (folder / "world.py").write_text(WORLD)
    rows = [{"questions": ["a?", "b?", "c?"][: 2 + n % 2]} for n in range(4)]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"prompt": f"{n}?", "parity": "odd"} for n in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rl.toml").write_text(
        f"""{MODEL}
[run]
output_dir = "{folder / "run"}"
max_steps = 3
export = false
[data]
sequence_len = 192
shuffle = false
[[data.datasets]]
path = "{folder / "talks.jsonl"}"
env = {{ kind = "{folder / "world.py"}:ask" }}
rewards = ["even"]
[[data.datasets]]
path = "{folder / "sums.jsonl"}"
[[rewards]]
function = "{folder / "world.py"}:even"
[[rewards]]
function = "{folder / "world.py"}:odd"
weight = 2.0
[task]
kind = "rl"
[rollout]
prompts_per_step = 4
group_size = 3
samples = "all"
zero_advantage = "keep"
[sampling]
temperature = 1.0
max_new_tokens = 8
[optim]
learning_rate = 1e-3
[[eval.sets]]
path = "{folder / "sums.jsonl"}"
split = "train[:1]"
rewards = ["odd"]
[log]
plot = false
"""
    )
    return folder


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_datasets_are_played_and_judged_as_their_own(folder):
    sections = (
        "model.architecture.max_position_embeddings=192",
        f"model.chat_template={folder / 'template.jinja'}",
    )
    assert main(["--config", str(folder / "rl.toml"), *sections]) == 0
    lines = read_lines(folder / "run/metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    first = steps[0]
    # Only the first dataset's rows are in the first round: its function's and its own rewards.
    assert {name for name in first if name.startswith("rewards/") and name.endswith("mean")} == {
        f"rewards/{name}/mean" for name in ("even", "ask", "length")
    }
    assert "reward/talks" in first and "reward/sums" not in first
    assert 2.0 < first["env/turns"] < 3.0 and first["env/parts"] > 1.5
    # The trainer sees each sequence as the sampler did.
    assert first["sampling/sampling_logp_difference/max"] < 1e-4
    assert steps[1]["rewards/odd/mean"] == 1.0 and "rewards/ask/mean" not in steps[1]
    assert steps[1]["reward/sums"] == pytest.approx(2.0 + steps[1]["rewards/even/mean"])
    (actual,) = [line for line in lines if "eval/sums/reward" in line]
    assert actual["eval/sums/reward"] == 2.0 and actual["eval/sums/avg@1"] == 1.0
    samples = [line for line in read_lines(folder / "run/samples.jsonl") if "set" not in line]
    assert [line["dataset"] for line in samples] == ["talks"] * 12 + ["sums"] * 12 + ["talks"] * 12
    entry = samples[0]
    assert entry["reward"] == pytest.approx(sum(entry["rewards"].values()))
    assert set(entry["rewards"]) == {"even", "ask", "length"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"datasets": [{"path": "x", "rewards": ["evn"]}]}}, "no reward 'evn'.*are: even"),
        ({"data": {"datasets": [{"path": "x", "rewards": []}]}}, "nothing judges the answers"),
        ({"eval": {"sets": [{"path": "x", "rewards": ["evn"]}]}}, "eval.sets.0.rewards: there is"),
        (
            {"rewards": [], "data": {"datasets": [{"path": "x"}]}},
            r"data.datasets.0: nothing judges the answers; add a \[\[rewards\]\]",
        ),
        (
            {
                "rewards": [{"function": "m:even"}, {"function": "m:odd"}],
                "data": {"datasets": [{"path": "x", "rewards": ["even"]}]},
            },
            r"rewards.1 \(odd\) judges nothing",
        ),
        (
            {"data": {"datasets": [{"path": "x", "env": {"kind": "tools"}}]}},
            "env.kind tools needs functions",
        ),
        (
            {
                "task": {"kind": "sft"},
                "rewards": [],
                "data": {"datasets": [{"path": "x", "env": {}}]},
            },
            "data.datasets.0.env has no effect while task.kind is not",
        ),
        (
            {
                "data": {
                    "datasets": [{"path": "x"}],
                    "eval_datasets": [{"path": "x", "rewards": []}],
                }
            },
            "eval_datasets",
        ),
    ],
)
def test_names_and_places_of_rewards_are_checked(change, message):
    table = {
        "run": {"max_steps": 1},
        "model": {"path": "x"},
        "task": {"kind": "rl"},
        "rewards": [{"function": "m:even"}],
        "data": {"datasets": [{"path": "x"}]},
        "sampling": {"temperature": 1.0},
    }
    with pytest.raises(UserError, match=message):
        validate_config({**table, **change}, "test")
