"""A small tokenizer, chat templates and images like those of SmolVLM, shared by tests."""

import functools
import io
import json

import numpy as np
from PIL import Image

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.images.format import read_format

TEMPLATE = (  # as published: a content that is a text is left out
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3-VL's template, cut down to messages without tools."""
TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TOKENS += tuple(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))
SETTINGS = {"max_image_size": {"longest_edge": 16}, "size": {"longest_edge": 32}}
CONFIG = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "vision_config": {"image_size": 16, "patch_size": 4},
}
ANSWER = {"role": "assistant", "content": "red"}


def open_tokenizer(folder, settings=None):
    """Open the tokenizer of a model whose settings are written into the folder."""
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), TOKENS)
    tokenizer.chat_template = TEMPLATE
    (folder / "preprocessor_config.json").write_text(json.dumps(settings or SETTINGS))
    tokenizer.image_format = read_format(folder, CONFIG, tokenizer)
    return tokenizer


@functools.cache
def draw(width, height, seed=0):
    """Return the bytes of a PNG of noise."""
    pixels = np.random.default_rng((width, height, seed)).integers(0, 256, (height, width, 3))
    return encode(Image.fromarray(pixels.astype(np.uint8)))


def encode(picture, kind="PNG", **options):
    """Return the bytes of a picture's file."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def make_reader(folder, tokenizer, length=400, too_long="drop", **keys):
    """Return a reader of rows of folder/train.jsonl: row -> samples and drops."""
    dataset = DatasetConfig(path=str(folder / "train.jsonl"), **keys)
    tokenize = RowTokenizer(dataset, tokenizer, length, too_long)

    def read(row):
        return tokenize(row, "train.jsonl row 1")

    read.tokenizer, read.images = tokenizer, tokenize.images
    return read
