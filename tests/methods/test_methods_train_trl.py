"""Twenty steps of training beside TRL's own trainers: the same start, rows and optimizer.

Both sides are used as people use them: ours by its command, with pairs as trees, TRL by its
trainers, on the same texts with the same tokenizer. What agrees is every step's loss, to 1e-4.
TRL's forward passes are of a whole step here: with gradient accumulation its KTO baseline and its
means over tokens (ORPO's likelihood) would change, and ours not.
"""

import json
import random
from importlib.util import find_spec

import pytest

from jaxtrain.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="this environment has no TRL"),
]
VOCABULARY, STEPS, ROWS = 97, 20, 4
RATE = 2e-3
EPS = 1e-6
"""AdamW's: without it, gradients that are rounding alone would move weights as far as others."""
SAME = {"steps": STEPS, "rows_a_step": ROWS, "rate": RATE, "eps": EPS}


@pytest.fixture(scope="module")
def trl():
    """TRL's side."""
    import trl_runs

    return trl_runs


@pytest.fixture(scope="module")
def folder(trl, tmp_path_factory):
    """Model that both start from."""
    folder = tmp_path_factory.mktemp("start")
    trl.write_start(folder, VOCABULARY)
    return folder


def make_pairs():
    """Prompts with a chosen and a rejected answer, of unlike lengths; each comes four times."""
    rng = random.Random(0)

    def log(least, most):
        return " ".join(
            f"w{rng.randint(2, VOCABULARY - 1)}" for _ in range(rng.randint(least, most))
        )

    rows = [
        {"prompt": log(3, 9) + " ", "chosen": log(2, 8), "rejected": log(2, 8)}
        for _ in range(STEPS * ROWS // 4)
    ]
    return 4 * rows


def make_labeled():
    """Rows with one answer each and a label."""
    names = ["chosen", "rejected", "chosen"]
    return [
        {"prompt": p["prompt"], "completion": p[names[i % 3]], "label": i % 3 != 1}
        for i, p in enumerate(make_pairs())
    ]


def of_us(model, rows, task, folder):
    """Metrics of each step."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {
        "run": {"max_steps": STEPS, "export": False, "output_dir": str(folder / "run")},
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {
            "sequence_len": 32,
            "shuffle": False,
            "packing": False,  # a tree a row, a row for each of the test's four devices
            "datasets": [{"path": str(data)}],
        },
        "task": task,
        "optim": {"learning_rate": RATE, "lr_scheduler": "constant", "eps": EPS},
        "checkpoint": {"every": 1000},
        "log": {"plot": False, "console": "off"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(table))
    assert main(["--config", str(path)]) == 0
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def compare(actual_values, reference, names, tolerance=1e-4):
    """Every step's loss, and the metrics of the last one."""
    losses, logged = reference
    assert [line["loss"] for line in actual_values] == pytest.approx(losses, abs=tolerance)
    assert max(losses) - min(losses) > 1000 * tolerance  # something was trained
    for name in names:
        assert actual_values[-1][name] == pytest.approx(logged[-1][name], abs=20 * tolerance), name


SIDES = [f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected")]
PAIRS = [*SIDES, "rewards/margins", "rewards/accuracies"]


def test_dpo(trl, folder, tmp_path):
    task = {"kind": "preference", "beta": 0.5}
    actual_values = of_us(folder / "lm", make_pairs(), task, tmp_path)
    reference = trl.run_trl("dpo", folder / "lm", make_pairs(), tmp_path, beta=0.5, **SAME)
    compare(actual_values, reference, [*PAIRS, "logits/chosen", "logits/rejected", "entropy"])


@pytest.mark.thorough
def test_kto(trl, folder, tmp_path):
    task = {"kind": "preference", "loss": "kto", "beta": 0.5}
    actual_values = of_us(
        folder / "lm", make_labeled(), task | {"undesirable_weight": 1.5}, tmp_path
    )
    options = {"beta": 0.5, "undesirable_weight": 1.5}
    reference = trl.run_trl("kto", folder / "lm", make_labeled(), tmp_path, **options, **SAME)
    compare(actual_values, reference, [*SIDES, "kl"])


@pytest.mark.thorough
def test_orpo(trl, folder, tmp_path):
    task = {"kind": "preference", "loss": "orpo", "beta": 0.5}
    actual_values = of_us(folder / "lm", make_pairs(), task, tmp_path)
    reference = trl.run_trl("orpo", folder / "lm", make_pairs(), tmp_path, beta=0.5, **SAME)
    compare(actual_values, reference, [*PAIRS, "log_odds_ratio", "log_odds_chosen", "nll_loss"])


@pytest.mark.thorough
def test_reward_model(trl, folder, tmp_path):
    task = {"kind": "reward_model", "center_rewards_coefficient": 0.05}
    actual_values = of_us(folder / "score", make_pairs(), task, tmp_path)
    options = {"center_rewards_coefficient": 0.05}
    reference = trl.run_trl("reward", folder / "score", make_pairs(), tmp_path, **options, **SAME)
    compare(
        actual_values, reference, ["accuracy", "margin", "mean_reward", "min_reward", "max_reward"]
    )
