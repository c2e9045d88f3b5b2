"""Runs of TRL's trainers beside ours, and the tiny model that both start from.

Imported by tests when they run: TRL takes long to import.
"""

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

METHODS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}


def write_start(folder, vocabulary):
    """Folders with a tiny model, and with the same under a score head; a tokenizer of words."""
    torch.set_num_threads(1)
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))]
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = Tokenizer(level)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    )
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
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


def run_trl(method, model, rows, folder, *, steps, rows_a_step, rate, eps, **options):
    """(losses, metrics) of each step."""
    trainer, config = METHODS[method]
    losses = []

    class Observed(trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    arguments = config(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=rows_a_step,
        train_sampling_strategy="sequential",
        learning_rate=rate,
        lr_scheduler_type="constant",
        adam_epsilon=eps,
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
