"""Reinforcement learning in real processes: process 0 samples, all train what one would train."""

import json
import re
import signal
import sys
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_distributed_processes import finish, output, start, wait_for_step
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.main import main
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

sys.path.append(str(Path(__file__).parents[1] / "generation"))
from fake_vllm import BODY, FakeVllm

CONFIG = f"""
[run]
max_steps = 4
export = false
{MODEL}
[data]
sequence_len = 64

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 100 }}

[task]
kind = "rl"
objective = "dapo"
num_minibatches = 2
beta = 0.01

[rollout]
prompts_per_step = 4
group_size = 4

{EVEN_TOKENS}
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[eval]
at_start = true

[[eval.sets]]
path = "builtin:calculator"
name = "even"
k = 2
threshold = 0.5
options = {{ num_rows = 6 }}

[log]
plot = false
console = "plain"
"""


def numbers(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock or the memory says."""
    timed = ("seconds", "per_second", "time", "memory", "mfu", "tflops", "sampling/", "mismatch/")
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in lines
    ]


@pytest.mark.slow
def test_two_processes_train_and_evaluate_what_one_does(tmp_path):
    single, two = tmp_path / "one", tmp_path / "two"
    running = start(two, 2, config_text=CONFIG)
    code = main(["--config", str(two / "config.toml"), f"run.output_dir={single / 'run'}"])
    assert finish(running) == [0, 0], output(two, 0) + output(two, 1)
    assert code == 0
    expected, actual = numbers(single), numbers(two)
    assert [line["step"] for line in actual] == [0, 1, 2, 3, 4, 4]
    assert actual[0]["eval/even/mean_length"] > 0 and actual[1]["reward_std"] > 0
    for a, b in zip(expected, actual, strict=True):
        # The same tokens; sums over devices in another order round differently in float32.
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)
    assert (single / "run" / "samples.jsonl").read_text() == (
        two / "run" / "samples.jsonl"
    ).read_text()


POLICIES = """
[adapter]
kind = "lora"
rank = 4

[policies.even]
trained = true

[policies.odd]
trained = true
"""


@pytest.mark.thorough
def test_two_processes_train_several_policies_as_one_does(tmp_path):
    single, two = tmp_path / "one", tmp_path / "two"
    game = tmp_path / "game.py"
    folder = str(Path(__file__).parents[1] / "methods")
    game.write_text(f"import sys\nsys.path.append({folder!r})\nfrom rl_policies_env import Both\n")
    words = (f"env.path={game}:Both", "run.export=true", "eval.sets.0.options.num_rows=2")
    running = start(two, 2, *words, config_text=CONFIG + POLICIES)
    code = main(["--config", str(two / "config.toml"), f"run.output_dir={single / 'run'}", *words])
    assert finish(running) == [0, 0], output(two, 0) + output(two, 1)
    assert code == 0
    expected, actual = numbers(single), numbers(two)
    assert "odd/loss" in actual[3] and actual[0]["eval/even/odd/mean_length"] > 0
    for a, b in zip(expected, actual, strict=True):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5)
    for name in ("even", "odd"):
        file = Path("run/model", name, "adapter_model.safetensors")
        actual_tensors, expected_tensors = load_file(two / file), load_file(single / file)
        assert max(abs(x).max() for x in actual_tensors.values()) > 0.1
        for path, value in actual_tensors.items():
            np.testing.assert_allclose(value, expected_tensors[path], atol=1e-5, err_msg=path)


PROGRESS = re.compile(r"^(seconds|programs): |\(\d+ s\)$")
"""Lines about times, which differ from one run to the next."""


@pytest.mark.thorough
def test_the_verb_eval_says_alike_on_two_processes(tmp_path):
    """Held-out loss by all, sets by process 0, of a model that nobody trained."""
    held_out = ["data.eval_datasets.0.path=builtin:calculator"]
    held_out += ["data.eval_datasets.0.options.num_rows=9", "sampling.max_new_tokens=8"]
    sets = ["eval.sets.0.path=builtin:calculator", "eval.sets.0.env.kind=calculator"]
    sets += ["eval.sets.0.options.num_rows=4"]
    verb, texts = ("eval", "--config", "config.toml"), []
    for count in (1, 2):
        running = start(tmp_path, count, *held_out, *sets, devices=4 // count, verb=verb)
        assert finish(running) == [0] * count, output(tmp_path, 0) + output(tmp_path, count - 1)
        lines = output(tmp_path, 0)
        texts.append([line for line in lines if not PROGRESS.search(line)])
        answers = (tmp_path / "run" / "eval" / "samples.jsonl").read_text().splitlines()
        assert len(answers) == 4
    assert output(tmp_path, 1) == []
    assert texts[0] == texts[1] and any("perplexity" in line for line in texts[0])


def rewards_by_step(folder: Path) -> dict[int, tuple[float, float]]:
    rows = {line["step"]: line for line in numbers(folder) if "reward" in line}
    return {step: (line["reward"], line["loss"]) for step, line in rows.items()}


@pytest.mark.thorough
def test_a_killed_run_goes_on_where_it_was(tmp_path):
    """With what it would have trained, nothing twice, when the process with the prompts dies."""
    reference, killed = tmp_path / "whole", tmp_path / "killed"
    words = ["run.max_steps=8", "checkpoint.every=2", "eval.at_start=false"]
    assert finish(start(reference, 2, *words, config_text=CONFIG)) == [0, 0]
    running = start(killed, 2, *words, config_text=CONFIG)
    wait_for_step(killed, 3)
    running[0].kill()
    assert sorted(finish(running, 60)) == [-signal.SIGKILL, 1]
    lines = output(killed, 1)
    assert "process 0" in lines[-1] and "ended without a word" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert finish(start(killed, 2, *words, config_text=CONFIG)) == [0, 0], output(killed, 0)
    # The same programs on the same devices: equal to the last bit.
    assert rewards_by_step(killed) == rewards_by_step(reference)


BROKEN = """
from jaxtrain.generation.episodes import Episode

class Broken:
    def __init__(self, tokenizer, **options):
        self.left = 20

    async def run(self, row, engine, sampling, index):
        self.left -= 1
        if self.left <= 0:
            raise KeyError("the world has ended")
        answer = await engine.generate([5, 6], sampling, (), index)
        drawn = len(answer.tokens)
        rewards = {"first": float(answer.tokens[0] % 2)}
        return Episode([5, 6, *answer.tokens], [False] * 2 + [True] * drawn,
            [0.0] * 2 + list(answer.logprobs), [-1] * 2 + list(answer.versions),
            answer.finish_reason, rewards=rewards)
"""


@pytest.mark.thorough
def test_failures_that_persist_on_process_0_end_all_saved_and_are_told_once(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    words = [f"env.path={tmp_path / 'broken.py'}:Broken", "eval.sets=[]", "eval.at_start=false"]
    running = start(tmp_path / "run", 2, *words, "rollout.retries=0", config_text=CONFIG)
    codes = finish(running, 200)
    lines = [line for i in range(2) for line in output(tmp_path / "run", i)]
    assert codes == [1, 1], lines
    assert sum("of the last 64 episodes failed" in line for line in lines) == 1
    assert sum("Traceback" in line for line in lines) == 1
    saved = [path.name for path in (tmp_path / "run" / "run" / "checkpoints").iterdir()]
    assert saved == ["2"], "both saved the round that was trained"


class Server(FakeVllm):
    """Keeps the last adapter that it was given."""

    async def _load_lora_adapter(self, request):
        folder = Path(request[BODY]["lora_path"])
        self.adapter = load_file(folder / "adapter_model.safetensors")
        return await super()._load_lora_adapter(request)


# The scripted servers answer all alike: an entropy bonus moves the weights nevertheless.
SERVED = ["rollout.zero_advantage=keep", "task.num_minibatches=1", "task.entropy_coef=0.1"]
SERVED += ["task.beta=0", "rollout.vllm.health_seconds=0.1"]


def list_tensors() -> dict[str, list[int]]:
    """Name and shape of what the server's model is made of."""
    architecture = families.config_from_hf(tomllib.loads(CONFIG)["model"]["architecture"])
    shapes, _ = split_model(build.abstract(architecture))
    entries = families.family(architecture).names(architecture)
    tensors = {}
    for entry in entries:
        tensors |= entry.op.shapes(shapes[entry.param].shape)
    return {name: list(shape) for name, shape in tensors.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sync, mode",
    [("lora", "streaming"), pytest.param("delta", "async", marks=pytest.mark.thorough)],
)
def test_two_processes_bring_servers_what_they_export(tmp_path, sync, mode):
    fake = Server(tensors=None if sync == "lora" else list_tensors())
    words = ["run.export=true", "rollout.engine=vllm", *SERVED]
    parts = ["rollout.mode=prefetch", "rollout.streaming=true", "task.num_minibatches=2"]
    words += parts if mode == "streaming" else [f"rollout.mode={mode}"]
    words += [f'rollout.vllm.servers=["{fake.url}"]', f"rollout.vllm.sync={sync}"]
    words += ["adapter.kind=lora", "adapter.rank=4"] if sync == "lora" else []
    try:
        running = start(tmp_path, 2, *words, config_text=CONFIG)
        assert finish(running) == [0, 0], output(tmp_path, 0) + output(tmp_path, 1)
        steps = [line for line in numbers(tmp_path) if "loss" in line]
        assert len(steps) == 4 and any("eval/even/reward" in line for line in numbers(tmp_path))
        exported = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
        if sync == "lora":
            assert fake.adapter.keys() == exported.keys()
            for name, value in exported.items():
                np.testing.assert_array_equal(fake.adapter[name], value, err_msg=name)
        else:
            tensors = fake.shelves[0].tensors
            assert tensors.keys() == exported.keys()
            for name, value in exported.items():
                expected_bits = value.astype(ml_dtypes.bfloat16).view(np.uint16).ravel()
                np.testing.assert_array_equal(tensors[name].bits, expected_bits, err_msg=name)
    finally:
        fake.kill()


@pytest.mark.thorough
def test_a_signal_while_process_0_waits_for_answers_stops_all_at_one_step(tmp_path):
    fake = Server()
    fake.script.extend(["ok"] * 16 + ["stall"] * 100)
    words = ["rollout.engine=vllm", *SERVED, "eval.sets=[]", "eval.at_start=false"]
    words += [f'rollout.vllm.servers=["{fake.url}"]', "rollout.vllm.sync=lora"]
    words += ["adapter.kind=lora", "adapter.rank=4"]
    try:
        running = start(tmp_path, 2, *words, config_text=CONFIG)
        wait_for_step(tmp_path, 1)
        running[1].send_signal(signal.SIGTERM)
        assert finish(running, 60) == [0, 0]
        assert "SIGTERM: saved step 1" in output(tmp_path, 0)[-1]
        saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
        assert saved == ["1"] and not (tmp_path / "run" / "model").exists()
    finally:
        fake.kill()
