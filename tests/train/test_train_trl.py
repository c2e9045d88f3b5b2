"""Twenty steps of training beside TRL's own trainers: the same start, rows and optimizer.

Both sides are used as people use them: ours by its command, with pairs as trees, TRL by its
trainers, on the same texts with the same tokenizer. What agrees is every step's loss, to 1e-4.
TRL's forward passes are of a whole step here: with gradient accumulation its KTO baseline and its
means over tokens (ORPO's likelihood) would change, and ours not.
"""

import json
import random

import pytest

pytest.importorskip("trl", reason="needs TRL, which this environment has not")
pytestmark = pytest.mark.slow

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from jaxtrain.main import main

VOCABULARY, STEPS, ROWS = 97, 20, 4
RATE = 2e-3
EPS = 1e-6
"""AdamW's: without it, gradients that are rounding alone would move weights as far as others."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model, the same with a score head, and a tokenizer of words."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("start")
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))]
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "lm")
    config.num_labels = 1
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(folder / "score")
    for name in ("lm", "score"):
        tokenizer.save_pretrained(folder / name)
    return folder


def make_pairs():
    """Prompts with a chosen and a rejected answer, of unlike lengths; each comes four times."""
    rng = random.Random(0)

    def say(least, most):
        return " ".join(f"w{rng.randint(2, VOCABULARY - 1)}" for _ in range(rng.randint(least, most)))

    rows = [
        {"prompt": say(3, 9) + " ", "chosen": say(2, 8), "rejected": say(2, 8)}
        for _ in range(STEPS * ROWS // 4)
    ]
    return 4 * rows


def make_labelled():
    """The same, one answer each with a label."""
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


def of_trl(trainer, config, model, rows, folder, **options):
    """(losses, metrics) of each step."""
    losses = []

    class Observed(trainer):
        def compute_loss(self, *args, **kwargs):
            found = super().compute_loss(*args, **kwargs)
            losses.append(float(found.detach()))
            return found

    arguments = config(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_epsilon=EPS,
        max_grad_norm=1.0,
        max_length=64,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    session = Observed(
        model=str(model),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    session.train()
    return losses, [line for line in session.state.log_history if "loss" in line]


def compare(ours, theirs, names, tolerance=1e-4):
    """Every step's loss, and the metrics of the last one."""
    losses, logged = theirs
    assert [line["loss"] for line in ours] == pytest.approx(losses, abs=tolerance)
    assert max(losses) - min(losses) > 1000 * tolerance  # something was trained
    for name in names:
        assert ours[-1][name] == pytest.approx(logged[-1][name], abs=20 * tolerance), name


SIDES = [f"{what}/{side}" for what in ("rewards", "logps") for side in ("chosen", "rejected")]
PAIRS = [*SIDES, "rewards/margins", "rewards/accuracies"]


def test_dpo(folder, tmp_path):
    task = {"kind": "preference", "beta": 0.5}
    ours = of_us(folder / "lm", make_pairs(), task, tmp_path)
    theirs = of_trl(DPOTrainer, DPOConfig, folder / "lm", make_pairs(), tmp_path, beta=0.5)
    compare(ours, theirs, [*PAIRS, "logits/chosen", "logits/rejected", "entropy"])


def test_kto(folder, tmp_path):
    task = {"kind": "preference", "loss": "kto", "beta": 0.5}
    ours = of_us(folder / "lm", make_labelled(), task | {"undesirable_weight": 1.5}, tmp_path)
    options = {"beta": 0.5, "undesirable_weight": 1.5}
    theirs = of_trl(KTOTrainer, KTOConfig, folder / "lm", make_labelled(), tmp_path, **options)
    compare(ours, theirs, [*SIDES, "kl"])


def test_orpo(folder, tmp_path):
    task = {"kind": "preference", "loss": "orpo", "beta": 0.5}
    ours = of_us(folder / "lm", make_pairs(), task, tmp_path)
    theirs = of_trl(ORPOTrainer, ORPOConfig, folder / "lm", make_pairs(), tmp_path, beta=0.5)
    compare(ours, theirs, [*PAIRS, "log_odds_ratio", "log_odds_chosen", "nll_loss"])


def test_reward_model(folder, tmp_path):
    task = {"kind": "reward_model", "center_rewards_coefficient": 0.05}
    ours = of_us(folder / "score", make_pairs(), task, tmp_path)
    options = {"center_rewards_coefficient": 0.05}
    theirs = of_trl(
        RewardTrainer, RewardConfig, folder / "score", make_pairs(), tmp_path, **options
    )
    compare(ours, theirs, ["accuracy", "margin", "mean_reward", "min_reward", "max_reward"])
