"""eval.sets answered by (scripted) vLLM servers that got the run's weights: loop and verb."""

import json
from collections import Counter

import pytest
from fake_vllm import FakeVllm
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.rollout.problem_sets import read_problems

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


@pytest.mark.slow
def test_the_loop_asks_the_servers_under_each_version(fake, config, tmp_path):
    assert main(["--config", str(config)]) == 0
    # Before the first step 5 x 2 answers and the round's 2 x 2; after it the sets once more.
    assert count_versions(fake) == {"0": 14, "1": 10}
    answers = [line for line in read(tmp_path / "run" / "samples.jsonl") if "set" in line]
    assert [a["step"] for a in answers] == [0] * 10 + [1] * 10
    evals = [x for x in read(tmp_path / "run" / "metrics.jsonl") if "eval/calculator/avg@2" in x]
    assert [line["step"] for line in evals] == [0, 1]
    rewards = [a["reward"] for a in answers if a["step"] == 1]
    assert evals[1]["eval/calculator/reward"] == pytest.approx(sum(rewards) / 10)


def test_the_verb_brings_the_weights_and_asks_the_servers(fake, config, tmp_path):
    assert main(["eval", "--config", str(config)]) == 0
    assert count_versions(fake) == {"0": 10}
    assert len(read(tmp_path / "run" / "eval" / "samples.jsonl")) == 10
    assert not (tmp_path / "run" / "adapters").exists()
    loaded = [body for path, body in fake.log if path == "/v1/load_lora_adapter"]
    assert [str(tmp_path / "run" / "eval") in body["lora_path"] for body in loaded] == [True]
