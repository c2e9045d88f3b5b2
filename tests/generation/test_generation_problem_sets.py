"""eval.sets answered by (scripted) vLLM servers that got the run's weights: loop and verb."""

import json
from collections import Counter

import pytest
from fake_vllm import FakeVllm
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.errors import UserError
from jaxtrain.generation.evaluation.background import NOTE
from jaxtrain.generation.evaluation.problem_sets import read_problems
from jaxtrain.main import main

CONFIG = f"""
[run]
max_steps = 1
export = false
output_dir = "OUT"
{MODEL}
[adapter]
kind = "lora"
rank = 4

[data]
sequence_len = 64

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 50 }}

[task]
kind = "rl"

[rollout]
engine = "vllm"
prompts_per_step = 2
group_size = 2
zero_advantage = "keep"

[rollout.vllm]
servers = ["URL"]
sync = "lora"
health_seconds = 0.1

{EVEN_TOKENS}
[eval]
at_start = true

[[eval.sets]]
path = "builtin:calculator"
options = {{ num_rows = 5 }}
k = 2

[log]
plot = false
"""


@pytest.fixture
def fake():
    fake = FakeVllm()
    yield fake
    fake.kill()


@pytest.fixture
def config(fake, tmp_path):
    text = CONFIG.replace("URL", fake.url)
    (tmp_path / "rl.toml").write_text(text.replace("OUT", str(tmp_path / "run")))
    return tmp_path / "rl.toml"


def count_versions(fake) -> Counter:
    """{version: requests for tokens}."""
    return Counter(body["model"].rpartition("-")[2] for body in fake.asked)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_mistake_in_a_set_names_its_key_once():
    for path, words in (("no.jsonl", "eval.sets.2.path"), ("[", "eval.sets.2")):
        with pytest.raises(UserError, match=words) as error:
            read_problems(2, EvalSetConfig(path=path))
        assert str(error.value).count("eval.sets.2") == 1


def read_evals(folder) -> dict[int, dict]:
    """Lines of metrics.jsonl that have the sets' numbers, in the order in which they came."""
    lines = read(folder / "metrics.jsonl")
    return {line["step"]: line for line in lines if "eval/calculator/avg@2" in line}


@pytest.mark.slow
def test_the_loop_has_the_sets_answered_under_each_version_while_it_trains(config, tmp_path, fake):
    """By one of two servers, which is slow; the last one by both, and one that was broken off."""
    fake_vllm = FakeVllm()
    fake_vllm.token_seconds = 0.02
    urls = f'rollout.vllm.servers=["{fake_vllm.url}", "{fake.url}"]'
    words = ["--config", str(config), urls, f'rollout.vllm.eval_servers=["{fake_vllm.url}"]']
    try:
        assert main([*words, "run.max_steps=4", "eval.every=2"]) == 0
        evals = read_evals(tmp_path / "run")
        assert list(evals) == [0, 2, 4]
        assert [evals[step]["eval/policy_version"] for step in (0, 2)] == [0, 2]
        lines = [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl")]
        assert lines != sorted(lines), "training went on meanwhile"
        answers = [line for line in read(tmp_path / "run" / "samples.jsonl") if "set" in line]
        assert [a["step"] for a in answers] == [0] * 10 + [2] * 10 + [4] * 10
        # The sets' 5 x 2 answers of each version, and rounds of 2 x 2: each once, by whomever.
        requests = count_versions(fake) + count_versions(fake_vllm)
        assert requests == {"0": 14, "1": 4, "2": 14, "3": 4, "4": 10}
        rewards = [a["reward"] for a in answers if a["step"] == 2]
        assert evals[2]["eval/calculator/reward"] == pytest.approx(sum(rewards) / 10)
        # As if the run had been killed while the sets were answered by the last version.
        metrics = tmp_path / "run" / "metrics.jsonl"
        rest = [line for line in read(metrics) if "eval/calculator/avg@2" not in line]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in rest))
        (tmp_path / "run" / NOTE).write_text('{"step": 4}')
        extra = ["run.max_steps=5", "run.allow_config_change=true"]
        assert main([*words, *extra]) == 0
        assert list(read_evals(tmp_path / "run")) == [4, 5]
        assert not (tmp_path / "run" / NOTE).exists()
    finally:
        fake_vllm.kill()


@pytest.mark.slow
def test_the_verb_brings_the_weights_and_asks_the_servers(fake, config, tmp_path):
    assert main(["eval", "--config", str(config)]) == 0
    assert count_versions(fake) == {"0": 10}
    assert len(read(tmp_path / "run" / "eval" / "samples.jsonl")) == 10
    assert not (tmp_path / "run" / "adapters").exists()
    loaded = [body for path, body in fake.log if path == "/v1/load_lora_adapter"]
    assert [str(tmp_path / "run" / "eval") in body["lora_path"] for body in loaded] == [True]
