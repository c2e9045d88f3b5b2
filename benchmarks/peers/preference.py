"""TRL's side of preference.py: its own trainers in several settings, a JSON line for each.

python benchmarks/preference_peers.py JOB.json     # called by preference.py

Pairs of like length are batched together and the batches shuffled, so that little of them is
padding. What is timed is `Trainer.train` from the end of the warm-up to the end of the last step.
"""

import dataclasses
import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

GPU = torch.cuda.is_available()
WARM_UP, STEP_PAIRS = 4, 32
EOS = 1


@dataclasses.dataclass(frozen=True)
class Setting:
    """A configuration of TRL."""

    batch: int
    """Pairs of a forward pass."""
    checkpointing: bool = False
    weights: str = "float32"
    """Type of the masters; products are in bf16."""
    liger: bool = True

    def label(self) -> str:
        """Return the description in the table."""
        words = [f"{self.batch} pairs a pass", f"{self.weights} weights"]
        words += ["Liger"] if self.liger else []
        words += ["checkpointing"] if self.checkpointing else []
        return ", ".join(words)


FULL = (
    Setting(4),
    Setting(8),
    Setting(4, weights="bfloat16"),
    Setting(8, checkpointing=True),
)
LORA = (
    Setting(2, weights="bfloat16"),
    Setting(4, weights="bfloat16", checkpointing=True),
)


class Clock(transformers.TrainerCallback):
    """Times steps after the warm-up and stops the training after so many seconds."""

    def __init__(self, seconds: float):
        self.seconds, self.ends = seconds, []

    def on_step_end(self, args, state, control, **kwargs):
        if GPU:
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARM_UP and GPU:
            torch.cuda.reset_peak_memory_stats()
        long = len(self.ends) > WARM_UP + 2
        if long and self.ends[-1] - self.ends[WARM_UP - 1] > self.seconds:
            control.should_training_stop = True


def read_pairs(path: str) -> list[tuple[list[int], list[int], list[int]]]:
    """Token ids of (prompt, chosen, rejected)."""
    actual = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        prompt, *answers = (
            [int(word[1:]) for word in row[name].split()]
            for name in ("prompt", "chosen", "rejected")
        )
        actual.append((prompt, *(answer + [EOS] for answer in answers)))
    return actual


def order_pairs(pairs, batch: int):
    """Pairs of like length next to each other, batch by batch in random order."""
    longest = [len(p) + max(len(c), len(r)) for p, c, r in pairs]
    order = np.argsort(longest, kind="stable")
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    shuffled = np.random.default_rng(0).permutation(len(batches))
    return [pairs[i] for position in shuffled for i in batches[position]]


def make_model(job: dict, dtype: str):
    """The model with random weights, on the GPU."""
    raw = job["raw"]
    config = transformers.AutoConfig.for_model(**raw)
    config.pad_token_id, config.eos_token_id = 0, EOS
    kind = transformers.AutoModelForCausalLM
    if job["kind"] == "reward":
        config.num_labels, kind = 1, transformers.AutoModelForSequenceClassification
    with torch.device("cuda" if GPU else "cpu"):
        model = kind.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model


def measure(job: dict, pairs, setting: Setting) -> dict:
    """Rates and memory of one setting."""
    reward = job["kind"] == "reward"
    base = RewardTrainer if reward else DPOTrainer

    class Prepared(base):
        """Takes tokens as they are."""

        def _prepare_dataset(self, dataset, *args, **kwargs):
            return dataset

    if reward:
        rows = [{"chosen_ids": p + c, "rejected_ids": p + r} for p, c, r in pairs]
    else:
        rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs]
    options = {
        "output_dir": job["work"],
        "per_device_train_batch_size": setting.batch,
        "gradient_accumulation_steps": STEP_PAIRS // setting.batch,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-6,
        "max_length": None,
        "bf16": GPU,
        "use_cpu": not GPU,
        "gradient_checkpointing": setting.checkpointing,
        "use_liger_kernel": setting.liger and GPU,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    model = make_model(job, setting.weights)
    peers = {}
    if job["rank"]:
        from peft import LoraConfig

        rank = job["rank"]
        peers["peft_config"] = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    elif not reward:
        # As the fastest reference: its weights need no casts.
        peers["ref_model"] = make_model(job, "bfloat16" if GPU else "float32")
    clock = Clock(job["seconds"])
    trainer = Prepared(
        model=model,
        args=(RewardConfig if reward else DPOConfig)(**options),
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(job["tokenizer"]),
        callbacks=[clock],
        **peers,
    )
    trainer.train()
    steps = len(clock.ends) - WARM_UP
    seconds = clock.ends[-1] - clock.ends[WARM_UP - 1]
    timed = pairs[WARM_UP * STEP_PAIRS : (WARM_UP + steps) * STEP_PAIRS]
    tokens = sum(2 * len(p) + len(c) + len(r) for p, c, r in timed)
    padded = sum(
        2 * setting.batch * max(len(p) + max(len(c), len(r)) for p, c, r in part)
        for part in (timed[i : i + setting.batch] for i in range(0, len(timed), setting.batch))
    )
    return {
        "pairs_per_s": tokens / job["mean"] / seconds,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / steps,
        "steps": steps,
        "pairs_per_step": STEP_PAIRS,
        "padding": 1 - tokens / padded,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0,
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high")
    if not GPU:
        torch.set_num_threads(1)
    pairs = read_pairs(job["pairs"])
    longest = 0.0
    for setting in LORA if job["rank"] else FULL:
        begin = time.time()
        if begin + min(longest, job["seconds"] + 15) > job["deadline"]:
            break
        if job["kind"] == "reward":  # Liger's kernels come with a head, which fails on scores
            setting = dataclasses.replace(setting, liger=False)
        row = {"how": setting.label()}
        try:
            row |= measure(job, order_pairs(pairs, setting.batch), setting)
        except Exception as reason:  # this setting is recorded as failed
            row["failed"] = f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
        row["whole_s"] = time.time() - begin
        longest = max(longest, row["whole_s"])
        with Path(job["rows"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
