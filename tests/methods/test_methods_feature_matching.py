"""EBFT's rewards beside numpy, by the definitions that the method is published with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.core.scorer import pool
from jaxtrain.methods.ebft import feature_matching
from jaxtrain.methods.ebft.config import FeatureConfig
from jaxtrain.methods.ebft.feature_matching import pooling_weights

whiten = jax.jit(feature_matching.whiten)
rewards = jax.jit(feature_matching.rewards, static_argnames=("alignment", "diversity", "whitening"))


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def whiten_by_svd(generated_GD, truth_D):
    """The D x D matrix, as published."""
    U, s, _ = np.linalg.svd(generated_GD.T, full_matrices=False)
    inverse = np.where(s > 1e-5 * s.max(), 1 / (s + 1e-12), 0)
    W = U @ np.diag(inverse) @ U.T
    return generated_GD @ W, truth_D @ W


def draw(kind, num_answers=4, width=64):
    rng = np.random.default_rng(7)
    generated = rng.normal(size=(num_answers, width)) + 2.0
    if kind == "repeated":
        generated[1] = generated[0]
    if kind == "nearly":
        generated[1] = generated[0] + 1e-2 * rng.normal(size=width)
    if kind == "narrow":
        generated = generated[:, :3]
    return generated, rng.normal(size=generated.shape[1]) + 2.0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("kind", ["any", "repeated", "nearly", "narrow"])
def test_whitening_is_that_of_the_full_matrix(kind, dtype):
    """Products and norms are all that rewards ask of it; float32's bound is eps times the largest
    over the smallest direction squared, 1e4 for answers that are nearly alike."""
    generated, truth = draw(kind)
    wanted_generated, wanted_truth = whiten_by_svd(generated, truth)
    found_generated, found_truth = map(
        np.asarray, whiten(jnp.asarray(generated, dtype), jnp.asarray(truth, dtype))
    )
    scale = max(1.0, float(wanted_truth @ wanted_truth))
    bound = (1e-9 if dtype == np.float64 else 2e-3) * scale
    np.testing.assert_allclose(
        found_generated @ found_generated.T, wanted_generated @ wanted_generated.T, atol=bound
    )
    np.testing.assert_allclose(
        found_generated @ found_truth, wanted_generated @ wanted_truth, atol=bound
    )
    np.testing.assert_allclose(found_truth @ found_truth, wanted_truth @ wanted_truth, atol=bound)


def test_whitened_answers_are_orthonormal_and_scale_does_not_matter():
    generated, truth = draw("any")
    actual, _ = whiten(jnp.asarray(generated), jnp.asarray(truth))
    np.testing.assert_allclose(actual @ actual.T, np.eye(4), atol=1e-10)
    entry = rewards(jnp.asarray(generated), jnp.asarray(truth), whitening=True)
    second = rewards(jnp.asarray(1000 * generated), jnp.asarray(truth), whitening=True)
    np.testing.assert_allclose(entry.rewards, second.rewards, atol=1e-10)
    np.testing.assert_allclose(entry.diversity, 0.0, atol=1e-10)


def test_copies_share_a_whitened_direction():
    """k copies have products and squared norms of 1 / k: a diversity that only they have."""
    generated, truth = draw("repeated")
    actual, _ = whiten(jnp.asarray(generated), jnp.asarray(truth))
    gram = np.asarray(actual @ actual.T)
    np.testing.assert_allclose(gram[:2, :2], 0.5, atol=1e-10)
    np.testing.assert_allclose(gram[2:, 2:], np.eye(2), atol=1e-10)


@pytest.mark.parametrize("whitening", [False, True])
def test_rewards_are_those_of_the_definition(whitening):
    """P prompts at once, each by its own answers alone."""
    rng = np.random.default_rng(1)
    generated, truth = rng.normal(size=(3, 5, 16)) + 1, rng.normal(size=(3, 16)) + 1
    actual = rewards(
        jnp.asarray(generated),
        jnp.asarray(truth),
        alignment=0.7,
        diversity=0.3,
        whitening=whitening,
    )
    for p in range(3):
        if whitening:
            actual_values, gold = whiten_by_svd(generated[p], truth[p])
        else:
            actual_values = generated[p] / np.linalg.norm(generated[p], axis=1, keepdims=True)
            gold = truth[p] / np.linalg.norm(truth[p])
        for j in range(5):
            cosine = (
                actual_values[j] @ gold / (np.linalg.norm(actual_values[j]) * np.linalg.norm(gold))
            )
            peers = np.mean([actual_values[j] @ actual_values[i] for i in range(5) if i != j])
            np.testing.assert_allclose(actual.alignment[p, j], 2 * cosine, atol=1e-10)
            np.testing.assert_allclose(actual.diversity[p, j], 2 * peers, atol=1e-10)
            expected = 0.7 * 2 * cosine - 0.3 * 2 * peers
            np.testing.assert_allclose(actual.rewards[p, j], expected, atol=1e-10)
        distance = np.sum((actual_values.mean(0) - gold) ** 2)
        np.testing.assert_allclose(actual.cfm[p], distance, atol=1e-10)


def test_the_ground_truth_itself_earns_two():
    truth = np.random.default_rng(0).normal(size=(2, 8))
    answers = np.broadcast_to(truth[:, None], (2, 1, 8))
    actual = rewards(jnp.asarray(answers), jnp.asarray(truth), diversity=0.0)
    np.testing.assert_allclose(actual.rewards, 2.0, atol=1e-12)
    assert not np.any(actual.diversity)  # nothing to be unlike to


def test_an_answer_without_features_earns_nothing():
    actual = rewards(jnp.zeros((2, 4)), jnp.ones(4))
    np.testing.assert_array_equal(actual.rewards, 0.0)


@pytest.mark.parametrize(
    ("method", "expectation"),
    [
        ("last_token", [[6]]),
        ("mean_pooling", [[0, 1, 2, 3, 4, 5, 6]]),
        ("completion_mean", [[4, 5, 6]]),
        ("concat", [[1], [3], [5]]),
    ],
)
def test_pooling_reads_the_right_tokens(method, expectation):
    states = np.random.default_rng(0).normal(size=(7, 3))
    weights = pooling_weights(method, 7, prompt_length=4)
    actual = pool(jnp.asarray(states), jnp.asarray(weights)[None])
    expected = np.concatenate([states[position].mean(0) for position in expectation])
    np.testing.assert_allclose(actual[0], expected, atol=1e-6)  # 1 / n in float32


def test_pooling_of_an_answer_without_tokens_is_zero():
    assert not pooling_weights("completion_mean", 5, prompt_length=5).any()
    with pytest.raises(ValueError, match="at least one token"):
        pooling_weights("last_token", 0)


def test_layers_are_named_by_fraction_or_number():
    assert FeatureConfig().find_layers(28) == (6, 13, 20)
    assert FeatureConfig(layers=[1, 3, 1.0]).find_layers(4) == (0, 2, 3)
    assert FeatureConfig().find_layers(2) == (0,)  # never the embeddings, and each layer once
    with pytest.raises(ValueError, match="5.*4 layers"):
        FeatureConfig(layers=[5]).find_layers(4)
