"""Sets of problems through the front door: in the loop of an RL and of an SFT run and by the verb,
with the numbers recomputed from the answers that samples.jsonl keeps."""

import csv
import json
from pathlib import Path

import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.main import main

CONFIG = f"""
[run]
max_steps = 2
export = false
{MODEL}
[data]
sequence_len = 64

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 50 }}

[rollout]
prompts_per_step = 2
group_size = 4

{EVEN_TOKENS}
[optim]
learning_rate = 1e-2

[log]
plot = false
"""
PROBLEMS = ["What is 2 + 3?", "Say seven twice.", "How many legs have two cats?"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with a config of each task and a jsonl set of problems."""
    folder = tmp_path_factory.mktemp("sets")
    rows = [{"messages": [{"content": ""}, {"content": text}]} for text in PROBLEMS]
    (folder / "legs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    provided = f'path = "{folder / "legs.jsonl"}"\nk = 4\nthreshold = 0.5\n'
    sets = f"\n[eval]\nevery = 1\nat_start = true\nshow = 1\n[[eval.sets]]\n{provided}"
    (folder / "rl.toml").write_text(CONFIG + '\n[task]\nkind = "rl"\n' + sets)
    # builtin:calculator's conversations fit no row of 64 tokens, and SFT has no rollouts.
    rollouts = CONFIG[CONFIG.index("[rollout]") : CONFIG.index("[env]")]
    sft = CONFIG.replace(rollouts, "").replace("sequence_len = 64", "sequence_len = 256")
    sft = sft.replace("max_position_embeddings = 64", "max_position_embeddings = 256")
    (folder / "sft.toml").write_text(sft + sets)
    return folder


def run(*words) -> int:
    return main([str(word) for word in words])


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_evals(folder) -> dict[int, dict[str, float]]:
    """{step: what eval.sets gave}."""
    lines = {line["step"]: line for line in read(folder / "metrics.jsonl") if "eval/" in str(line)}
    return {
        step: {name: value for name, value in line.items() if name.startswith("eval/legs/")}
        for step, line in lines.items()
    }


def read_answers(folder) -> list[dict]:
    return [line for line in read(folder / "samples.jsonl") if line.get("set") == "legs"]


def check_numbers(numbers, answers):
    """Metrics of one evaluation against its answers: 3 problems in order, 4 answers each."""
    assert len(answers) == 12
    rewards = [answer["reward"] for answer in answers]
    assert numbers["eval/legs/reward"] == pytest.approx(sum(rewards) / 12)
    solved = [[r >= 0.5 for r in rewards[i : i + 4]] for i in (0, 4, 8)]
    assert numbers["eval/legs/avg@4"] == pytest.approx(sum(map(sum, solved)) / 12)
    assert numbers["eval/legs/pass@4"] == pytest.approx(sum(map(any, solved)) / 3)
    assert numbers["eval/legs/mean_length"] == pytest.approx(sum(a["tokens"] for a in answers) / 12)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("rl", marks=pytest.mark.slow),
        pytest.param("sft", marks=pytest.mark.thorough),
    ],
)
def trained(request, place):
    """(config, folder of its finished run)."""
    config, folder = place / f"{request.param}.toml", place / request.param
    assert run("--config", config, f"run.output_dir={folder}") == 0
    return config, folder


def test_the_loop_answers_the_sets_before_between_and_after(trained):
    _, folder = trained
    numbers = read_evals(folder)
    assert list(numbers) == [0, 1, 2]
    for step, actual in numbers.items():
        check_numbers(actual, [a for a in read_answers(folder) if a["step"] == step])
    answers = [[a["completion"] for a in read_answers(folder) if a["step"] == s] for s in numbers]
    assert answers[0] != answers[2], "the weights moved, and so should the answers"
    assert len(set(answers[0])) > 6, "each answer has noise of its own"
    log = (folder / "log.txt").read_text()
    assert "legs, 3 problems at step 2\nbest: reward" in log and "\nworst: reward" in log
    assert "held-out legs/avg@4: " in log


def test_the_verb_repeats_the_loops_answers(trained, place, capsys):
    config, folder = trained
    assert run("eval", folder) == 0
    out = capsys.readouterr().out
    assert "eval/legs/pass@4" in out and "best: reward" in out
    again = read_answers(folder / "eval")
    assert again == [a for a in read_answers(folder) if a["step"] == 2]
    (line,) = read(folder / "eval" / "metrics.jsonl")
    assert read_evals(folder)[2].items() <= line.items()

    # A benchmark's grader alone counts, whatever the environment says.
    rows = [
        {**row, "question": "2 + 2?", "answer": "so\n#### 4"} for row in read(place / "legs.jsonl")
    ]
    (file := place / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"--benchmark=gsm8k={file}", "eval.sets.0.k=2", "eval.sets.0.temperature=1.0")
    output = place / f"benchmark_{folder.name}"
    assert run("eval", folder, *words, "--output", output) == 0
    table = list(csv.DictReader((output / "results.csv").read_text().splitlines()))
    assert [(line["set"], line["problems"], line["k"]) for line in table] == [("gsm8k", "3", "2")]
    lines = read(output / "samples.jsonl")
    assert len(lines) == 6 and {a["reward"] - a["rewards"]["math"] for a in lines} == {0.0}

    # The config's own weights are those of step 0; another seed draws other answers.
    second = place / f"verb_{folder.name}"
    assert run("eval", "--config", config, f"run.output_dir={second}") == 0
    assert read_answers(second / "eval") == [a for a in read_answers(folder) if a["step"] == 0]
    assert run("eval", "--config", config, f"run.output_dir={second}", "sampling.seed=1") == 0
    reseeded = read_answers(second / "eval")
    assert len(reseeded) == 12, "written anew"
    assert reseeded != [a for a in read_answers(folder) if a["step"] == 0]


@pytest.mark.thorough
def test_a_resumed_run_evaluates_as_the_run_that_was_never_stopped(trained, place):
    config, folder = trained
    parts = place / f"parts_{folder.name}"
    words = ("--config", config, f"run.output_dir={parts}", "optim.lr_scheduler=constant")
    full = place / f"whole_{folder.name}"
    assert run(*words[:2], f"run.output_dir={full}", words[3]) == 0
    assert run(*words, "run.max_steps=1") == 0
    assert run(*words) == 0
    assert read_answers(parts) == read_answers(full)
    assert read_evals(parts) == read_evals(full)


@pytest.mark.slow
def test_rewards_may_come_late_to_a_run_that_does_not_train_on_them(place, tmp_path):
    config = place / "sft.toml"
    words = ("--config", config, f"run.output_dir={tmp_path}", "optim.lr_scheduler=constant")
    assert run(*words, "eval.sets=[]", "eval.every=null", "eval.at_start=false",
               "env.kind=single_turn", "env.path=null", "run.max_steps=1") == 0  # fmt: skip
    assert run(*words) == 0
    assert list(read_evals(tmp_path)) == [2]


@pytest.mark.slow
def test_columns_are_renamed_and_functions_judge(place, tmp_path, capsys):
    rows = "".join(json.dumps({"q": text, "a": "x"}) + "\n" for text in PROBLEMS)
    (tmp_path / "qa.jsonl").write_text(rows)
    words = ["eval", "--config", place / "sft.toml", f"run.output_dir={tmp_path}"]
    words += ["env.kind=single_turn", "env.path=null", "env.raw=true"]
    words += [f"eval.sets.0.path={tmp_path / 'qa.jsonl'}", "eval.sets.0.fields={prompt='q'}"]
    words += ["rewards.0.function=length", "rewards.0.options={max_tokens=5}"]
    code = run(*words)
    assert code == 0, capsys.readouterr().err
    answers = read(tmp_path / "eval" / "samples.jsonl")
    assert [a["prompt"] for a in answers] == [text for text in PROBLEMS for _ in range(4)]
    assert all(a["rewards"] == {"length": -1.0 if a["tokens"] > 5 else 0.0} for a in answers)
    (line,) = read(tmp_path / "eval" / "metrics.jsonl")
    assert line["eval/qa/reward"] < 0 and line["eval/qa/avg@4"] == 0


@pytest.mark.slow
def test_a_set_may_have_an_environment_of_its_own(place, tmp_path):
    words = ["eval.sets.1.path=builtin:calculator", "eval.sets.1.env.kind=calculator"]
    words += ["eval.sets.1.options.num_rows=3", "eval.sets.1.k=2"]
    assert run("eval", "--config", place / "sft.toml", f"run.output_dir={tmp_path}", *words) == 0
    answers = read(tmp_path / "eval" / "samples.jsonl")
    assert [(a["set"], *a["rewards"]) for a in answers] == (
        [("legs", "even")] * 12 + [("calculator", "solved")] * 6
    )
    (line,) = read(tmp_path / "eval" / "metrics.jsonl")
    assert line["eval/calculator/env/accuracy"] == line["eval/calculator/avg@2"] == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["eval.sets.0.path=gone.jsonl"],
            "no such file or folder: 'gone.jsonl' (key eval.sets.0.path)",
        ),
        (["eval.sets.0.split='test[9:]'"], "eval.sets.0: "),
        (["eval.sets.0.fields={prompt='question'}"], "eval.sets.0.fields names the column"),
        (["env.kind=single_turn", "env.path=null"], "nothing judges the answers"),
        (["env.path=gone.py:Env"], "the file gone.py does not exist"),
        (["rewards.0.function=gone.py:f"], "rewards, function 'gone.py:f'"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_mistakes_are_named_before_anything_is_trained(
    place, tmp_path, capsys, verb, words, message
):
    folder = f"run.output_dir={tmp_path / 'run'}"
    assert run(verb, "--config", place / "sft.toml", folder, *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or verb == "train"


MUTE = """
class Mute:
    def __init__(self, tokenizer):
        from rl_toy_env import EvenTokens
        self.env = EvenTokens(tokenizer)

    async def run(self, row, engine, sampling, index):
        episode = await self.env.run(row, engine, sampling, index)
        episode.rewards = {}
        return episode
"""


def test_answers_that_nothing_judges_are_a_mistake(place, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "mute.py").write_text(MUTE)
    words = [f"run.output_dir={tmp_path}", f"env.path={tmp_path / 'mute.py'}:Mute"]
    assert run("eval", "--config", place / "sft.toml", *words) == 2
    assert "legs.jsonl): no reward judges the answers" in capsys.readouterr().err
    words = ["eval.sets=[]", "eval.every=null", "eval.at_start=false"]
    words += ["env.kind=single_turn", "env.path=null"]
    assert run("eval", "--config", place / "sft.toml", *words) == 2
    assert "there is nothing to evaluate" in capsys.readouterr().err


def test_a_dry_run_counts_the_problems(place, tmp_path, capsys):
    assert run("--config", place / "rl.toml", f"run.output_dir={tmp_path}", "--dry-run") == 0
    shown = "".join(capsys.readouterr().out.split())  # wrapped where a long path puts it
    assert "legs.jsonl:3problems,4answerseach" in shown
