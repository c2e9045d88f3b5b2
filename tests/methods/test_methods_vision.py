"""Runs of SFT and DPO whose rows have images."""

import json

import pytest
from smolvlm_text import QWEN_TEMPLATE, TEMPLATE

from jaxtrain.main import main

RUN = """
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
"""
SMOLVLM = """
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
"""  # noqa: E501
QWEN = """
[model]
tokenizer = "builtin"
chat_template = "{folder}/qwen.jinja"
compute_dtype = "float32"
special_tokens = {{ additional_special_tokens = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"] }}
[model.architecture]
architectures = ["Qwen3VLForConditionalGeneration"]
model_type = "qwen3_vl"
image_token_id = 512
vision_start_token_id = 513
vision_end_token_id = 514
tie_word_embeddings = true
text_config = {{ model_type = "qwen3_vl_text", vocab_size = 528, hidden_size = 32, intermediate_size = 64, num_hidden_layers = 3, num_attention_heads = 2, num_key_value_heads = 1, head_dim = 16, max_position_embeddings = 256, rope_parameters = {{ rope_type = "default", rope_theta = 10000.0, mrope_section = [3, 3, 2], mrope_interleaved = true }} }}
vision_config = {{ model_type = "qwen3_vl_vision", hidden_size = 24, intermediate_size = 40, depth = 4, num_heads = 3, patch_size = 4, spatial_merge_size = 2, out_hidden_size = 32, num_position_embeddings = 25, deepstack_visual_indexes = [1, 3], initializer_range = 0.1 }}
"""  # noqa: E501
QWEN_SETTINGS = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1024},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.2],
}

pytestmark = pytest.mark.slow


def train(config, folder, *words):
    """Train and return the losses by step."""
    assert main(["--config", str(config), f"run.output_dir={folder}", *words]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def write_rows(folder, kind, colors):
    """Write rows that differ in their pictures alone, each a square of a color."""
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


@pytest.mark.parametrize("kind", ["sft", pytest.param("preference", marks=pytest.mark.thorough)])
def test_a_run_reads_pixels(kind, tmp_path):
    """Texts, sizes and so tokens are the same; the picture alone says which answer is right."""
    (tmp_path / "smolvlm.jinja").write_text(TEMPLATE)
    config = tmp_path / "config.toml"
    config.write_text((SMOLVLM + RUN).format(folder=tmp_path, kind=kind))
    write_rows(tmp_path, kind, ["red", "green", "blue"])
    losses = train(config, tmp_path / "colors")
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    write_rows(tmp_path, kind, ["gray"])
    gray = train(config, tmp_path / "gray")
    assert gray[2] != losses[2] and gray[3] != losses[3]


@pytest.mark.thorough
def test_a_folder_of_qwen_trains_on_pictures(tmp_path):
    """The folder comes from a run on text, its image processor's settings from outside."""
    (tmp_path / "qwen.jinja").write_text(QWEN_TEMPLATE)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    config = tmp_path / "config.toml"
    config.write_text((QWEN + RUN).format(folder=tmp_path, kind="sft"))
    train(config, tmp_path / "text", "run.max_steps=1")
    folder = tmp_path / "text" / "model"
    (folder / "preprocessor_config.json").write_text(json.dumps(QWEN_SETTINGS))
    model = f"[model]\npath = '{folder}'\ncompute_dtype = 'float32'\nvision.train = 'all'\n"
    config.write_text(model + RUN.format(folder=tmp_path, kind="sft"))
    write_rows(tmp_path, "sft", ["red", "green", "blue"])
    losses = train(config, tmp_path / "colors")
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    write_rows(tmp_path, "sft", ["gray"])
    gray = train(config, tmp_path / "gray")
    assert gray[2] != losses[2] and gray[3] != losses[3]
