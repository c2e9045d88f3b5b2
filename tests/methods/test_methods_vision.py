"""Runs of methods that train on rows with images."""

import json

import numpy as np
import pytest
from smolvlm_text import QWEN_TEMPLATE, TEMPLATE
from test_models_families import read_flat
from tiny_vision import VISION

from jaxtrain.main import main
from jaxtrain.models import build, families, saving

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
FOLDER = """
[model]
path = "{folder}/start"
tokenizer = "builtin"
chat_template = "{folder}/template.jinja"
compute_dtype = "float32"
vision = {{ train = "all" }}
special_tokens = {{ additional_special_tokens = {tokens} }}
"""
QWEN_SETTINGS = {
    "patch_size": 5,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 300, "longest_edge": 1200},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.2],
}
QWEN = (QWEN_TEMPLATE, ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"], QWEN_SETTINGS)
GEMMA = (
    QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>"),
    ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    {"size": {"height": 33, "width": 33}, "do_convert_rgb": None, "do_pan_and_scan": None},
)
GEMMA4 = (
    QWEN_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>"),
    ["<|image|>", "<|image>", "<image|>"],
    {"patch_size": 5, "pooling_kernel_size": 3, "max_soft_tokens": 70},
)
FOLDERS = {
    "qwen3_5": QWEN,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_5_moe": QWEN,
    "gemma3": GEMMA,
    "gemma4_per_layer": GEMMA4,
}
"""Template, tokens of which the first is that of an image, and settings of the image processor."""
PARTS = ("embed_tokens", "patch_embed", "merger", "projector", "embedding_projection")

pytestmark = pytest.mark.slow


def train(config, folder, *words):
    """Train and return the losses by step."""
    assert main(["--config", str(config), f"run.output_dir={folder}", *words]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def save_start(folder, name):
    """Write a folder of random weights whose images are token 512, the first that is added to the
    built-in tokenizer, and the settings of its images."""
    key = "image_token_index" if name == "gemma3" else "image_token_id"
    raw = {**VISION[name], key: 512}
    raw["text_config"] = {**raw["text_config"], "vocab_size": 528}
    if name.startswith("gemma4"):  # for images of 70 tokens in one row
        raw["vision_config"] = {**raw["vision_config"], "position_embedding_size": 210}
    architecture = families.config_from_hf(raw)
    saving.save(build.init(architecture, 0), architecture, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(FOLDERS[name][2]))


def write_rows(folder, kind, colors):
    """Write rows that differ in their pictures alone, each a square of a color."""
    from PIL import Image

    with open(folder / "train.jsonl", "w") as file:
        for number in range(24):
            color = colors[number % len(colors)]
            Image.new("RGB", (20, 20), color).save(folder / f"{number}.png")
            row = {"prompt": "Which?", "images": [f"{number}.png"]}
            answer = ("red", "green", "blue")[number % 3]
            if kind in ("sft", "distillation"):
                row["completion"] = answer
            elif kind == "steps":
                row |= {"completions": ["a color", "red"], "labels": [True, answer == "red"]}
            else:
                row |= {"chosen": answer, "rejected": "black"}
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("reward_model", ()),
        pytest.param("steps", ("task.labels=steps",), marks=pytest.mark.thorough),
        *(pytest.param(kind, (), marks=pytest.mark.thorough) for kind in ("sft", "preference")),
        pytest.param(
            "distillation",
            ("task.teacher.kind=start", "task.ce_weight=1"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_run_reads_pixels(kind, words, tmp_path):
    """Texts, sizes and so tokens are the same; the picture alone says which answer is right."""
    (tmp_path / "smolvlm.jinja").write_text(TEMPLATE)
    config = tmp_path / "config.toml"
    method = "reward_model" if kind == "steps" else kind
    config.write_text((SMOLVLM + RUN).format(folder=tmp_path, kind=method))
    write_rows(tmp_path, kind, ["red", "green", "blue"])
    losses = train(config, tmp_path / "colors", *words)
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    write_rows(tmp_path, kind, ["gray"])
    gray = train(config, tmp_path / "gray", *words)
    assert gray[2] != losses[2] and gray[3] != losses[3]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "qwen3_5" else pytest.mark.thorough)
        for name in FOLDERS
    ],
)
def test_a_folder_trains_on_pictures(name, tmp_path):
    """Require changes in all parts of the model, and the settings of its images in the export."""
    template, tokens, _ = FOLDERS[name]
    start = tmp_path / "start"
    save_start(start, name)
    (tmp_path / "template.jinja").write_text(template)
    config = tmp_path / "config.toml"
    text = (FOLDER + RUN).format(folder=tmp_path, tokens=json.dumps(tokens), kind="sft")
    config.write_text(text.replace(f"{tmp_path}/train.jsonl", "builtin:shapes"))
    losses = train(config, tmp_path / "run")
    assert list(losses) == [1, 2, 3] and losses[3] < losses[1]
    trained = tmp_path / "run" / "model"
    copied = trained / "preprocessor_config.json"
    assert copied.read_bytes() == (start / "preprocessor_config.json").read_bytes()
    before, after = read_flat(start), read_flat(trained)
    assert before.keys() == after.keys()
    parts = {part for tensor in before for part in PARTS if part in tensor}
    assert len(parts) == 3
    for part in parts:
        changed = (
            not np.array_equal(array, after[tensor])
            for tensor, array in before.items()
            if part in tensor
        )
        assert any(changed), part
