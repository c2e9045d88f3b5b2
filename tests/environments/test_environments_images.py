"""Prompts with images: rows of every form, the environment that reads them, and their episodes."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from smolvlm_text import draw, encode, make_reader, open_tokenizer

from jaxtrain.config import EnvConfig
from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.environments.single_turn import SingleTurn
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.episode_codec import pack, unpack
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.local.prefill import Prompt
from jaxtrain.generation.prompts import open_prompts
from jaxtrain.generation.serving.open_request import ServingFormat
from jaxtrain.safe_io import UnreadableRow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    (path / "wide.png").write_bytes(draw(20, 10))
    (path / "other.png").write_bytes(draw(20, 10, seed=1))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder)


def open_rows(folder, tokenizer, *rows):
    (folder / "rows.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    dataset = DatasetConfig(path=str(folder / "rows.jsonl"))
    return open_prompts(dataset, "data.datasets.0", tokenizer)


def test_prompts_of_all_forms_have_the_tokens_of_training(folder, tokenizer):
    text, encoded = {"type": "text", "text": "What?"}, base64.b64encode(draw(20, 10)).decode()
    rows = [
        {"prompt": "What?", "images": ["wide.png"]},
        {"prompt": "<image>What?", "image": "wide.png", "answer": "red"},
        {"messages": [{"role": "user", "content": [{"type": "image", "path": "wide.png"}, text]}]},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, text]}],
            "images": ["wide.png"],
        },
        {"prompt": "What?", "images": [{"base64": encoded}]},
        {
            "conversations": [
                {"from": "human", "value": "<image>What?"},
                {"from": "gpt", "value": "red"},
            ],
            "images": ["wide.png"],
        },
    ]
    [sample] = make_reader(folder, tokenizer)(
        {"prompt": "What?", "completion": "red", "images": ["wide.png"]}
    )
    count, env = int(np.argmax(sample.weights > 0)), SingleTurn(tokenizer)
    for row in open_rows(folder, tokenizer, *rows):
        source, tokens, placed = env.read(row)
        assert tokens == sample.tokens[:count].tolist()
        assert placed.images == sample.images.images
        np.testing.assert_array_equal(placed.slot, sample.images.slot[:count])
        [message] = source
        image, words = message["content"]
        assert words == text and image["type"] == "image" and image["width"] == 20
        assert image["sha256"] == placed.images[0].key
        assert image.get("path", str(folder / "wide.png")) == str(folder / "wide.png")
        json.dumps(source)


def test_equal_texts_with_other_pictures_are_other_prompts(folder, tokenizer):
    rows = open_rows(
        folder,
        tokenizer,
        *({"prompt": "What?", "images": [name]} for name in ("wide.png", "other.png", "wide.png")),
    )
    read = [SingleTurn(tokenizer).read(row)[1:] for row in rows]
    assert read[0][0] == read[1][0]
    first, second, again = (Prompt.of(*pair) for pair in read)
    assert first == again != second and hash(first) == hash(again)
    assert Prompt.of(read[0][0], None) != first


def test_an_episode_holds_its_images_and_is_stored_with_them(folder, tokenizer):
    [row] = open_rows(folder, tokenizer, {"prompt": "What?", "images": ["wide.png"]})
    view = open_view(ScriptedEngine(tokenizer, ["red"]), media={tokenizer.image_format.token: "x"})
    episode = asyncio.run(SingleTurn(tokenizer).run(row, view, Sampling(), 0))
    stored = unpack(json.loads(json.dumps(pack(episode))))
    for played in (episode, stored):
        [sequence] = played.sequences
        [image] = sequence.images.images
        assert image.source == folder / "wide.png" and image.num_features == 12
        assert len(sequence.images.slot) == sequence.sampled.index(True)
    np.testing.assert_array_equal(stored.images.slot, episode.images.slot)
    inline = Prompt.of([5], PlacedImages((image,), np.array([0], np.int32)))
    assert inline.placed.slot.tolist() == [0]


def test_what_reads_text_alone_refuses_images_by_name(folder, tokenizer):
    row = {"prompt": "What?", "images": ["wide.png"]}
    [opened] = open_rows(folder, tokenizer, row)
    engine = ScriptedEngine(tokenizer, ["red"])
    engine.reads_images = False
    with pytest.raises(UserError, match='set rollout.engine to "local"'):
        asyncio.run(SingleTurn(tokenizer).run(opened, open_view(engine), Sampling(), 0))
    spelled = [tokenizer.image_format.token] * 3
    view = open_view(engine, media={spelled[0]: "image_token_id"})
    with pytest.raises(UserError, match="image_token_id"):
        asyncio.run(view.generate(spelled, Sampling()))
    tools = open_env(EnvConfig(kind="dialogue"), tokenizer, 400)
    with pytest.raises(UnusableRow, match="column images"):
        asyncio.run(tools.run(opened, engine, Sampling(), 0))
    parts = [{"role": "user", "content": [{"type": "image", "path": "wide.png"}]}]
    text_tokenizer = open_tokenizer(folder)
    text_tokenizer.image_format = None
    [refused] = open_rows(folder, text_tokenizer, {"messages": parts})
    assert isinstance(refused, UnreadableRow) and "image" in refused.reason
    with pytest.raises(UnusableRow, match="column images"):
        SingleTurn(text_tokenizer).read(open_rows(folder, text_tokenizer, row)[0])


def test_a_broken_image_makes_its_prompt_unreadable(folder, tokenizer):
    rows = open_rows(
        folder,
        tokenizer,
        {"prompt": "What?", "images": ["none.png"]},
        {"prompt": "<image><image>What?", "images": ["wide.png"]},
    )
    absent, few = rows
    assert isinstance(absent, UnreadableRow) and "an image is absent" in absent.reason
    with pytest.raises(UnusableRow, match="1 images in the column, 2 placeholders"):
        SingleTurn(tokenizer).read(few)


def test_a_server_limits_images_before_it_decodes_them_all(folder, tokenizer):
    form, names = ServingFormat(tokenizer, 1000, 20), []

    def ask(*files):
        urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in files]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        form.read_chat({"messages": [{"role": "user", "content": content}]}, names.append)

    pictures = [draw(20, 10, seed=seed) for seed in range(3)]  # of 12 tokens each
    with pytest.raises(RequestRefused, match="images of more than 20 tokens"):
        ask(*pictures)
    assert len(form.images.measured) == 2
    broken = encode(Image.open(io.BytesIO(pictures[0])), exif=b"Exif\0\0no such header")
    with pytest.raises(RequestRefused, match="an image cannot be decoded"):
        ask(broken)
    assert not names


def test_settings_of_a_format_are_read_again_as_they_were_written(folder, tokenizer, tmp_path):
    from smolvlm_text import CONFIG

    from jaxtrain.data.images.format import read_format

    tokenizer.image_format.write(tmp_path)
    assert read_format(tmp_path, CONFIG, tokenizer) == tokenizer.image_format
