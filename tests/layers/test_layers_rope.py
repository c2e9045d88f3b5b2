"""Position encodings: frequencies of every kind against transformers, pairs, scaled queries."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.layers.rope import OPTIONAL, PositionScale, angles, frequencies, rotate
from jaxtrain.models import families

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 64,
}
LENGTHS = {"factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "linear": {"factor": 4.0},
    "llama3": {**LENGTHS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {**LENGTHS, "mscale": 0.7, "mscale_all_dim": 1.1},
    "longrope": LONG,
    "proportional": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
}
DIMS, SHARE = 16, 0.75


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("row_tokens", [0, 32, 600])
def test_frequencies_are_those_of_transformers(kind, row_tokens):
    """Rotate three quarters of a head; rows of unknown, short and long texts."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import Phi3Config

    rope = {"rope_theta": 500.0, **KINDS[kind], "rope_type": kind, "partial_rotary_factor": SHARE}
    config = Phi3Config(head_dim=DIMS, max_position_embeddings=256)
    config.rope_parameters = dict(rope)
    config.original_max_position_embeddings = LENGTHS["original_max_position_embeddings"]
    reference, scale = rope_utils.ROPE_INIT_FUNCTIONS[kind](
        config, "cpu", seq_len=row_tokens or 256
    )
    result, factor = frequencies(DIMS, rope, ("partial_rotary_factor",), 256, row_tokens)
    # Theirs in float32.
    np.testing.assert_allclose(result, reference.numpy(), rtol=2e-6)
    np.testing.assert_allclose(factor, scale, rtol=1e-6)


def test_alpha_stretches_the_base_where_a_family_knows_it():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 8.0, "factor": 1.0}
    actual, factor = frequencies(4, rope, ("alpha",))
    # 100 * 8^(4 / 2) = 6400, of which every second dim of four has the root.
    np.testing.assert_allclose(actual, [1.0, 1 / 80], rtol=1e-12)
    assert factor == 1.0
    with pytest.raises(UserError, match="'dynamic' is not supported"):
        frequencies(4, rope)


def test_shares_that_no_family_reads_or_that_are_odd():
    """Without scaling, transformers rotates whole pairs of an odd number of dims, with the
    frequencies of that number."""
    assert "partial_rotary_factor" not in set().union(*OPTIONAL.values())
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match="partial_rotary_factor"):
        frequencies(8, rope)
    actual, _ = frequencies(6, rope, ("partial_rotary_factor",))
    np.testing.assert_allclose(actual, [1.0, 100 ** (-2 / 3)], rtol=1e-12)
    scaled = {**rope, "rope_type": "linear", "factor": 2.0}
    with pytest.raises(UserError, match="gives 3 dims"):
        frequencies(6, scaled, ("partial_rotary_factor",))


def test_adjacent_pairs_are_complex_numbers():
    """Scores of queries and keys that were turned so are those of adjacent pairs."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 5, 2, 8)), jnp.float32) for _ in range(2))
    positions = jnp.asarray([[0, 1, 4, 9, 30]], jnp.int32)
    turns = angles(positions, np.array([1.0, 0.3, 0.01]), 1.0, jnp.float32)
    scores = jnp.einsum("btnh,bsnh->nts", rotate(q, turns, True), rotate(k, turns, True))

    def turned(x):
        pairs = np.asarray(x)[0, ..., :6].astype(np.float64).reshape(5, 2, 3, 2)
        turn = np.exp(1j * np.asarray(positions)[0, :, None] * np.array([1.0, 0.3, 0.01]))
        return (pairs[..., 0] + 1j * pairs[..., 1]) * turn[:, None]

    expected = np.einsum("tnh,snh->nts", turned(q), turned(k).conj()).real
    passed = np.asarray(q)[0, ..., 6:], np.asarray(k)[0, ..., 6:]
    expected += np.einsum("tnh,snh->nts", *passed)
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_queries_grow_in_steps():
    actual = PositionScale(0.5, 4)(jnp.asarray([[0, 3, 4, 8]], jnp.int32), jnp.float32)
    np.testing.assert_allclose(actual, 1 + 0.5 * np.log([[1, 1, 2, 3]]), rtol=1e-6)


def test_dynamic_ntk_reaches_as_far_as_its_factor():
    raw = {
        **{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 32},
        **{"num_attention_heads": 2, "max_position_embeddings": 256},
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    }
    config = families.config_from_hf(raw)
    short, long = config.for_rows(256), config.for_rows(257)
    assert (config.longest, short.longest, long.longest) == (256, 256, 1024)
    assert long.longest_said == "max_position_embeddings 256 x factor 4.0"
    assert config.to_hf() == short.to_hf() == long.to_hf()


def test_rows_of_a_run_choose_between_the_tables_of_longrope():
    raw = {
        **{"model_type": "phi3", "num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 32},
        **{"num_attention_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0},
        **{"partial_rotary_factor": SHARE, "rope_scaling": LONG},
        "original_max_position_embeddings": 64,
    }
    config = families.config_from_hf(raw)
    short, long = config.for_rows(64), config.for_rows(65)
    assert (short.longest, long.longest, config.longest) == (64, 256, 256)
    assert "original_max_position_embeddings 64" in short.longest_said
    tables = [item.encodings()["default"][0] for item in (config, long, short)]
    np.testing.assert_array_equal(tables[0], tables[1])
    factors = np.array(LONG["long_factor"]) / LONG["short_factor"]
    np.testing.assert_allclose(tables[2] / tables[1], factors, rtol=1e-12)
    assert config.to_hf() == short.to_hf() == long.to_hf()


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("row_tokens", [64, 600])
def test_rotated_dims_of_latent_attention_are_scaled_by_length(kind, row_tokens):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import MiniCPM3Config

    rope = {"rope_theta": 500.0, **KINDS[kind], "rope_type": kind}
    raw = {
        **{"model_type": "minicpm3", "num_hidden_layers": 1, "vocab_size": 50, "hidden_size": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "qk_rope_head_dim": 12},
        **{"max_position_embeddings": 256, "rope_parameters": rope},
    }
    reference, scale = rope_utils.ROPE_INIT_FUNCTIONS[kind](
        MiniCPM3Config(**raw), "cpu", seq_len=row_tokens
    )
    config = families.config_from_hf(raw).for_rows(row_tokens)
    result, factor = config.encodings()["default"]
    np.testing.assert_allclose(result, reference.numpy(), rtol=2e-6)
    np.testing.assert_allclose(factor, scale, rtol=1e-6)
