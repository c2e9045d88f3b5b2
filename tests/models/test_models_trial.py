"""Tokens that are tried and taken back leave no trace in any kind of layer's state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_recurrent
from families_added import FAMILIES as ADDED
from families_experts import FAMILIES as EXPERTS
from families_gemma import FAMILIES as GEMMA
from tiny_models import RAW, SIZES, documents, pack

from jaxtrain.errors import UserError
from jaxtrain.layers.attention import Attention
from jaxtrain.models import ARCHITECTURES, build, families
from jaxtrain.models.capabilities import require_trials

TOY = {"architectures": ["ToyForCausalLM"], "num_hidden_layers": 3, "sliding_window": 6}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", "toy_recurrent")


@pytest.mark.parametrize(
    ("raw", "apart"),
    [
        pytest.param(RAW["qwen3"], True, marks=pytest.mark.slow),
        # Rings of 5 slots, of which a trial of 4 takes most.
        pytest.param(RAW["mistral"], False, marks=pytest.mark.slow),
        # Recurrent layers between rings.
        pytest.param({**SIZES, **TOY}, True, marks=pytest.mark.slow),
        pytest.param(RAW["qwen3_5"], True, marks=pytest.mark.slow),
        pytest.param(RAW["nemotron_h_moe"], True, marks=pytest.mark.thorough),
        pytest.param({**SIZES, **ADDED["falcon_h1"]}, True, marks=pytest.mark.thorough),
        pytest.param({**SIZES, **ADDED["jamba"]}, True, marks=pytest.mark.thorough),
        pytest.param({**SIZES, **EXPERTS["lfm2_moe"]}, True, marks=pytest.mark.thorough),
        pytest.param({**SIZES, **GEMMA["gemma4_per_layer"]}, False, marks=pytest.mark.thorough),
    ],
    ids=[
        *("attention", "rings", "recurrent", "hybrid", "mamba", "side_by_side", "scan"),
        "convolutions",
        "shared_keys",
    ],
)
def test_a_trial_leaves_what_was_kept(raw, apart):
    """Random numbers of 4 tried tokens stay, none and all among them, with plain steps between;
    every kept token has the full forward's states, those of captured layers included."""
    # In float32 sums in another order differ by as much as small mistakes do.
    with jax.enable_x64(True):
        try_and_take_back(raw, apart)


def try_and_take_back(raw, apart):
    wide = {"param_dtype": "float64", "dtype": "float64"}
    model = build.init(families.config_from_hf(raw), 0, **wide)
    texts, layers = documents(0, 40, 33, 36), (1, 0)
    full = jax.jit(lambda model, batch: model.hidden(batch, capture=layers))(
        model, pack([[text] for text in texts], 40)
    )
    captured_BTF = jnp.concatenate([full.captured[layer] for layer in layers], axis=-1)
    if apart:
        model = jax.jit(lambda model: model.unstack())(model)
    rng, width = np.random.default_rng(1), 4

    @jax.jit
    def plain(tokens, cache, counts):
        return model.decode(tokens, cache, counts, capture=layers)

    @jax.jit
    def try_tokens(tokens, cache, counts):
        tried = model.decode(tokens, cache, capture=layers, trial=True)
        return tried._replace(cache=model.commit(tried.cache, counts))

    cache, seen = model.init_cache(3, 44), np.zeros(3, int)
    for turn in range(14):
        remaining = np.array([len(text) for text in texts]) - seen
        trial = turn % 4 > 0
        counts = np.minimum(remaining, rng.integers(0, width + 1, 3) if trial else [3, 1, 2])
        tokens = rng.integers(1, 97, (3, width)).astype(np.int32)
        for row, count in enumerate(counts):
            tokens[row, :count] = texts[row][seen[row] : seen[row] + count]
        read = try_tokens if trial else plain
        hidden, cache, captured, _ = read(tokens, cache, jnp.asarray(counts, jnp.int32))
        for row, count in enumerate(counts):
            position = slice(seen[row], seen[row] + count)
            expected = full.hidden[row, position], captured_BTF[row, position]
            for actual, exact in zip((hidden, captured), expected, strict=True):
                np.testing.assert_allclose(actual[row, :count], exact, rtol=1e-9, atol=1e-9)
        seen += counts
        assert cache.length.tolist() == seen.tolist()
    assert seen.min() > 20, "the rings went round"


def test_plain_decoding_gives_nothing_more():
    model = build.init(families.config_from_hf(RAW["qwen3"]), 0)
    shapes = jax.eval_shape(
        lambda: model.decode(jnp.zeros((2, 1), jnp.int32), model.init_cache(2, 8))
    )
    assert shapes.captured is None
    assert jax.tree.structure(shapes.cache) == jax.tree.structure(model.init_cache(2, 8))


@pytest.mark.parametrize("layer", [toy_recurrent.Recurrent, Attention])
def test_a_layer_that_takes_nothing_back_is_refused(layer, monkeypatch):
    model = build.abstract(families.config_from_hf({**SIZES, **TOY}))
    require_trials(model, "--draft")
    monkeypatch.setattr(layer, "trials", "none")
    with pytest.raises(UserError, match=f"--draft: .*{layer.__name__}"):
        require_trials(model, "--draft")
