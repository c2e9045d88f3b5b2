"""Full runs whose episodes are played on Ray: the answers, numbers and weights of the same run in
one process; a service that is started once and serves two runs, the second of which resumes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import FakeVllm
from safetensors.numpy import load_file

from jaxtrain.main import main

sys.path.append(str(Path(__file__).parents[1]))
from toy_run import EVEN_TOKENS, MODEL

pytest.importorskip("ray", reason="rollouts on several machines need ray: extra cluster")
pytestmark = pytest.mark.slow

CONFIG = f"""
[run]
max_steps = 3
{MODEL}
[adapter]
kind = "lora"
rank = 4

[data]
sequence_len = 64

[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 40 }}

[task]
kind = "rl"
entropy_coef = 0.1

[rollout]
engine = "vllm"
prompts_per_step = 4
group_size = 4
zero_advantage = "keep"
samples = "all"

[rollout.vllm]
sync = "lora"
health_seconds = 0.5

{EVEN_TOKENS}
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[log]
plot = false
console = "plain"
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder, fake = tmp_path_factory.mktemp("runs"), FakeVllm()
    (folder / "config.toml").write_text(CONFIG)

    def train(name, *words, verb=()):
        position = [] if verb else [f"run.output_dir={folder / name}"]
        servers = f'rollout.vllm.servers=["{fake.url}"]'
        code = main([*verb, "--config", str(folder / "config.toml"), servers, *position, *words])
        assert code == 0
        return folder / name

    yield train
    fake.kill()


@pytest.fixture(scope="module")
def alone(train):
    """The run whose episodes are played in the trainer's process."""
    return train("alone")


def read(run, file):
    return [json.loads(line) for line in (run / file).read_text().splitlines()]


def adapter(run):
    return load_file(run / "model" / "adapter_model.safetensors")


def require_equal(entry, second):
    assert read(entry, "samples.jsonl") == read(second, "samples.jsonl")
    actual, expected = adapter(entry), adapter(second)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_a_run_on_ray_is_the_run_in_one_process(train, alone):
    remote_result = train("there", "rollout.service=ray", "rollout.ray.worker_cpus=0.5")
    assert len(read(alone, "samples.jsonl")) == 3 * 16
    require_equal(remote_result, alone)
    numbers = read(remote_result, "metrics.jsonl")
    assert numbers[-1]["vllm/requests"] >= 3 * 16 and numbers[-1]["ray/service_restarts"] == 0


def test_a_service_serves_a_run_and_then_its_resumed_one(train, alone):
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    words = [f"rollout.ray.address={cluster.address}", "rollout.service=ray://shared"]
    try:
        train("", *words, verb=["serve-rollouts"])
        first = train("run", *words, "run.max_steps=2", "run.export=false")
        assert len(read(first, "samples.jsonl")) == 2 * 16
        train("run", *words)
        require_equal(first, alone)
        assert main(["stop-rollouts", "shared", f"--address={cluster.address}"]) == 0
        assert main(["stop-rollouts", "shared", f"--address={cluster.address}"]) == 2
    finally:
        cluster.shutdown()
