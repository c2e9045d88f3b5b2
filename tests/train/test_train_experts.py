"""A mixture of experts from the command line to an export that loads."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.main import main
from jaxtrain.models import build

CONFIG = Path(__file__).parents[2] / "configs" / "sft_qwen3_moe.toml"
SMALL = [
    "run.max_steps=3",
    "data.micro_batch_size=2",
    "optim.gradient_accumulation_steps=2",
    "parallel.data=2",
    "parallel.fsdp=1",
    "parallel.expert=2",
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
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "expert_load_max" in line]
    assert len(found) == 3 and np.isfinite([line["loss"] for line in found]).all()
    for line in found:
        assert 2 <= line["balance"] < 8  # top at perfect balance, E where one expert takes all
        assert 1 <= line["expert_load_max"] <= 4
        assert 0 < line["router_entropy"] <= np.log(8) + 1e-6
        # the reported loss is what is trained: nll and the balance times its factor
        assert line["loss"] > 0.01 * line["balance"]
    model = build.load(folder / "model")
    assert model.experts_per_token == (2, 8)


def test_balance_of_a_dense_model_is_refused(tmp_path, capsys):
    words = ["model=tiny", "model.router_aux_loss_coef=0.01", f"run.output_dir={tmp_path}"]
    assert main(["--config", str(CONFIG), *words]) != 0
    error = capsys.readouterr().err
    assert "model.router_aux_loss_coef 0.01 balances experts, but Qwen3ForCausalLM" in error
