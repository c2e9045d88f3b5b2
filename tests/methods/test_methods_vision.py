"""Runs of SFT and DPO whose rows have images."""

import json

import pytest
from smolvlm_text import TEMPLATE

from jaxtrain.main import main

CONFIG = """
[model]
tokenizer = "builtin"
chat_template = "{folder}/smolvlm.jinja"
compute_dtype = "float32"
vision = {{ train = "all" }}
special_tokens = {{ additional_special_tokens = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"] }}
[model.architecture]
architectures = ["SmolVLMForConditionalGeneration"]
model_type = "smolvlm"
scale_factor = 2
image_token_id = 512
tie_word_embeddings = false
text_config = {{ model_type = "llama", vocab_size = 528, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 16, max_position_embeddings = 256 }}
vision_config = {{ model_type = "smolvlm_vision", hidden_size = 24, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 2, image_size = 16, patch_size = 4 }}
[parallel]
data = 1
fsdp = -1
[data]
sequence_len = 128
datasets = [{{ path = "{folder}/train.jsonl" }}]
[optim]
learning_rate = 3e-3
[run]
max_steps = 3
[task]
kind = "{kind}"
"""  # noqa: E501

pytestmark = pytest.mark.slow


def train(folder, kind, name):
    """Train and return the losses by step."""
    (folder / "smolvlm.jinja").write_text(TEMPLATE)
    (folder / "config.toml").write_text(CONFIG.format(folder=folder, kind=kind))
    run = folder / name
    assert main(["--config", str(folder / "config.toml"), f"run.output_dir={run}"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def write_rows(folder, kind, colors):
    """Rows that differ in their pictures alone, each a square of a color."""
    from PIL import Image

    with open(folder / "train.jsonl", "w") as file:
        for number in range(24):
            color = colors[number % len(colors)]
            Image.new("RGB", (20, 20), color).save(folder / f"{number}.png")
            row = {"prompt": "Which?", "images": [f"{number}.png"]}
            answer = ("red", "green", "blue")[number % 3]
            if kind == "sft":
                row["completion"] = answer
            else:
                row |= {"chosen": answer, "rejected": "black"}
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("kind", ["sft", "preference"])
def test_a_run_reads_pixels(kind, tmp_path):
    """Texts, sizes and so tokens are the same; the picture alone says which answer is right."""
    write_rows(tmp_path, kind, ["red", "green", "blue"])
    losses = train(tmp_path, kind, "run")
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    write_rows(tmp_path, kind, ["gray"])
    other = train(tmp_path, kind, "gray")
    assert other[2] != losses[2] and other[3] != losses[3]
