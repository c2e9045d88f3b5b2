"""The sampler on prompts with images, against transformers in torch."""

import functools

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import torch
from test_generation_local import make_draw
from test_models_families import make_torch
from tiny_vision import IMAGE, SHAPES, VISION, draw_images, merge_of, pack_images, processed

from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local import prefill
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.scoring import score_text
from jaxtrain.generation.local.token_sampling import DrawKind, sample
from jaxtrain.models import loading

GREEDY = Sampling(max_new_tokens=9)


class Pictures:
    """Prompts with images of a family, as arrays for torch and as what the sampler takes."""

    def __init__(self, name):
        self.raw = VISION[name]
        self.patch, self.merge = self.raw["vision_config"]["patch_size"], merge_of(self.raw)
        self.arrays = draw_images(SHAPES[name], self.patch)

    def place(self, number):
        """Return the image of an array."""
        high, wide, _ = self.arrays[number].shape
        patches = (high // self.patch) * (wide // self.patch)
        key = f"{number:064x}"
        return Image(key, (wide, high), patches, patches // self.merge**2, b"")

    def prompt(self, seed, *parts):
        """Return (tokens, images in their places). parts: lengths of texts, and indices of arrays
        as strings."""
        rng, tokens, slot, images = np.random.default_rng(seed), [], [], []
        for part in parts:
            if isinstance(part, int):
                tokens += rng.integers(6, 97, part).tolist()
                slot += [-1] * part
                continue
            image = self.place(int(part))
            count, first = image.num_features, sum(i.num_features for i in images)
            tokens += [IMAGE] * count
            slot += range(first, first + count)
            images.append(image)
        return tokens, PlacedImages(tuple(images), np.array(slot, np.int32)) if images else None

    # As packing.pack.ImagePacker.
    row_patches = None

    def bucket(self, rows):
        return 144 if any(row is not None for row in rows) else 0

    def pack(self, rows, num_patches):
        listed = [
            [self.arrays[int(image.key, 16)] for image in row.images] if row is not None else []
            for row in rows
        ]
        return pack_images(listed, self.patch, self.merge, num_patches)

    def forward(self, torch_model, tokens, placed):
        """Logits [n, V] of torch."""
        inputs = {"input_ids": np.array(tokens)[None]}
        if placed is not None:
            arrays = [self.arrays[int(image.key, 16)] for image in placed.images]
            inputs = processed(self.raw, np.array(tokens), arrays)
        inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
        with torch.no_grad():
            return torch_model(use_cache=False, **inputs).logits[0].double().numpy()


@functools.cache
def open_models(name):
    """Return the model of transformers, and ours of its folder."""
    import tempfile

    torch_model = make_torch(VISION[name])
    with tempfile.TemporaryDirectory() as folder:
        torch_model.save_pretrained(folder)
        return torch_model, loading.load(folder)


def open_sampler(name, **options):
    _, model = open_models(name)
    sampler = LocalSampler(model, (), max_len=128, max_batch=16, **options)
    sampler.packer = Pictures(name)
    return sampler


def check_greedy(pictures, torch_model, tokens, placed, answer):
    """Each token is torch's most probable one that is no image, with torch's log-prob."""
    logits = pictures.forward(torch_model, [*tokens, *answer.tokens], placed)
    logits = logits[len(tokens) - 1 : -1]
    logits[:, IMAGE] = -np.inf
    shifted = logits - logits.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    assert answer.tokens == logits.argmax(-1).tolist()
    expected = logp[np.arange(len(logits)), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, expected, atol=2e-5)  # float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        "smolvlm",
        "qwen3_5",
        "gemma3",
        pytest.param("gemma4", marks=pytest.mark.thorough),
        pytest.param("gemma4_per_layer", marks=pytest.mark.thorough),
        pytest.param("qwen3_5_moe", marks=pytest.mark.thorough),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.thorough),
        pytest.param("idefics3", marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", marks=pytest.mark.thorough),
        pytest.param("qwen2_vl", marks=pytest.mark.thorough),
    ],
)
def test_greedy_answers_are_those_of_transformers(name, monkeypatch):
    """Prompts of several lengths in one batch: two images, one, one at the end, none; and the
    text of another prompt with another picture."""
    torch_model, _ = open_models(name)
    pictures, sampler = Pictures(name), open_sampler(name)
    prompts = [
        pictures.prompt(1, 3, "0", 55, "1", 30),  # across the end of a chunk
        pictures.prompt(2, 2, "4", 1),
        pictures.prompt(3, 5, "2"),
        pictures.prompt(4, 11),
        pictures.prompt(2, 2, "1", 1),
        pictures.prompt(2, 2, "2", 1),
    ]
    towers, see = [], prefill.see
    monkeypatch.setattr(
        prefill,
        "see",
        lambda model, images, slot: (towers.append(images), see(model, images, slot))[1],
    )
    group = [*prompts, *prompts[:3]]
    answers = sampler.generate(
        [tokens for tokens, _ in group], GREEDY, images=[placed for _, placed in group]
    )
    seen = sum(int((np.asarray(x.until) - np.asarray(x.since) > 1).any(1).sum()) for x in towers)
    assert seen == 5, "the tower reads the images of a prompt once"
    for (tokens, placed), answer in zip(group, answers, strict=True):
        check_greedy(pictures, torch_model, tokens, placed, answer)
    assert answers[0].tokens == answers[6].tokens
    assert prompts[4][0] == prompts[5][0] and answers[4].logprobs != answers[5].logprobs

    tokens, placed = prompts[0]
    values, _ = score_text(sampler, [*tokens, *answers[0].tokens], placed)
    # A text is scored by the whole softmax, so by less than its share of the tokens that are drawn.
    gaps = np.array(answers[0].logprobs) - values[len(tokens) :]
    assert (gaps > 0).all() and gaps.max() < 0.1


def test_a_token_that_is_never_drawn_has_no_share_of_the_softmax():
    logits = np.random.default_rng(0).standard_normal((64, 200)).astype(np.float32)
    logits[:, [7, 150]] = 9.0
    logits, keys = jax.numpy.asarray(logits), jax.random.split(jax.random.key(0), 64)
    masked = np.array(logits)
    masked[:, [7, 150]] = -np.inf
    expected = np.asarray(jax.nn.log_softmax(masked))
    # With top_k=1 the most probable tokens are never drawn: the next one takes their place.
    kinds = (DrawKind(False, False), DrawKind(True, False), DrawKind(True, True))
    for kind, top_k in [*((kind, 9) for kind in kinds), (kinds[-1], 1)]:
        draw = make_draw(64, temperature=float(kind.random), top_k=top_k)
        tokens, logprobs = sample(logits, keys, draw, kind, never=(7, 150))
        np.testing.assert_allclose(logprobs, expected[np.arange(64), tokens], atol=1e-5)
        if not kind.random or top_k == 1:
            assert np.array_equal(tokens, masked.argmax(-1))
        assert not np.isin(tokens, (7, 150)).any()


@pytest.mark.slow
def test_image_tokens_are_never_drawn():
    _, model = open_models("qwen3_vl")
    sampler = open_sampler("qwen3_vl")
    tokens, placed = Pictures("qwen3_vl").prompt(1, 3, "0", 8)
    text, _ = Pictures("qwen3_vl").prompt(4, 11)
    hot = Sampling(max_new_tokens=60, temperature=8.0, seed=1)
    prompts, images = [tokens, text] * 8, [placed, None] * 8
    drawn = [
        token
        for sampling in (hot, hot.model_copy(update={"top_k": 60}))
        for answer in sampler.generate(prompts, sampling, images=images)
        for token in answer.tokens
    ]
    assert len(drawn) == 16 * 60 * 2 and IMAGE not in drawn
    assert len({*drawn}) == 96, "every other token is drawn"


def test_what_cannot_read_images_refuses_them():
    tokens, placed = Pictures("qwen3_vl").prompt(1, 3, "0", 8)
    sampler = open_sampler("qwen3_vl")
    with pytest.raises(UserError, match=f"prompt 0 holds token {IMAGE}, which stands for an image"):
        sampler.generate([tokens], GREEDY)
    sampler.packer = None
    with pytest.raises(UserError, match="prompt 0 has images, and the model reads text alone"):
        sampler.generate([tokens], GREEDY, images=[placed])
