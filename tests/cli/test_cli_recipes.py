"""Recipes of whole pipelines, on tiny models: the commands and configs that docs/recipes.md has."""

import json

import pytest

from jaxtrain.main import main
from tests.toy_run import save_model

SMALL = [
    "model.param_dtype=float32",
    "model.compute_dtype=float32",
    "parallel.data=-1",
    "parallel.fsdp=1",
    "data.num_workers=0",
    "eval.max_batches=1",
    "checkpoint.every=null",
]


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_blend(path):
    """Conversations in the form of open-perfectblend, some of them unusable."""
    rows = []
    for i in range(24):
        turns = [("human", f"What is {i} + {i}?"), ("gpt", "Somebody else's words.")]
        turns += [("human", f"And {i} + 1?"), ("gpt", "More of them.")] * (i % 2)
        rows.append({"source": "math", "conversations": turns})
    for row in rows:
        turns = row["conversations"]
        row["conversations"] = [{"from": name, "value": text} for name, text in turns]
    rows.insert(3, {"source": "none", "conversations": []})
    rows.insert(5, {"source": "long", "conversations": [{"from": "human", "value": "word " * 600}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_a_draft_learns_the_targets_answers_to_a_blend(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "target", num_hidden_layers=3, max_position_embeddings=512)
    write_blend(tmp_path / "blend.jsonl")
    words = ["generate", "target", "--input", "blend.jsonl", "--output", "answers/blend"]
    words += ["--messages", "--drop-malformed", "--shard-rows", "10"]
    assert main([*words, "sampling.max_new_tokens=48"]) == 0
    output = capsys.readouterr()
    assert "1 of 26 rows left out; the first: blend.jsonl line 4" in output.err
    assert "1 of 25 prompts leave no room (number 4)" in output.err
    rows = [
        row for file in sorted((tmp_path / "answers/blend").iterdir()) for row in read_lines(file)
    ]
    assert len(rows) == 24 and {row["source"] for row in rows} == {"math"}
    assert all("Somebody" not in row["messages"][-1]["content"] for row in rows)
    assert rows[1]["messages"][1]["content"] == "Somebody else's words."
    assert rows[1]["conversations"] is None

    train = ["--config", f"{kind}_perfectblend", "model.path=target", *SMALL]
    train += ["data.datasets.0.path=answers/blend", "data.datasets.1.path=answers/blend"]
    train += ["data.datasets.0.held_out=0.2", "data.datasets.1.held_out=0.2"]
    train += ["data.sequence_len=256", "data.micro_batch_size=1", "data.global_batch_size=4"]
    if kind == "dflash":
        train += ["task.draft.target_layers=[0, 1]", "task.draft.mask_token_id=500"]
        train += ["task.num_anchors=8", "task.draft.num_layers=1", "task.min_loss_tokens=4"]
    else:
        train += ["task.draft_vocab_size=256", "task.draft.target_layers=[0, 1, 2]"]
    assert main([*train, "--dry-run"]) == 0
    assert main([*train, "run.max_steps=2", "run.output_dir=run"]) == 0
    numbers = [row for row in read_lines(tmp_path / "run/metrics.jsonl") if "accept_len" in row]
    assert [row["step"] for row in numbers] == [1, 2]
    assert (tmp_path / "run/model/config.json").is_file()


SETS = {
    "aime24": {"problem": "What is 1 + 2?", "answer": "3"},
    "aime25": {"problem": "What is 2 + 2?", "answer": "4"},
    "amc23": {"question": "What is 3 + 2?", "answer": "5"},
    "math500": {"problem": "What is 1/2?", "answer": "\\frac{1}{2}"},
    "minerva": {"question": "What is 5 + 2?", "answer": "7"},
}


@pytest.mark.slow
def test_m2po_on_mathematics(tmp_path, monkeypatch, capsys):
    """The config as it is for servers, by full and delta sync, and two rounds by the local engine;
    all sets are answered and judged."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "base", max_position_embeddings=512)
    problems = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    words = ["--config", "rl_math_m2po", "model.path=base", "data.datasets.0.path=train.jsonl"]
    words += ["data.sequence_len=256", "sampling.max_new_tokens=8", *SMALL[:5]]
    words += ["rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.reward_workers=1"]
    for index, (name, row) in enumerate(SETS.items()):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        words.append(f"eval.sets.{index}.path={name}.jsonl")
    servers = ["rollout.vllm.launch=none", "rollout.vllm.replicas=1", "rollout.vllm.gpus=null"]
    servers += ['rollout.vllm.servers=["http://127.0.0.1:1"]']
    for sync in ("full", "delta"):
        assert main([*words, *servers, f"rollout.vllm.sync={sync}", "--dry-run"]) == 0
        output = capsys.readouterr().out
        assert all(f"{name}.jsonl: 1 problems, 4 answers each" in output for name in SETS)

    local = ["rollout.engine=local", "rollout.vllm={}", "rollout.mode=sync"]
    local += ["rollout.zero_advantage=keep", "run.max_steps=8", "run.output_dir=run"]
    assert main([*words, *local, "eval.every=4", "checkpoint.every=null"]) == 0
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    trend = [row["step"] for row in lines if "eval/average/avg" in row]
    assert trend == [0, 4, 8]
    assert all(f"eval/{name}/avg@4" in lines[0] | lines[-1] for name in SETS)
    assert len([row for row in lines if "loss" in row]) == 8
    prompts = {str(row.get("prompt")) for row in read_lines(tmp_path / "run/samples.jsonl")}
    assert any("put your final answer within \\boxed{}." in text for text in prompts), prompts
