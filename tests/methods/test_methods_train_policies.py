"""Several policies, adapters on one base: each is trained as it would be alone, and a resumed run
is the run that was never stopped."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_methods_rl import CONFIG

from jaxtrain.adapters.peft import write_peft
from jaxtrain.config import load_config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import open_params
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from jaxtrain.methods.reopen import open_trained

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "generation")]

from real_vllm import CLOSE, PYTHON, make_model  # noqa: E402

ADAPTER = """
[adapter]
kind = "lora"
"""
POLICIES = """
[policies.even]
trained = true

[policies.odd]
trained = true
"""
GAME = (f"env.path={HERE}/rl_policies_env.py:Both", "run.export=true")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "alone.toml").write_text(CONFIG + ADAPTER)
    (folder / "both.toml").write_text(CONFIG + ADAPTER + POLICIES)
    return folder


def run(config, folder, *words) -> list[dict]:
    assert main(["--config", str(config), f"run.output_dir={folder}", *GAME, *words]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def compare(folder, second):
    first, right = (load_file(entry / "adapter_model.safetensors") for entry in (folder, second))
    assert first.keys() == right.keys() and any(np.abs(x).max() > 0 for x in first.values())
    for name, value in first.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def write_start(config, folder) -> str:
    """A drawn adapter as a PEFT folder, that runs may start from."""
    parts = build_model_bundle(load_config(config, ["adapter.rank=4"]))
    write_peft(open_params(parts, 7), parts.architecture, parts.adapter, folder, None)
    return f"adapter.path={folder}"


@pytest.mark.slow
def test_each_policy_is_trained_as_it_would_be_alone(configs, tmp_path, capsys):
    alone, pair = configs / "alone.toml", configs / "both.toml"
    start = write_start(alone, tmp_path / "start")
    words = (start, "run.max_steps=4", "checkpoint.every=2")
    words = ("adapter.rank=4", f"policies.even.path={tmp_path}/start", *words[1:])
    words += (f"policies.odd.path={tmp_path}/start",)
    with pytest.raises(UserError, match="policies.even.path .* has other matrices, ranks"):
        make_task(load_config(pair, [*words, "adapter.rank=8"]))
    lines = run(pair, tmp_path / "both", *words, "rollout.samples=all")
    shutil.copytree(tmp_path / "both", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/4")
    run(pair, tmp_path / "parts", *words, "rollout.samples=all")
    for name in ("even", "odd"):
        run(alone, tmp_path / name, start, "run.max_steps=2", f"env.options={{alone='{name}'}}")
        compare(tmp_path / "both/model" / name, tmp_path / name / "model")
        compare(tmp_path / "both/model" / name, tmp_path / "parts/model" / name)
    steps = [line for line in lines if "even/loss" in line or "odd/loss" in line]
    assert ["even/loss" in line for line in steps] == [True, False, True, False]
    last = steps[-1]
    for name in ("even", "odd"):
        assert last[f"{name}/rewards/{name}/mean"] == last[f"{name}/reward"]
        assert last[f"{name}/lag/max"] == 0 and last[f"{name}/groups"] == 4
    assert last["policy_version"] == 1
    assert steps[0]["even/sampling/sampling_logp_difference/max"] < 1e-4
    assert steps[3]["odd/sampling/sampling_logp_difference/max"] < 1e-4
    samples = [json.loads(line) for line in (tmp_path / "both/samples.jsonl").open()]
    assert len(samples) == 2 * 2 * 16 and {sample["policy"] for sample in samples} == {
        "even",
        "odd",
    }
    with pytest.raises(UserError, match="several policies"):
        open_trained(str(tmp_path / "both"), [])
    assert main(["export", str(tmp_path / "both"), "--output", str(tmp_path / "again")]) == 0
    compare(tmp_path / "again/odd", tmp_path / "both/model/odd")
    play_and_evaluate(tmp_path / "both", capsys)


def play_and_evaluate(folder, capsys):
    """The verbs open all policies of a run: each one's rewards are of its own adapter."""
    rows = folder / "rows.jsonl"
    messages = [{"role": role, "content": "12345678"} for role in ("system", "user")]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    out = folder / "played.jsonl"
    words = ["generate", str(folder), "--env", "--input", str(rows), "--output", str(out)]
    assert main(words) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["policy"], line["others"][0]["policy"]) == ("even", "odd")
    keys = ("policies.odd.trained=false", "policies.odd.servers=['http://127.0.0.1:1']")
    assert main([*words[:5], *keys, "policies.odd.path=null"]) == 2
    assert "policies.NAME.trained names even" in capsys.readouterr().err
    sets = ("eval.sets.0.path=builtin:calculator", "eval.sets.0.max_rows=4", "eval.sets.0.k=2")
    assert main(["eval", str(folder), *sets]) == 0
    payload = json.loads((folder / "eval/metrics.jsonl").read_text().splitlines()[-1])
    even, odd = (payload[f"eval/calculator/{name}/reward"] for name in ("even", "odd"))
    assert even == payload["eval/calculator/reward"] != odd
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(
    not Path(PYTHON or "/nowhere").is_file(),
    reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
)
def test_a_real_server_draws_each_policy_with_its_own_adapter(configs, tmp_path, monkeypatch):
    """If a policy's tokens came from another or an older adapter, the trainer's log-probs of them
    would be others."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = make_model(tmp_path / "model", seed=0, tied=False)
    text = (configs / "both.toml").read_text()
    sections = text.split("[model]")[0], text.split("[parallel]")[1]
    path = tmp_path / "vllm.toml"
    path.write_text(
        f'{sections[0]}[model]\npath = "{model}"\ncompute_dtype = "float32"\n'
        f"[parallel]{sections[1]}"
        f'[rollout.vllm]\nlaunch = "local"\ngpus = 0\npython = "{PYTHON}"\nsync = "lora"\n'
        'args = ["--enforce-eager", "--dtype", "float32"]\nwait_seconds = 600.0\n'
    )
    words = ("rollout.engine=vllm", "run.max_steps=6", "adapter.rank=4", "optim.learning_rate=0.05")
    lines = run(path, tmp_path / "run", *words)
    for name in ("even", "odd"):
        key = f"{name}/sampling/sampling_logp_difference/max"
        actual = [line[key] for line in lines if key in line]
        print(name, actual, [line[f"{name}/reward"] for line in lines if f"{name}/reward" in line])
        assert len(actual) == 3 and max(actual) < CLOSE
