"""Losses of scores: closed forms; answers that share a prompt against answers alone, in float64."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import Batch
from jaxtrain.core.step import join_metrics
from jaxtrain.data.comparisons.pairs import CHOSEN, MARGIN, PREFERENCE, REJECTED, SCORE, PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import chain
from jaxtrain.methods.reward_model.loss import pair_loss, step_loss
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model
from jaxtrain.models.scores import ScoreHead

FIELDS = Fields(
    (PREFERENCE, SCORE),
    {CHOSEN: np.int32, REJECTED: np.int32, MARGIN: np.float64},
    dtype=np.float64,
)
ROWS, T = 3, 72


class Scores:
    """A model whose scores are given: [B, T, n]."""

    def __init__(self, values):
        self.values = jnp.asarray(values)

    def hidden(self, batch):
        return SimpleNamespace(hidden=self.values)

    def scores(self, hidden):
        return hidden


def batch_of(weights, streams):
    empty = np.zeros(next(iter(weights.values())).shape, np.int32)
    return Batch(empty, empty, empty, empty, weights=weights, streams=streams)


def test_pairs_are_bradley_terry_with_margins_and_centring():
    center = 0.01
    # Slots at 1 and 2; answers end at 3, 5 and 7. Values elsewhere must not matter.
    score = np.array([[9.0, -7.0, 50.0, 0.5, 3.0, -1.5, 8.0, 0.25]])
    weight, chosen, rejected, margin = np.zeros((4, 1, 8))
    weight[0, 1:3] = 1.0, 2.0
    chosen[0, 1:3], rejected[0, 1:3] = (2, 1), (4, 5)
    margin[0, 1:3] = 0.0, 0.75
    batch = batch_of(
        {"preference": weight},
        {
            "chosen": chosen.astype(np.int32),
            "rejected": rejected.astype(np.int32),
            "margin": margin,
        },
    )

    def total(score):
        sums, metrics = pair_loss(Scores(score[..., None]), batch, center)
        return sums["preference"], metrics

    with jax.enable_x64(True):
        (actual, metrics), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(
            jnp.asarray(score)
        )
    pairs = [(1.0, 0.5, -1.5, 0.0), (2.0, 0.5, 0.25, 0.75)]
    expected = sum(
        w * (np.log1p(np.exp(-(c - r - m))) + center * (c + r) ** 2) for w, c, r, m in pairs
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    slopes = np.zeros(8)
    for (w, c, r, m), end in zip(pairs, (5, 7), strict=True):
        pull = 1 / (1 + np.exp(c - r - m))
        slopes[3] += w * (-pull + 2 * center * (c + r))
        slopes[end] += w * (pull + 2 * center * (c + r))
    np.testing.assert_allclose(grad[0], slopes, atol=1e-12)
    means = {name: float(value / weight) for name, (value, weight) in metrics.items()}
    assert means == {
        "accuracy": 1.0,
        "margin": pytest.approx((2.0 + 2 * 0.25) / 3),
        "mean_reward": pytest.approx((-0.5 + 2 * 0.375) / 3),
        "min_reward": -1.5,
        "max_reward": 0.5,
    }
    # Of two microsteps of a step the extremes are joined, the others added up.
    with jax.enable_x64(True):
        joined = join_metrics(metrics, {**metrics, "max_reward": (2.0, 1.0)})
    assert (float(joined["max_reward"][0]), float(joined["max_reward"][1])) == (2.0, 1.0)


def test_equal_scores_are_no_accuracy():
    weight = np.zeros((1, 4))
    weight[0, 1] = 1.0
    distance = np.array([[0, 1, 0, 0]], np.int32)
    streams = {"chosen": distance, "rejected": distance, "margin": np.zeros((1, 4))}
    batch = batch_of({"preference": weight}, streams)
    sums, metrics = jax.jit(lambda score: pair_loss(Scores(score), batch))(np.ones((1, 4, 1)))
    assert float(metrics["accuracy"][0]) == 0.0
    np.testing.assert_allclose(sums["preference"], np.log(2), rtol=1e-6)


def test_steps_are_cross_entropy_where_labels_stand():
    rng = np.random.default_rng(0)
    score, weight = rng.standard_normal((2, 5, 2)), np.zeros((2, 5))
    label = rng.integers(0, 2, (2, 5)).astype(np.int32)
    places = [(0, 2), (0, 4), (1, 3)]
    for position in places:
        weight[position] = 1.0
    with jax.enable_x64(True):
        batch = batch_of({"step": weight}, {"label": label})
        sums, metrics = jax.jit(lambda score: step_loss(Scores(score), batch))(score)
    expected = sum(
        np.log(np.exp(score[index]).sum()) - score[index][label[index]] for index in places
    )
    np.testing.assert_allclose(sums["step"], expected, rtol=1e-12)
    right = sum(score[index].argmax() == label[index] for index in places)
    assert [float(value) for value in metrics["accuracy"]] == [right, 3.0]


def make_ranked(seed, prompt, lengths, pairs):
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(1, 97, n).astype(np.int32)  # noqa: E731
    answers = tuple(RankedAnswer(draw(n), np.ones(n, np.float32)) for n in lengths)
    return Ranked(draw(prompt), answers, tuple(RankedPair(*pair) for pair in pairs))


RANKED = [
    make_ranked(0, 9, (5, 3, 6), [(0, 1, 0.5), (0, 2, 0.0), (2, 1, 0.25)]),
    make_ranked(1, 4, (2, 7), [(1, 0, 0.0)]),
    make_ranked(2, 6, (1, 1), [(0, 1, 1.0)]),
]


@pytest.mark.slow
def test_shared_prompts_packing_and_microsteps_change_nothing():
    """With one program and the pairs laid out in every way, scores of each answer alone are the
    reference.

    In float64, through two layers and back: what differs is the order of sums, some 1e-14 here.
    """
    with jax.enable_x64(True):
        raw = {
            **dict(model_type="qwen3", vocab_size=97, hidden_size=16, intermediate_size=24),
            **dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8),
            **dict(max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=True),
        }
        head = ScoreHead("sequence", ("reward",))
        config = families.with_score(families.config_from_hf(raw), head)
        options = dict(param_dtype="float64", dtype="float64", attention_impl="reference")
        params, rebuild = split_model(build.init(config, 0, **options))

        @jax.jit
        def run(params, batch):
            def total(params):
                model = rebuild(params)
                scores = model.scores(model.hidden(batch).hidden)[..., 0]
                return pair_loss(model, batch, 0.01)[0]["preference"], scores

            (value, scores), grads = jax.value_and_grad(total, has_aux=True)(params)
            return value, grads, scores

        def score(layouts):
            """Sums over microsteps, each [ROWS, T], of rows of packed trees."""
            actual = None
            for rows in layouts:
                rows = [*rows, *([[]] * (ROWS - len(rows)))]
                value, grads, _ = run(params, build_batch(rows, T, FIELDS))
                actual = (
                    (value, grads)
                    if actual is None
                    else jax.tree.map(jnp.add, actual, (value, grads))
                )
            return actual

        def alone(ranked, answer):
            tokens = np.concatenate([ranked.prompt, ranked.answers[answer].tokens])
            row = lay_out(chain(tokens, {}), "branch")
            batch = build_batch([[row], [], []], T, FIELDS)
            return float(run(params, batch)[2][0, len(tokens) - 1])

        expected = 0.0
        for ranked in RANKED:
            scores = [alone(ranked, index) for index in range(len(ranked.answers))]
            for good, bad, margin in ranked.pairs:
                gap = scores[good] - scores[bad] - margin
                expected += np.log1p(np.exp(-gap)) + 0.01 * (scores[good] + scores[bad]) ** 2
        shared, flat = (
            [lay_out(PairTrees(share_prompts=share)(ranked), "branch") for ranked in RANKED]
            for share in (True, False)
        )
        reference, grads = score([[[tree] for tree in shared]])
        np.testing.assert_allclose(reference, expected, rtol=1e-12)
        assert np.abs(grads["score.weight"]).max() > 0.1
        for layouts in ([[shared]], [[[tree] for tree in flat]], [[shared[:2]], [shared[2:]]]):
            value, second = score(layouts)
            np.testing.assert_allclose(value, expected, rtol=1e-12)
            for path in grads:
                np.testing.assert_allclose(second[path], grads[path], atol=1e-11, err_msg=path)
