"""Features of packed trees beside those of each sequence alone."""

import numpy as np
import pytest

from jaxtrain.batch import Batch, check_batch
from jaxtrain.core.scorer import make_features
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.methods.ebft.feature_matching import pooling_weights
from jaxtrain.methods.ebft.features import FeatureCache, FeatureSequence, build_feature_request
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

ARCHITECTURE = {
    **dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=64),
    **dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2),
    **dict(num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.5),
    **dict(tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def model():
    config = families.config_from_hf(ARCHITECTURE)
    return build.init(config, 0, param_dtype="float32", dtype="float32")


def draw_groups():
    """Answers of unlike lengths: none at all, the same twice, one that another begins with."""
    rng = np.random.default_rng(0)
    groups = []
    for extra in range(3):
        prompt = rng.integers(1, 64, 5 + extra)
        tokens = [
            np.concatenate([prompt, rng.integers(1, 64, n)]).astype(np.int32) for n in (4, 0, 7, 3)
        ]
        tokens += [tokens[2].copy(), tokens[2][:-2].copy()]
        groups.append([FeatureSequence(token, len(prompt)) for token in tokens])
    return groups


@pytest.mark.parametrize(
    ("method", "share"),
    [
        pytest.param("last_token", True, marks=pytest.mark.thorough),
        pytest.param("completion_mean", False, marks=pytest.mark.thorough),
        pytest.param("mean_pooling", True, marks=pytest.mark.thorough),
        pytest.param("concat", True, marks=pytest.mark.thorough),
    ],
)
def test_a_branch_has_the_features_of_its_sequence_alone(model, method, share):
    """float32 sums in other orders: 1e-4 of features of size 10."""
    groups = draw_groups()
    requests = build_feature_request(groups, method, StepShape(2, None, 32), share=share)
    check_batch(requests.batch)
    width = len(pooling_weights(method, 1))
    params, rebuild = split_model(model)
    actual = make_features(rebuild, (0, 1), width)(params, requests.batch)
    for entry, position in zip(
        [entry for group in groups for entry in group], requests.places, strict=True
    ):
        n = len(entry.tokens)
        index = np.arange(n, dtype=np.int32)[None]
        alone = Batch(entry.tokens[None], index, index - 1, np.full((1, n), n, np.int32), {})
        states = np.asarray(model.captured(alone, (0, 1)))[0]
        expected = (pooling_weights(method, n, entry.prompt) @ states).reshape(-1)
        np.testing.assert_allclose(actual[position], expected, atol=1e-4)


def test_a_prompt_is_computed_once():
    groups = draw_groups()
    shared, apart = (
        build_feature_request(groups, "last_token", StepShape(1, None, 64), share=share).batch
        for share in (True, False)
    )
    count = lambda batch: int((batch.until > np.arange(64) + 1).sum())  # noqa: E731
    assert shared.tokens.shape[0] < apart.tokens.shape[0] and count(shared) < count(apart) / 2


def test_groups_larger_than_a_row_and_longer_sequences_fit():
    groups = draw_groups()
    requests = build_feature_request(groups, "last_token", StepShape(1, None, 8), share=True)
    assert all(min(position) >= 0 for position in requests.places)
    assert len(set(requests.places)) == len(requests.places)


def test_features_of_ground_truths_are_kept_within_bounds():
    feature_cache = FeatureCache(most=3 * 40)
    messages = [FeatureSequence(np.arange(n + 1, dtype=np.int32), 1) for n in range(5)]
    keys = [FeatureCache.key(entry) for entry in messages]
    assert len(set(keys)) == 5 and FeatureCache.key(messages[0]._replace(prompt=2)) != keys[0]
    for key in keys[:3]:
        feature_cache.put(key, np.zeros(10, np.float32))
    assert feature_cache.get(keys[0]) is not None  # used: the next one goes first
    feature_cache.put(keys[3], np.zeros(10, np.float32))
    assert [feature_cache.get(key) is not None for key in keys] == [True, False, True, True, False]
