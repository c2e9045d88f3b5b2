"""Cached decoding gives the hidden states of the full forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import RAW, documents, pack

from jaxtrain.models import build


@pytest.mark.parametrize(
    ("name", "scan", "apart"),
    [
        ("qwen3", True, True),
        ("qwen2_window", False, False),
        ("mistral", True, False),
        ("qwen3_moe_mixed", True, True),
    ],
)
def test_ragged_prefill_and_steps_equal_full_forward(name, scan, apart):
    config = build.config_from_hf(RAW[name])
    model = build.init(config, 0, scan_layers=scan)
    texts = documents(0, 17, 12, 20)
    lengths = np.array([9, 4, 12])  # of the prompts; the rest arrives one by one
    width, steps = 12, 8
    forward = jax.jit(type(model).hidden)
    full = np.asarray(forward(model, pack([[text] for text in texts], 20)))

    prompts = np.zeros((3, width), np.int32)
    for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        prompts[row, :n] = text[:n]
    if apart:
        model = jax.jit(lambda model: model.unstack())(model)
    cache = model.init_cache(3, width + steps)
    decode = jax.jit(type(model).decode)
    hidden, cache = decode(model, prompts, cache, jnp.asarray(lengths))
    for row, n in enumerate(lengths):
        # float32 through another kernel: a few units in the last place of numbers around 1.
        np.testing.assert_allclose(hidden[row, :n], full[row][:n], atol=2e-5)
    for step in range(steps):
        at = lengths + step
        tokens = np.array([[text[i]] for text, i in zip(texts, at, strict=True)], np.int32)
        hidden, cache = decode(model, tokens, cache)
        for row in range(3):
            np.testing.assert_allclose(hidden[row, 0], full[row][at[row]], atol=2e-5)
    assert cache.length.tolist() == (lengths + steps).tolist()
