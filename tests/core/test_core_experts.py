"""A mixture of experts from the command line to an export that loads."""

import json
from pathlib import Path

import numpy as np
import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.main import main
from jaxtrain.methods.reopen import open_trained
from jaxtrain.models import loading
from tests.docs.metric_names import require_rows

CONFIG = Path(__file__).parents[2] / "configs" / "sft_qwen3_moe.toml"
SMALL = [
    "run.max_steps=3",
    "data.micro_batch_size=2",
    "optim.gradient_accumulation_steps=2",
    "parallel.data=2",
    "parallel.fsdp=1",
    "parallel.expert=2",
    "parallel.expert_transport=exchange",
    "model.architecture.hidden_size=32",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.moe_intermediate_size=16",
    "data.datasets.0.options={ num_rows = 100 }",
    "optim.warmup_steps=1",
    "log.every=1",
]


@pytest.mark.slow
def test_the_shipped_config_trains_exports_and_reports_the_balance(tmp_path):
    folder = tmp_path / "run"
    assert main(["--config", str(CONFIG), f"run.output_dir={folder}", *SMALL]) == 0
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "expert_load_max" in line]
    assert len(found) == 3 and np.isfinite([line["loss"] for line in found]).all()
    for line in found:
        assert 2 <= line["balance"] < 8  # top at perfect balance, E where one expert takes all
        assert 1 <= line["expert_load_max"] <= 4
        assert 0 < line["router_entropy"] <= np.log(8) + 1e-6
        assert 1 <= line["expert_rounds"] <= 2
        # the reported loss is what is trained: nll and the balance times its factor
        assert line["loss"] > 0.01 * line["balance"]
    model = loading.load(folder / "model")
    assert model.experts_per_token == (2, 8)


@pytest.mark.parametrize("key", ["aux_loss_coef", "sequence_loss_coef", "bias_update_rate"])
def test_balance_of_a_dense_model_is_refused(key, tmp_path, capsys):
    words = ["model=tiny", "model.router_aux_loss_coef=0", f"model.router_{key}=0.01"]
    words.append(f"run.output_dir={tmp_path}")
    assert main(["--config", str(CONFIG), *words]) != 0
    error = capsys.readouterr().err
    assert f"model.router_{key} 0.01 balances experts, but Qwen3ForCausalLM" in error


MODELS = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}


BIAS = "stack.block.mlp.router.choice_bias"


def write_config(folder, name, *sections):
    """A run of few steps with a tiny model of this family."""
    raw = {"model_type": name, "num_hidden_layers": 2, **MODELS[name]}
    kept = [line for line in MODEL.splitlines() if line.partition(" =")[0] not in raw]
    model = "\n".join(kept).replace(
        "[model.architecture]",
        "[model.architecture]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in raw.items()),
    )
    data = '[data]\nsequence_len = 64\nmicro_batch_size = 1\ntoo_long = "truncate"\n'
    data += '[[data.datasets]]\npath = "builtin:calculator"\n'
    data += 'options = { num_rows = 100 }\ntrain_on = "all"\n'
    ends = "[run]\nmax_steps = 2\nexport = false\n[log]\nplot = false\nevery = 1\n"
    path = folder / f"{name}.toml"
    path.write_text("\n".join([ends, model, data, *sections]))
    return path


def read_lines(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_policy_is_trained_where_its_tokens_went(tmp_path):
    """With the weights that drew them the routers choose the same: nothing goes astray between
    sampler, trees, minibatches and the pass that is differentiated."""
    task = '[task]\nkind = "rl"\nnum_minibatches = 1\n'
    rollout = "[rollout]\nprompts_per_step = 2\ngroup_size = 4\nrouter_replay = true\n"
    path = write_config(tmp_path, "qwen3_moe", task, rollout, EVEN_TOKENS)
    assert main(["--config", str(path), f"run.output_dir={tmp_path / 'run'}"]) == 0
    found = [line["router_replay/same_experts"] for line in read_lines(tmp_path / "run")]
    assert found == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_a_bias_moves_by_its_rate_and_is_refused_beside_an_adapter(tmp_path, capsys):
    task = '[task]\nkind = "sft"\n[optim]\nlearning_rate = 1e-3\nweight_decay = 0.1\n'
    path = write_config(tmp_path, "glm4_moe", task, "[checkpoint]\nevery = 2\n")
    words = [
        "run.max_steps=1",
        "model.router_bias_update_rate=0.125",
        "model.router_z_loss_coef=0.001",
    ]
    folder = tmp_path / "run"
    assert main(["--config", str(path), f"run.output_dir={folder}", *words]) == 0
    bias = np.asarray(open_trained(str(folder), []).snapshot.params("policy")[BIAS])
    assert set(np.abs(bias).ravel().tolist()) <= {0.0, 0.125} and bias.any()
    assert all(line["router_z"] > 0 for line in read_lines(folder))
    words += ["adapter=lora", f"run.output_dir={tmp_path / 'other'}"]
    assert main(["--config", str(path), *words]) != 0
    assert "choice_bias is not trained here" in capsys.readouterr().err
