"""Prompts with images for vLLM: what is sent, and that the server reads our tokens and pixels."""

import asyncio
import base64
import dataclasses
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_vllm import STOP, FakeVllm
from real_vllm import CLOSE, PYTHON, RealServer, change, make_config, make_vision_model
from smolvlm_text import QWEN_TEMPLATE, draw, open_tokenizer
from test_generation_vllm import DRAW, opened
from tiny_vision import VISION

from jaxtrain.cli.server_answers import open_prompt_images
from jaxtrain.config import ModelConfig
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.data.chat.control_tokens import add_tokens, encode
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.images.decode import decode
from jaxtrain.data.images.format import read_format
from jaxtrain.data.images.patches import read_picture
from jaxtrain.data.packing.pack import BARE, MIN_SCORING_ROW, lay_out, pack_for_scoring
from jaxtrain.data.packing.tree import chain, join_images
from jaxtrain.environments.single_turn import SingleTurn
from jaxtrain.errors import UserError
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.vllm import images as vllm_images
from jaxtrain.generation.vllm.factory import open_vllm
from jaxtrain.generation.vllm.images import PromptImages
from jaxtrain.main import main
from jaxtrain.methods.offline import open_images

SIZES = ((40, 30), (31, 64), (16, 16), (40, 30))
QWEN = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 8, "spatial_merge_size": 2}}
TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")


def open_qwen(folder):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), TOKENS)
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.image_format = read_format(None, QWEN, tokenizer)
    return tokenizer


def read_prompt(tokenizer, *sizes):
    """Return (tokens, images in their places) of a question about noise of these sizes."""
    images = [{"type": "image", "image": draw(*size)} for size in sizes]
    texts = [{"type": "text", "text": text} for text in ("One:", " two:", " three:", " four:")]
    parts = [part for pair in zip(texts, images, strict=False) for part in pair]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    return SingleTurn(tokenizer).read({"prompt": messages})[1:]


def open_part(part):
    return decode(base64.b64decode(part["url"].partition(",")[2]))


@pytest.mark.parametrize("open_kind", [open_tokenizer, open_qwen])
def test_the_server_gets_a_placeholder_and_the_pixels_of_each_image(open_kind, tmp_path):
    """Expand as a server does: a placeholder becomes the tokens of a picture of the size that was
    sent. They are ours, and the picture is cut into our patches."""
    tokenizer = open_kind(tmp_path)
    image_format = tokenizer.image_format
    placeholder = tokenizer.convert_tokens_to_ids(image_format.placeholder)
    tokens, placed = read_prompt(tokenizer, *SIZES)

    def expand(sent, parts):
        texts = iter(encode(tokenizer, image_format.expand(open_part(x).size)) for x in parts)
        return [t for token in sent for t in (next(texts) if token == placeholder else [token])]

    fake = FakeVllm()
    fake.expand = expand
    with opened([fake]) as (engine, servers, _):
        engine.images = PromptImages(tokenizer, (placeholder,))
        view = open_view(engine, media={image_format.token: "image_token_id"})

        async def ask(**options):
            try:
                return await view.generate(tokens, DRAW, (STOP,), images=placed, **options)
            finally:
                await engine.close()

        # It counts what it drew by its numbers, which those of the prompt reach, too.
        fake.length = sum(token >= 100 for token in tokens) + 4
        answer = asyncio.run(ask())
        assert answer.finish_reason == "stop" and len(answer.tokens) == 4
        fake.expand = lambda sent, parts: [*expand(sent, parts), 7]
        with pytest.raises(
            UserError, match=f"{len(tokens)} tokens with images .* {len(tokens) + 1}"
        ):
            asyncio.run(ask())
        servers.all[0].route = "/v1/completions"
        with pytest.raises(UserError, match="--enable-scale-out"):
            asyncio.run(ask())
    body = fake.asked[0]
    assert body["token_ids"].count(placeholder) == len(SIZES) == len(body["content_parts"])
    assert body["sampling_params"]["logit_bias"] == {str(placeholder): -100.0}
    parts = body["content_parts"]
    assert parts[0] == parts[3] and len({part["uuid"] for part in parts}) == 3
    for part, size in zip(parts, SIZES, strict=True):
        ours, sent = (image_format.cut(x) for x in (decode(draw(*size)), open_part(part)))
        for expected, actual in zip(ours, sent, strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
def test_generate_sends_images_to_servers(tmp_path, capsys):
    """The folder's config.json and image settings are read here, no weights."""
    model = make_vision_model(tmp_path / "model")
    for file in Path(model).glob("*.safetensors"):
        file.unlink()
    (tmp_path / "a.png").write_bytes(draw(40, 30))
    fake, fragments = FakeVllm(), []

    def expand(sent, parts):
        fragments.append((sent, parts))
        image_format = read_format(Path(model), raw, tokenizer)
        size = open_part(parts[0]).size
        tokens = encode(tokenizer, image_format.expand(size))
        place = sent.index(image_format.token)
        return [*sent[:place], *tokens, *sent[place + 1 :]]

    raw = json.loads((Path(model) / "config.json").read_text())
    tokenizer = load_tokenizer(str(model))
    fake.expand = expand
    command = ["generate", str(model), "--servers", fake.url, "sampling.max_new_tokens=4"]
    try:
        words = ["--prompt", "Which?", "--image", str(tmp_path / "a.png")]
        assert main([*command, *words]) == 0, capsys.readouterr().err
        assert len(fragments) == 1 and len(fragments[0][1]) == 1
        bias = fake.asked[-1]["sampling_params"]["logit_bias"]
        assert set(bias.values()) == {-100.0} and bias
        assert ">>> [image 40x30" in capsys.readouterr().out
    finally:
        fake.kill()


@pytest.mark.parametrize(
    ("name", "config", "settings", "sends"),
    [
        ("qwen3_vl", {}, {}, True),
        ("qwen3_vl", {}, {"do_resize": False}, False),
        ("qwen3_vl", {"vision_config": None}, {}, False),
        ("gemma3", {}, {}, False),
    ],
)
def test_servers_get_texts_where_images_cannot_be_sent(
    name, config, settings, sends, tmp_path, capsys
):
    """No setting of images is a reason to refuse texts; of images that are read, no token is
    drawn."""
    gemma = name == "gemma3"
    size = {"height": 33, "width": 33} if gemma else {"shortest_edge": 256, "longest_edge": 4096}
    tokens = ("<image_soft_token>", "<start_of_image>", "<end_of_image>") if gemma else TOKENS
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), tokens)
    token = tokenizer.convert_tokens_to_ids(tokens[0])
    raw = {**VISION[name], "image_token_index" if gemma else "image_token_id": token, **config}
    raw["text_config"] = {**raw["text_config"], "vocab_size": 528}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    given = {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    images = open_prompt_images(ModelConfig(path=str(tmp_path)), tokenizer)
    assert (images.tokenizer is tokenizer) == sends
    assert (token in images.never) == (sends or gemma)
    assert ("do_resize" in capsys.readouterr().err) == bool(settings)


def test_a_picture_is_encoded_once_for_a_group(tmp_path, monkeypatch):
    tokenizer, decoded = open_qwen(tmp_path), []
    tokens, placed = read_prompt(tokenizer, (47, 53))

    def read(image):
        decoded.append(image)
        time.sleep(0.05)
        return read_picture(image)

    monkeypatch.setattr(vllm_images, "read_picture", read)
    writer = PromptImages(tokenizer)
    with ThreadPoolExecutor(8) as threads:
        sent = list(threads.map(lambda _: writer.write(tokens, placed), range(8)))
    assert len(decoded) == 1 and all(prompt == sent[0] for prompt in sent)


@pytest.mark.slow
def test_the_engine_of_a_run_reads_images(tmp_path):
    fake = FakeVllm()
    server = SimpleNamespace(model=make_vision_model(tmp_path / "model"), port=fake.port)
    bundle = build_model_bundle(config := make_config(server, tmp_path, "full"))
    open_images(config, bundle.tokenizer, 512)
    engine, publisher = open_vllm(config, bundle)
    try:
        assert engine.reads_images and engine.images.tokenizer is bundle.tokenizer
        tokens = bundle.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
        assert engine.images.never == tuple(sorted(tokens))
    finally:
        publisher.close()
        fake.kill()


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    server = RealServer(make_vision_model(folder / "model"), "full", folder / "server.log")
    yield server
    server.kill(signal.SIGTERM)


def score(model, packer, tokens, placed, count):
    """Return the trainer's log-probs of the last `count` tokens."""
    tree = lay_out(chain(np.asarray(tokens, np.int32), {}))
    if placed is not None:
        images = join_images([(placed, len(placed.slot))], len(tokens))
        tree = dataclasses.replace(tree, images=images)
    fields = dataclasses.replace(BARE, images=packer)
    ((batch, ((_, row, start),)),) = pack_for_scoring(
        [tree], rows=1, share_rows=False, row_tokens=MIN_SCORING_ROW, fields=fields
    )
    micro = jax.tree.map(lambda x: x[0], batch)
    logp = token_logp(model, micro, drawable=True).logp
    return np.asarray(logp)[row, start + len(tokens) - count : start + len(tokens)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(
    not Path(PYTHON or "/nowhere").is_file(),
    reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
)
def test_served_answers_to_images_have_the_trainers_log_probs(vision_server, tmp_path):
    """Also of a tower that has changed alone: nothing of the old one is left in any cache."""
    config = make_config(vision_server, tmp_path, "full", weight_dtype="float32")
    vision = config.model.vision.model_copy(update={"train": "all"})
    config = config.model_copy(update={"model": config.model.model_copy(update={"vision": vision})})
    bundle = build_model_bundle(config)
    packer = open_images(config, bundle.tokenizer, 512)
    rebuild, params = abstract_params(bundle)[1], open_params(bundle, 0)
    sizes = [(), ((48, 64),), ((80, 40),), ((48, 64), (97, 51)), ((200, 190), (300, 40))]
    prompts = [read_prompt(bundle.tokenizer, *listed) for listed in sizes] * 2
    engine, publisher = open_vllm(config, bundle)
    never = bundle.architecture.never_drawn

    async def ask():
        calls = [
            engine.generate(tokens, config.sampling, (), index, images=placed)
            for index, (tokens, placed) in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    def compare(params, version):
        gaps = []
        for (tokens, placed), answer in zip(prompts, asyncio.run(ask()), strict=True):
            assert {*answer.versions} == {version} and not {*answer.tokens} & {*never}
            whole, count = [*tokens, *answer.tokens], len(answer.tokens)
            expected = score(rebuild(params), packer, whole, placed, count)
            gaps.append(np.abs(expected - answer.logprobs).max())
        return gaps

    try:
        publisher.publish(0, params, None)
        assert max(compare(params, 0)) < CLOSE
        tower = {
            name: change({name: array}, 0.5, 1)[name] if name.startswith("vision.") else array
            for name, array in params.items()
        }
        publisher.publish(1, tower, None)
        gaps = compare(tower, 1)
        print(gaps)
        assert max(gaps) < CLOSE
        assert min(compare(params, 1)[1:5]) > 10 * CLOSE, "the towers differ"
    finally:
        publisher.close()
