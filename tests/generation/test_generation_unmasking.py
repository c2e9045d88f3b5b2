"""Answers by unmasking, against passes of the plain model written out here; blocks and batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import Batch
from jaxtrain.config import SamplingConfig
from jaxtrain.errors import UserError
from jaxtrain.generation.local import diffusion_sampler
from jaxtrain.generation.local.diffusion_device import Unmasking
from jaxtrain.generation.local.diffusion_sampler import UnmaskingSampler
from jaxtrain.models import build, families

MASK, LENGTH = 60, 8
SIZES = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}
PROMPTS = [[5, 9, 11], [7, 3, 2, 8, 1], [4, 4, 12]]


def make_model(layers):
    return build.init(families.config_from_hf({**SIZES, "num_hidden_layers": layers}), 3)


@pytest.fixture(scope="module")
def single():
    return make_model(1)


@pytest.fixture(scope="module")
def double():
    return make_model(2)


def answer(model, prompts=PROMPTS, ends=(), sampling=None, draws=None, rows=64, **how):
    chosen = {"max_new_tokens": LENGTH, **(sampling or {})}
    sampler = UnmaskingSampler(model, ends, max_len=64, how=Unmasking(MASK, **how), most_rows=rows)
    actual = sampler.generate(prompts, SamplingConfig(**chosen), draws=draws)
    assert not sampler.busy
    return actual


@jax.jit
def read(model, canvas):
    """Logits [C, V] of a canvas of which each token sees all."""
    index = jnp.arange(canvas.shape[0], dtype=jnp.int32)[None]
    batch = Batch(
        tokens=canvas[None],
        positions=index,
        prev=index - 1,
        until=jnp.full_like(index, canvas.shape[0]),
        weights={},
        since=jnp.zeros_like(index),
    )
    return model.logits(model.hidden(batch).hidden)[0]


def by_hand(model, prompt, shift, steps, block, confidence="probability", threshold=None):
    """(tokens, log-probs) of the answer: one canvas, pass by pass, as the docs say."""
    canvas = np.array([*prompt, *[MASK] * LENGTH], np.int32)
    logprobs = np.zeros(len(canvas))
    for start in range(len(prompt), len(canvas), block):
        stop = min(start + block, len(canvas))
        passes = -(-steps * (stop - start) // LENGTH)
        for k in range(passes):
            remaining = [i for i in range(start, stop) if canvas[i] == MASK]
            if not remaining:
                break
            logits = np.array(read(model, jnp.asarray(canvas)))[np.array(remaining) - int(shift)]
            logits[:, MASK] = -np.inf
            prob = np.exp(logits - logits.max(-1, keepdims=True))
            prob /= prob.sum(-1, keepdims=True)
            best = prob.argmax(-1)
            top = np.sort(prob, -1)
            score = {
                "probability": top[:, -1],
                "margin": top[:, -1] - top[:, -2],
                "entropy": (prob * np.log(np.maximum(prob, 1e-30))).sum(-1),
            }[confidence]
            count = len(remaining) if k == passes - 1 else max(1, len(remaining) // (passes - k))
            if threshold is not None:
                count = max(count, int((top[:, -1] >= threshold).sum()))
            for position in np.argsort(-score, kind="stable")[:count]:
                canvas[remaining[position]] = best[position]
                logprobs[remaining[position]] = np.log(prob[position, best[position]])
    return canvas[len(prompt) :].tolist(), logprobs[len(prompt) :]


@pytest.mark.parametrize(
    "how",
    [
        {"shift": True, "steps": 8, "block_length": 3, "threshold": 0.4},
        pytest.param(
            {"shift": False, "steps": 3, "block_length": 8, "confidence": "margin"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"shift": True, "steps": 4, "block_length": 3, "confidence": "entropy"},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"shift": True, "steps": 8, "block_length": 8}, marks=pytest.mark.thorough),
    ],
)
def test_the_sampler_does_what_is_written_out_here(double, how):
    expected = dict(how, block=how["block_length"])
    del expected["block_length"]
    for prompt, actual in zip(PROMPTS, answer(double, **how), strict=True):
        tokens, logprobs = by_hand(double, prompt, **expected)
        assert actual.tokens == tokens and MASK not in tokens
        np.testing.assert_allclose(actual.logprobs, logprobs, atol=2e-5)
        assert actual.finish_reason == "length" and len(actual.versions) == LENGTH


@pytest.mark.slow
def test_a_cache_is_exact_where_the_rest_of_the_text_cannot_change(single):
    """In a single layer, keys and values of a token are its own: the block alone reads the same."""
    how = {"shift": True, "block_length": 4, "steps": 8}
    exact, cached = (answer(single, cache=cache, **how) for cache in (False, True))
    assert [entry.tokens for entry in exact] == [entry.tokens for entry in cached]
    for entry, second in zip(exact, cached, strict=True):
        np.testing.assert_allclose(entry.logprobs, second.logprobs, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "shift"),
    [
        (5, True),
        *[
            pytest.param(*how, marks=pytest.mark.thorough)
            for how in ((4, True), (12, True), (5, False))
        ],
    ],
)
def test_a_cached_block_is_read_alone(double, monkeypatch, length, shift):
    """The width that blocks are padded to is no part of what is read again: answers are those of a
    width that is exactly the block's."""
    how = {"shift": shift, "block_length": length, "steps": 24, "cache": True}
    sampling = {"max_new_tokens": 24}
    padded = answer(double, sampling=sampling, **how)
    monkeypatch.setattr(diffusion_sampler, "bucket", lambda count, least: count)
    exact = answer(double, sampling=sampling, **how)
    assert [entry.tokens for entry in padded] == [entry.tokens for entry in exact]
    for entry, second in zip(padded, exact, strict=True):
        np.testing.assert_allclose(entry.logprobs, second.logprobs, atol=2e-5)


@pytest.mark.slow
def test_answers_end_with_the_first_end_token(double):
    free = answer(double, steps=8, block_length=2)[0].tokens
    end = free[3]
    first = free.index(end)
    actual = answer(double, ends=(end,), steps=8, block_length=2)[0]
    assert actual.tokens == free[: first + 1] and actual.finish_reason == "stop"
    assert len(actual.logprobs) == len(actual.versions) == first + 1
    words = SamplingConfig(max_new_tokens=LENGTH, stop=[f"<{end}>"])
    sampler = UnmaskingSampler(
        double, (), max_len=64, how=Unmasking(MASK, steps=8, block_length=2),
        to_text=lambda tokens: "".join(f"<{t}>" for t in tokens),
    )  # fmt: skip
    assert sampler.generate(PROMPTS[:1], words)[0].tokens == free[: first + 1]


@pytest.mark.slow
def test_a_draw_is_its_own_whoever_shares_the_batch(double):
    hot = {"temperature": 1.0, "seed": 4}

    def draw(prompts=PROMPTS, **how):
        options = {"sampling": hot, "rows": 2, "steps": 4, **how}
        return [entry.tokens for entry in answer(double, prompts, **options)]

    in_pairs = draw()
    assert draw(rows=1) == in_pairs
    assert draw(PROMPTS[1:], draws=[1, 2]) == in_pairs[1:]
    assert draw(sampling={**hot, "seed": 5}) != in_pairs


@pytest.mark.slow
def test_gumbel_noise_draws_from_the_softmax(double):
    """Frequencies of one-token answers over many draws."""
    count = 512
    actual = answer(
        double, [PROMPTS[0]] * count, sampling={"temperature": 0.7, "max_new_tokens": 1}
    )
    drawn = np.bincount([entry.tokens[0] for entry in actual], minlength=61) / count
    logits = np.array(read(double, jnp.asarray([*PROMPTS[0], MASK])))[2] / 0.7
    logits[MASK] = -np.inf
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    assert np.abs(drawn - expected).max() < 4 * np.sqrt(0.25 / count)
    for entry in actual[:20]:
        np.testing.assert_allclose(entry.logprobs[0], np.log(expected[entry.tokens[0]]), atol=1e-4)


def test_what_only_next_tokens_have_is_refused(double):
    with pytest.raises(UserError, match="top_k"):
        answer(double, sampling={"top_k": 5})
    with pytest.raises(UserError, match="tokens"):
        answer(double, [[]])
    assert dataclasses.replace(Unmasking(MASK), steps=3).passes(4, 8) == 2
