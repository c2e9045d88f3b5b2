"""Every preference loss beside TRL's own code: values and gradients from the same log-probs.

TRL's losses are methods of its trainers; they are called with a stand-in for the trainer and one
for the model, which gives log-probs out of a table by token. Ours get the same table. Where TRL
1.16 does something else on purpose or by mistake, the test says so:

- its sigmoid, sigmoid_norm, hinge and ipo ignore label_smoothing without a word; here sigmoid and
  sigmoid_norm take it (cDPO) and the others refuse it
- ORPO's odds of an answer with probability 1, and AlphaPO's reward of a sum of log-probs below -104
  (in float32), are not numbers; here they stay finite
- KTO's baseline and AOT's sort see one forward pass of one device in TRL, so they change with
  accumulation; here they see the whole step (docs/preferences.md)
"""

import math
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import Config
from jaxtrain.core.task import Round
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
from jaxtrain.methods.preference.loss import preference_terms
from jaxtrain.methods.preference.method import (
    PreferencePreparation,
    preference_coef,
    read_fields,
    read_objective,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="this environment has no TRL"),
]


@pytest.fixture(scope="module")
def trl():
    """TRL's side."""
    import trl_losses

    return trl_losses


def make_tables(trl, seed=0):
    """(policy's, reference's, log of the sum of squared probabilities) by token, float64."""
    rng = np.random.default_rng(seed)
    size = trl.FIRST + trl.NUM_ANSWER_TOKENS
    policy = -rng.exponential(1.0, size)
    reference = policy + rng.normal(0, 0.8, size)
    return policy, np.minimum(reference, -1e-3), -rng.exponential(1.5, size)


def of_us(trl, options, tables, labels=None):
    """(loss, its gradient by the policy's table) of a config's section task."""
    table = {
        "run": {"max_steps": 1},
        "model": {"architecture": {"hidden_size": 8}, "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "a"}]},
        "task": {"kind": "preference", **options},
    }
    task = (config := Config.model_validate(table)).task
    build = PairTrees(
        nll=task.resolved("nll_on") if task.nll_weight else "none",
        tail=task.ld_alpha,
        average=task.average,
    )
    fields = read_fields(task, "float64")
    rows = []
    for index, (prompt, *answers) in enumerate(trl.make_rows()):
        answers = [
            RankedAnswer(np.array(a, np.int32), np.ones(len(a), np.float32)) for a in answers
        ]
        if labels is None:
            ranked = Ranked(np.array(prompt, np.int32), tuple(answers), (RankedPair(0, 1),))
        else:
            ranked = Ranked(np.array(prompt, np.int32), (answers[0],), labels=(labels[index],))
        rows.append([lay_out(build(ranked), "branch")])
    batch = stack_batches([build_batch(rows, 16, fields)])

    def score(batch, role, *rest):
        return tables[role == "reference"][batch.tokens]

    data = SimpleNamespace(row_tokens=16)
    prepared = PreferencePreparation(task, config, data)(
        Round([batch]), SimpleNamespace(logp=score)
    )
    micro = jax.tree.map(lambda leaf: leaf[0], prepared.batches[0])
    objective, coef = read_objective(task), preference_coef(task)

    def total(policy):
        peak = jnp.asarray(tables[2])[micro.tokens]
        sums, _ = preference_terms(policy[micro.tokens], micro, objective, peak)
        return sum(coef[n] * sums[n] / jnp.sum(micro.weights[n]) for n in sums)

    with jax.enable_x64(True):
        value, grad = jax.value_and_grad(total)(jnp.asarray(tables[0]))
    return float(value), np.asarray(grad)


def check(actual_values, reference, rtol=1e-6):
    assert actual_values[0] == pytest.approx(reference[0], rel=rtol, abs=1e-8)
    np.testing.assert_allclose(actual_values[1], reference[1], rtol=10 * rtol, atol=rtol / 100)


PAIR_LOSSES = [
    ("sigmoid", {}),
    ("hinge", {}),
    ("ipo", {}),
    ("robust", {"label_smoothing": 0.2}),
    ("exo_pair", {"label_smoothing": 0.01}),
    ("nca_pair", {}),
    ("bco_pair", {}),
    ("sppo_hard", {}),
    ("aot", {"label_smoothing": 0.1}),
    ("aot_unpaired", {"label_smoothing": 0.1}),
    ("apo_zero", {}),
    ("apo_down", {}),
    ("discopop", {}),
    ("sft", {}),
    ("sigmoid_norm", {}),
]


@pytest.mark.parametrize("loss, options", PAIR_LOSSES, ids=[name for name, _ in PAIR_LOSSES])
def test_losses_of_pairs(trl, loss, options):
    tables = make_tables(trl)
    actual_values = of_us(trl, {"loss": loss, "beta": 0.6, **options}, tables)
    check(actual_values, trl.of_trl(tables, loss, beta=0.6, **options))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("actual_values, reference", [
    ("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")
])  # fmt: skip
def test_divergences(trl, loss, actual_values, reference):
    tables = make_tables(trl, 1)
    ours = {"loss": loss, "beta": 0.3, "f_divergence": actual_values}
    ours |= {"f_alpha": 0.7} if actual_values == "alpha" else {}
    actual = of_us(trl, ours, tables)
    options = {"f_divergence_type": reference, "f_alpha_divergence_coef": 0.7}
    if actual_values == "alpha":  # TRL's knows no float64
        check(actual, trl.of_trl(tables, loss, beta=0.3, dtype="float32", **options), 1e-5)
    else:
        check(actual, trl.of_trl(tables, loss, beta=0.3, **options))


def test_several_losses_tails_and_weights(trl):
    tables = make_tables(trl, 2)
    actual = of_us(
        trl, {"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]}, tables
    )
    losses = ["sigmoid", "bco_pair", "sft"]
    check(actual, trl.of_trl(tables, losses, loss_weights=[0.8, 0.2, 0.5]))
    check(of_us(trl, {"ld_alpha": 0.3}, tables), trl.of_trl(tables, ld_alpha=0.3))
    for loss in ("sigmoid", "ipo"):
        actual = of_us(trl, {"loss": loss, "use_weighting": True}, tables)
        check(actual, trl.of_trl(tables, loss, use_weighting=True))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [(True, False, True, False), (False, False, False, False)])
def test_losses_of_labels(trl, loss, labels):
    policy, *peers = make_tables(trl, 3)
    tables = (policy + 0.5, *peers)  # so that the baseline is above 0
    options = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    actual_values = of_us(trl, {"loss": loss, **options}, tables, labels)
    *reference, baseline = trl.of_trl_labels(tables, labels, loss, **options)
    check(actual_values, reference)
    assert baseline > 0.1 or loss != "kto"


@pytest.mark.parametrize("actual_values, reference, means, smoothing", [
    ("cpo", "sigmoid", False, 0.1), ("cpo_hinge", "hinge", False, 0.0),
    ("cpo_ipo", "ipo", True, 0.0), ("simpo", "simpo", True, 0.1), ("alphapo", "simpo", True, 0.0),
])  # fmt: skip
def test_losses_without_reference(trl, actual_values, reference, means, smoothing):
    tables = make_tables(trl, 4)
    alpha = 0.25 if actual_values == "alphapo" else 0.0
    options = {"beta": 0.8, "cpo_alpha": 0.6, "label_smoothing": smoothing}
    actual = of_us(trl, {"loss": actual_values, **options}, tables)
    expected = trl.of_trl_without_reference(tables, reference, means=means, alpha=alpha, **options)
    check(actual, expected)


def test_orpo(trl):
    tables = make_tables(trl, 5)
    # TRL computes the odds in float32.
    check(of_us(trl, {"loss": "orpo", "beta": 0.4}, tables), trl.of_trl_orpo(tables, 0.4), 1e-5)


def test_where_trl_is_not_followed(trl):
    """Check the effects of the differences that the module's docstring lists."""
    import torch

    tables = make_tables(trl, 6)
    smoothed = of_us(trl, {"label_smoothing": 0.3, "beta": 1.0}, tables)[0]
    ignored = trl.of_trl(tables, beta=1.0, label_smoothing=0.3)
    check(of_us(trl, {"beta": 1.0}, tables), ignored)
    assert abs(smoothed - ignored[0]) > 0.01
    certain = torch.zeros(1), torch.full((1,), -0.5)
    assert not math.isfinite(trl.odds_of_trl(*certain, 0.4)[4])
    tables = (np.zeros_like(tables[0]), *tables[1:])
    value, grad = of_us(trl, {"loss": "orpo"}, tables)
    assert math.isfinite(value) and np.isfinite(grad).all()
    tables = (np.full_like(tables[0], -400.0), *tables[1:])
    options = {"beta": 0.1, "cpo_alpha": 0.0, "label_smoothing": 0.0}
    shaped = trl.of_trl_without_reference(tables, "sigmoid", means=False, alpha=0.25, **options)
    assert not math.isfinite(shaped[0])
    value, grad = of_us(trl, {"loss": "cpo", "alphapo_alpha": 0.25, **options}, tables)
    assert math.isfinite(value) and np.isfinite(grad).all()
