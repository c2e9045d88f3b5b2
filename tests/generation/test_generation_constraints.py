"""Constrained answers against a plain model and the `regex` package's partial matches.

The reference allows a token where the text with it can still match, knows no automaton and no
cache, and normalizes over these tokens alone.
"""

import json
import sys

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import regex

from jaxtrain.batch import Batch
from jaxtrain.config import SamplingConfig
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.errors import UserError
from jaxtrain.generation.local.constraints import Grammars
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.models import build, families

pytest.importorskip("llguidance")

V, LENGTH = 512, 32
SIZES = {
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.7,
}
PATTERN = r"[a-f0-9 ]{3,9}[.!?]"
"""Nowhere is there text without a choice, which the automaton has in the tokenizer's own tokens."""
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PROMPTS = [[5, 9, 11], [7, 3, 2], [4, 8, 12]]


@pytest.fixture(scope="module")
def model():
    return build.init(families.config_from_hf(SIZES), 3)


def sampling(temperature=0.0, limit=LENGTH, seed=0, **outputs):
    return SamplingConfig(
        temperature=temperature, max_new_tokens=limit, seed=seed, structured_outputs=outputs
    )


def draw(model, tokenizer, samplings):
    """Completions of as many requests in one batch; the draw's number is its index."""
    sampler = LocalSampler(
        model, [tokenizer.eos_token_id], max_len=64, to_text=tokenizer.decode, tokenizer=tokenizer
    )
    requests = [
        sampler.request(PROMPTS[i % len(PROMPTS)], wanted, number=i)
        for i, wanted in enumerate(samplings)
    ]
    for request in requests:
        sampler.add(request)
    while sampler.busy:
        sampler.step()
    return [request.completion for request in requests]


@pytest.fixture(scope="module")
def mixed(model, tokenizer):
    """A batch of constraints of all kinds and of none, and its unconstrained rows by themselves."""
    wanted = [
        sampling(regex=PATTERN),
        sampling(1.0, regex=PATTERN),
        sampling(0.7, regex=PATTERN, seed=5),
        sampling(1.0, json_schema=SCHEMA),
        sampling(1.0, limit=8),
        sampling(1.0, choice=["left", 'right "now"']),
        sampling(1.0, limit=4, regex=PATTERN),
        sampling(limit=8),
    ]
    return wanted, draw(model, tokenizer, wanted)


@jax.jit
def read(model, canvas):
    """Logits [C, V] of a canvas of which each token sees those before it."""
    index = jnp.arange(canvas.shape[0], dtype=jnp.int32)[None]
    until = jnp.full_like(index, canvas.shape[0])
    batch = Batch(tokens=canvas[None], positions=index, prev=index - 1, until=until, weights={})
    return model.logits(model.hidden(batch).hidden)[0]


def follow(model, tokenizer, prompt, pattern, temperature, tokens=None):
    """(tokens, log-probs) of the greedy answer, or the log-probs of an answer's tokens."""
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    answer, logprobs, text = [], [], ""
    while len(answer) < LENGTH:
        canvas = np.zeros(64, np.int32)
        canvas[: len(prompt) + len(answer)] = [*prompt, *answer]
        logits = np.array(read(model, jnp.asarray(canvas)), np.float64)
        logits = logits[len(prompt) + len(answer) - 1] / (temperature or 1.0)
        allowed = [
            token for token, piece in enumerate(texts)
            if token not in special and "\ufffd" not in piece and piece
            and regex.fullmatch(pattern, text + piece, partial=True)
        ]  # fmt: skip
        if regex.fullmatch(pattern, text):
            allowed.append(tokenizer.eos_token_id)
        total = np.logaddexp.reduce(logits[allowed])
        token = max(allowed, key=lambda t: logits[t]) if tokens is None else tokens[len(answer)]
        assert token in allowed
        answer.append(token)
        logprobs.append(logits[token] - total)
        text += texts[token]
        if token == tokenizer.eos_token_id or (tokens is not None and len(answer) == len(tokens)):
            break
    return answer, logprobs


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1, 2, 6])
def test_draws_and_log_probs_are_those_of_the_allowed_tokens(model, tokenizer, mixed, row):
    wanted, completions = mixed
    completion, temperature = completions[row], wanted[row].temperature
    drawn = completion.tokens if temperature else None
    prompt = PROMPTS[row % len(PROMPTS)]
    tokens, logprobs = follow(model, tokenizer, prompt, PATTERN, temperature, drawn)
    assert completion.tokens == tokens
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-4)
    assert completion.finish_reason == ("length" if row == 6 else "stop")


@pytest.mark.slow
def test_answers_match_whatever_shares_their_batch(model, tokenizer, mixed):
    wanted, completions = mixed
    texts = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]
    assert all(regex.fullmatch(PATTERN, texts[row]) for row in (0, 1, 2))
    jsonschema.validate(json.loads(texts[3]), SCHEMA)
    assert texts[5] in wanted[5].structured_outputs.choice
    assert len(completions[6].tokens) == 4
    free = draw(model, tokenizer, [sampling(temperature=w.temperature, limit=8) for w in wanted])
    for row in (4, 7):
        assert completions[row].tokens == free[row].tokens
        np.testing.assert_allclose(completions[row].logprobs, free[row].logprobs, atol=1e-5)


def test_every_one_of_many_draws_matches(model, tokenizer):
    wanted = [sampling(1.5, regex=PATTERN, seed=seed) for seed in range(24)]
    texts = [
        tokenizer.decode(completion.tokens, skip_special_tokens=True)
        for completion in draw(model, tokenizer, wanted)
    ]
    assert all(regex.fullmatch(PATTERN, text) for text in texts) and len(set(texts)) > 12


def test_what_cannot_be_matched_is_named(model, tokenizer, monkeypatch):
    sampler = LocalSampler(model, [1], max_len=64, tokenizer=tokenizer)
    for outputs, message in [
        ({"regex": "(["}, "structured_outputs.regex cannot be compiled.*invalid regex"),
        ({"json_schema": {"type": "nosuch"}}, "json_schema cannot be compiled.*Invalid type"),
        ({"json_schema": {"uniqueItems": True, "type": "array"}}, "Unimplemented keys"),
    ]:
        with pytest.raises(UserError, match=message):
            sampler.request([1, 2], sampling(**outputs))
    with pytest.raises(UserError, match="a token that ends an answer"):
        LocalSampler(model, [], max_len=64, tokenizer=tokenizer).request(
            [1, 2], sampling(regex="a")
        )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'jaxtrain\[constrained\]'"):
        sampler.request([1, 2], sampling(regex="a"))


@pytest.mark.parametrize("vocab_size", [512, 520, 544])
def test_bits_have_the_words_of_the_vocabulary(tokenizer, vocab_size):
    """Most published vocabularies are multiples of 32."""
    constraint = Grammars(tokenizer, vocab_size).begin(StructuredOutputs(regex="[ab]"), [2])
    bits = np.unpackbits(constraint.allowed.view(np.uint8), bitorder="little")
    assert len(bits) == -(-vocab_size // 32) * 32
    assert set(np.flatnonzero(bits)) == {tokenizer.encode(letter)[-1] for letter in "ab"}
