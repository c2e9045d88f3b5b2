"""Prompts with images: rows of every form, the environment that reads them, and their episodes."""

import asyncio
import base64
import copy
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image
from smolvlm_text import QWEN_TEMPLATE, TEMPLATE, draw, encode, make_reader, open_tokenizer

from jaxtrain.config import EnvConfig
from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.images.format import read_format
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.environments.chat import ChatEnv
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.environments.single_turn import SingleTurn
from jaxtrain.environments.tool_calls import ToolCall
from jaxtrain.environments.tools import MAX_RESULT, Toolbox, make_tool
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.generation.dataset_envs import measure_prompts
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.episode_codec import pack, unpack
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.local.prefill import Prompt
from jaxtrain.generation.prompts import PromptRows, open_prompts
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
    first, different, repeated = (Prompt.of(*pair) for pair in read)
    assert first == repeated != different and hash(first) == hash(repeated)
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
    parts = [{"role": "user", "content": [{"type": "image", "path": "wide.png"}]}]
    text_tokenizer = open_tokenizer(folder)
    text_tokenizer.image_format = None
    [refused] = open_rows(folder, text_tokenizer, {"messages": parts})
    assert isinstance(refused, UnreadableRow) and "image" in refused.reason
    with pytest.raises(UnusableRow, match="column images"):
        SingleTurn(text_tokenizer).read(open_rows(folder, text_tokenizer, row)[0])


def play(tokenizer, run, texts, row=None, **config):
    """Play an episode of an environment's function with a script."""
    rules = {name: config.pop(name) for name in ("row_tokens", "row_patches") if name in config}
    env = ChatEnv(tokenizer, run, EnvConfig(kind="dialogue", **config), name="world", **rules)
    engine = open_view(ScriptedEngine(tokenizer, texts), media={tokenizer.image_format.token: "x"})
    return asyncio.run(env.run(row or {}, engine, Sampling(max_new_tokens=9), 0))


def picture(*size, **draw_options):
    return {"type": "image", "image": draw(*size, **draw_options)}


LOOK = {"type": "text", "text": "Look:"}


async def walk(row, chat):
    """Show a picture after every action, the last one again."""
    chat.say("Go.")
    for seen in (picture(20, 10), picture(10, 20), picture(20, 10)):
        await chat.draw()
        chat.say([LOOK, seen])
    await chat.draw()
    return chat.finish(reward=1.0)


def test_an_episode_with_a_picture_after_every_action_has_the_tokens_of_training(folder, tokenizer):
    texts = [" left", " right", " up", " down"]
    episode = play(tokenizer, walk, texts, history="tokens")
    seen = [None, picture(20, 10), picture(10, 20), picture(20, 10)]
    messages = []
    for text, shown in zip(texts, seen, strict=True):
        messages.append({"role": "user", "content": "Go."})
        if shown is not None:
            encoded = {"type": "image", "base64": base64.b64encode(shown["image"]).decode()}
            messages[-1]["content"] = [LOOK, encoded]
        messages.append({"role": "assistant", "content": text.strip()})
    [sample] = make_reader(folder, tokenizer)({"messages": messages})
    ends = {tokenizer.eos_token_id: tokenizer.convert_tokens_to_ids("<end_of_utterance>")}
    tokens = [ends.get(token, token) for token in episode.tokens]  # the script ends turns by eos
    assert tokens == sample.tokens.tolist()[: len(tokens)]
    assert episode.sampled == (sample.weights[: len(episode.tokens)] > 0).tolist()
    first, second = episode.images.images
    assert (first.size, second.size) == ((20, 10), (10, 20)), "each is held once"
    slots = np.full(len(sample.tokens), -1)
    slots[: len(episode.images.slot)] = episode.images.slot
    np.testing.assert_array_equal(slots, sample.images.slot)
    _, shown = episode.completion[1]["content"]
    assert shown == {"type": "image", "sha256": first.key, "width": 20, "height": 10}
    json.dumps([episode.prompt, episode.completion])


GEMMA = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "vision_config": {"patch_size": 5, "image_size": 33},
}


def test_a_message_may_hold_several_pictures_of_gemma():
    """Its template writes one token for an image, which its text has once beside the features."""
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), ["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
    tokenizer.chat_template = QWEN_TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>"
    )
    tokenizer.image_format = read_format(None, GEMMA, tokenizer)

    async def compare(row, chat):
        chat.say([picture(20, 10), LOOK, picture(10, 20), picture(20, 10)])
        await chat.draw()
        chat.say([picture(30, 10), LOOK])
        await chat.draw()
        return 1.0

    images = play(tokenizer, compare, ["a", "b"]).images
    assert [image.size for image in images.images] == [(20, 10), (10, 20), (30, 10)]
    slots = [*range(4), *range(4, 8), *range(4), *range(8, 12)]
    assert images.slot[images.slot >= 0].tolist() == slots


def test_an_edited_picture_begins_another_sequence(tokenizer):
    async def forget(row, chat):
        chat.say([picture(20, 10), LOOK])
        await chat.draw()
        held = chat.messages[0]["content"][0]["image"]
        assert held.size == (20, 10), "an image as it was read"
        chat.messages[0]["content"] = [picture(20, 10, seed=row["seed"]), LOOK]
        chat.say("And now?")
        await chat.draw()
        return 1.0

    # The published template writes a space before an answer that its generation prompt lacks.
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE.replace("'Assistant:'", "'Assistant: '")
    episode = play(tokenizer, forget, ["a", "b"], {"seed": 0})
    assert not episode.earlier and len(episode.images.images) == 1
    episode = play(tokenizer, forget, ["a", "b"], {"seed": 1})
    [before], after = episode.earlier, episode.sequences[-1]
    assert before.tokens == after.tokens[: len(before.tokens)]
    assert before.images.images != after.images.images


def test_a_sequence_ends_before_the_picture_that_no_row_has_room_for(tokenizer):
    [image] = play(tokenizer, walk, ["a", "b", "c", "d"]).images.images[:1]
    room = {"row_patches": image.num_patches}

    async def walk_on(row, chat):
        for _ in range(2):
            chat.say([LOOK, picture(20, 10)])
            assert await chat.draw() == "a"
        chat.say([LOOK, picture(10, 20)])
        answer = await chat.draw()
        assert (answer, answer.finished, chat.full) == ("", False, True)
        return 1.0

    episode = play(tokenizer, walk_on, ["a", "a", "a"], **room)
    assert episode.finish_reason == "length" and episode.num_sampled == 4


LOOKING = '''
from pathlib import Path


def look(where: str) -> list:
    """Take a picture.

    Args:
        where: The direction.
    """
    picture = (Path(__file__).parent / "other.png").read_bytes()
    return [{"type": "text", "text": where}, {"type": "image", "image": picture}]
'''


def test_tools_return_pictures_and_rows_bring_theirs(folder, tokenizer):
    (folder / "look.py").write_text(LOOKING)
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + TEMPLATE
    env = open_env(EnvConfig(kind="tools", tools=[f"{folder}/look.py:look"]), tokenizer, 400)
    rows = open_rows(folder, tokenizer, {"prompt": "What?", "images": ["wide.png"]})
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'
    engine = open_view(ScriptedEngine(tokenizer, [call, "red"]))
    episode = asyncio.run(env.run(rows[0], engine, Sampling(), 0))
    assert len(episode.images.images) == 2
    assert episode.prompt[0]["content"][0]["path"] == str(folder / "wide.png")
    assert episode.completion[1]["content"][0] == {"type": "text", "text": "north"}
    assert episode.metrics["tool_errors"] == 0


@pytest.mark.parametrize(
    "entry",
    [{"type": "image", "url": "https://example.org/a.png"}, {"type": "image", "title": "A"}],
)
def test_results_that_only_name_images_are_text(entry):
    async def search() -> list:
        """Search."""
        return [{"type": "page", "title": "B"}, entry]

    answer = asyncio.run(Toolbox([make_tool(search)]).answer(ToolCall("search", {})))
    assert json.loads(answer["content"]) == [{"type": "page", "title": "B"}, entry]


def test_texts_beside_images_are_bounded_and_can_be_tokenized(tokenizer):
    async def look() -> list:
        """Look."""
        return [{"type": "text", "text": "\ud800" + "a" * 10**6}, picture(20, 10)]

    async def show(row, chat):
        result = await Toolbox([make_tool(look)]).answer(ToolCall("look", {}))
        chat.say(result["content"])
        await chat.draw()
        return 1.0

    episode = play(tokenizer, show, ["a"])
    text, _ = episode.prompt[0]["content"]
    assert text["text"].startswith("?aaa") and len(text["text"]) < MAX_RESULT + 50


def test_a_picture_that_cannot_be_read_is_named(folder, tokenizer):
    async def broken(row, chat):
        chat.say([LOOK, {"type": "image", "image": row["bytes"]}])

    for data, problem in ((b"GIF8", "image 1 .bytes.: an image is none of PNG"), ("x.png", "no f")):
        with pytest.raises(UserError, match=f"chat.say: a content cannot be used.*{problem}"):
            play(tokenizer, broken, [], {"bytes": data})
    text_tokenizer = open_tokenizer(folder)
    text_tokenizer.image_format = None
    env = ChatEnv(text_tokenizer, broken, EnvConfig(kind="dialogue"), name="world")
    with pytest.raises(UserError, match="only text content is supported"):
        asyncio.run(env.run({"bytes": b""}, ScriptedEngine(tokenizer, []), Sampling(), 0))


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


def test_images_of_a_history_and_of_a_column_belong_to_their_messages(folder, tokenizer):
    image, text = {"type": "image", "path": "wide.png"}, {"type": "text", "text": "What?"}
    history = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": "A road."},
    ]
    question = [{"role": "user", "content": [{"type": "image"}, text]}]
    rows = open_rows(
        folder,
        tokenizer,
        {"prompt": "And there?", "history": history},
        {"prompt": question, "messages": [*question, history[1]], "images": ["wide.png"]},
    )
    for row, turns in zip(rows, (3, 1), strict=True):
        source, _, placed = SingleTurn(tokenizer).read(row)
        assert len(source) == turns and len(placed.images) == 1
        assert source[0]["content"][0]["path"] == str(folder / "wide.png")


def test_a_prompt_with_more_patches_than_a_row_is_not_answered(folder, tokenizer):
    rows = open_rows(folder, tokenizer, {"prompt": "What?", "images": ["wide.png"]})
    [image] = SingleTurn(tokenizer).read(rows[0])[2].images
    engine, patches = ScriptedEngine(tokenizer, ["red"]), image.num_patches
    env = open_env(EnvConfig(), tokenizer, row_patches=patches - 1)
    with pytest.raises(UnusableRow, match=r"too many patches .*data\.image_patches"):
        asyncio.run(env.run(rows[0], open_view(engine), Sampling(), 0))
    assert engine.texts == ["red"]
    for limit, unreadable in ((patches - 1, True), (patches, False)):
        row = PromptRows(rows.rows, rows.dataset, "x", rows.images, limit)[0]
        assert isinstance(row, UnreadableRow) == unreadable, "dropped at reading, nothing rendered"
        assert not unreadable or "too many patches" in row.reason
    with pytest.raises(UserError, match="1 of 1 prompts looked at cannot be used"):
        measure_prompts(rows, env, "data.datasets.0", print)
    env = open_env(EnvConfig(), tokenizer, row_patches=patches)
    assert asyncio.run(env.run(rows[0], open_view(engine), Sampling(), 0)).images is not None


def test_a_server_without_pillow_refuses_images(folder, tokenizer, monkeypatch):
    form, note = ServingFormat(tokenizer, 1000, 20), pytest.fail
    url = f"data:image/png;base64,{base64.b64encode(draw(20, 10)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestRefused, match=r"pip install .jaxtrain\[vision\]") as caught:
        form.read_chat({"messages": [{"role": "user", "content": content}]}, note)
    assert caught.value.status == 400


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
