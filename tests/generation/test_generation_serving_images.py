"""Requests with images before they are drawn; likely tokens beside those never drawn."""

import base64
from types import SimpleNamespace

import numpy as np
import pytest
from smolvlm_text import draw, open_tokenizer

from jaxtrain.adapters.slotted import NO_ADAPTER
from jaxtrain.generation.engine import MAX_LIKELY
from jaxtrain.generation.local import scoring
from jaxtrain.generation.serving.open_request import ServingFormat


@pytest.mark.slow
def test_images_of_messages_are_placed(tmp_path):
    serving_format = ServingFormat(open_tokenizer(tmp_path), 1000, 200)

    def read(*urls):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*parts, {"type": "text", "text": "Which?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        return serving_format.read_chat(body, lambda name: None)

    first, second = (
        f"data:image/png;base64,{base64.b64encode(draw(*size)).decode()}"
        for size in ((20, 10), (16, 16))
    )
    request = read(first, second, first)
    tokens, slot = np.array(request.prompts[0]), request.images.slot
    assert [image.size for image in request.images.images] == [(20, 10), (16, 16)]
    np.testing.assert_array_equal(slot >= 0, tokens == serving_format.tokenizer.image_format.token)
    features = [image.num_features for image in request.images.images]
    expected = [*range(sum(features)), *range(features[0])]
    np.testing.assert_array_equal(slot[slot >= 0], expected)


def test_as_many_likely_tokens_remain_without_those_that_are_never_drawn(monkeypatch):
    def score_text(sampler, tokens, images, k, adapter):
        return [0.0] * len(tokens), [[(token, -float(token)) for token in range(k)]] * len(tokens)

    monkeypatch.setattr(scoring, "score_text", score_text)
    sampler = SimpleNamespace(model=SimpleNamespace(never_drawn=(1, 3)))
    sampling = SimpleNamespace(temperature=1.0)
    fields = {"images": None, "constraint": None, "adapter": NO_ADAPTER}
    request = SimpleNamespace(prompt=[5], sampling=sampling, **fields)
    answer = SimpleNamespace(tokens=[0, 2], logprobs=[0.0, 0.0])
    for likely in scoring.find_likely(sampler, request, answer, MAX_LIKELY):
        tokens = [token for token, _ in likely]
        assert tokens == [t for t in range(MAX_LIKELY + 2) if t not in (1, 3)]
