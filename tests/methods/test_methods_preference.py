"""Preference losses against the specification's formulas, written again in plain Python numbers.

The reference knows single pairs: (sums of log-probs, lengths) and nothing of rows, slots or
segments. Tolerance 1e-12 relative in float64: both differ by the order of sums alone. Gradients
are compared with finite differences, or with those of the same formula over a whole batch.
"""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import Batch
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.methods.preference.config import (
    LossName,
    PreferenceTask,
    find_mixture_conflicts,
    find_number_conflicts,
)
from jaxtrain.methods.preference.cross_batch_stats import at_same_rank, sum_sides
from jaxtrain.methods.preference.loss import PRESETS, PreferenceObjective, preference_terms
from jaxtrain.methods.preference.method import preference_coef, read_objective

BETA = 0.3
STREAMS = {
    "chosen": np.int32,
    "rejected": np.int32,
    **dict.fromkeys(("ref_logp", "share", "kto", "aot", "aot_chosen", "aot_rejected"), np.float64),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make_ranked(rng, number, labels=False):
    """A prompt with two or three answers, some of whose tokens do not train; one or two pairs."""
    count = 2 + number % 2
    answers = []
    for _ in range(count):
        n = int(rng.integers(2, 6))
        weights = np.ones(n)
        weights[1] = number % 3 > 0
        answers.append(RankedAnswer(rng.integers(1, 60, n), weights))
    pairs = [RankedPair(0, 1), RankedPair(2, 1)][: count - 1]
    return Ranked(
        rng.integers(1, 60, 3),
        tuple(answers),
        () if labels else tuple(pairs),
        tuple(bool(i % 2) for i in range(count)) if labels else (),
    )


def make_batch(seed=0, labels=False, nll="none", tail=None, share=True, rows=2):
    """[rows, T] of pairs with log-probs of the policy and streams filled in as a step would."""
    rng = np.random.default_rng(seed)
    rule = PairTrees(share, nll=nll, tail=tail)
    packed = [
        [lay_out(rule(make_ranked(rng, 2 * b + i, labels)), "branch") for i in range(2)]
        for b in range(rows)
    ]
    fields = Fields(("preference", "score", *(["nll"] if nll != "none" else [])), STREAMS,
                    dtype=np.float64)  # fmt: skip
    batch = build_batch(packed, 72, fields)
    if tail is None:
        batch.streams.pop("share")
    shape = batch.tokens.shape
    logp, ref = rng.normal(-1.2, 0.5, (2, *shape)).clip(None, -0.01)
    batch.streams["ref_logp"] = ref
    slots = batch.weights["preference"] != 0
    batch.streams["kto"] = np.where(slots, 0.37, 0.0)
    if not labels:
        policy, reference = sum_sides(batch, logp), sum_sides(batch, ref)
        ranks = at_same_rank(policy.chosen - policy.rejected, reference.chosen - reference.rejected)
        up, down = policy.chosen - reference.chosen, policy.rejected - reference.rejected
        for name, values in (
            ("aot", ranks),
            ("aot_chosen", at_same_rank(up, down)),
            ("aot_rejected", at_same_rank(down, up)),
        ):
            batch.streams[name] = policy.spread(values, logp)
    return batch, logp


def read_pairs(batch: Batch, logp):
    """[{side: (pi, ref, length)}] in order of the slots, walked token by token."""
    actual = []
    for b, t in np.argwhere(batch.weights["preference"]):
        pair = {}
        for side in ("chosen", "rejected"):
            index = t + int(batch.streams[side][b, t])
            if index < 0:
                continue
            local_value = [
                s
                for s in range(logp.shape[1])
                if batch.owner[b, s] == batch.owner[b, index] and batch.weights["score"][b, s]
            ]
            share = batch.streams.get("share", np.ones(logp.shape))[b]
            pi = sum(logp[b, s] * share[s] for s in local_value)
            ref = sum(batch.streams["ref_logp"][b, s] * share[s] for s in local_value)
            pair[side] = (pi, ref, len(local_value))
        actual.append(pair)
    return actual


def sigma(x):
    return 1 / (1 + math.exp(-x))


def expected(name, pairs, beta, eps=0.0, gamma=0.0, alpha=0.0, divergence="reverse_kl", power=0.5):
    """Mean of the specification's loss over pairs."""
    if name in ("aot", "aot_unpaired"):
        chosen, rejected = (np.array([p[s] for p in pairs]) for s in ("chosen", "rejected"))
        sides = (chosen - rejected).T[:2] if name == "aot" else (
            chosen[:, 0] - chosen[:, 1], rejected[:, 0] - rejected[:, 1]
        )  # fmt: skip
        d = beta * (np.sort(sides[0]) - np.sort(sides[1]))
        return np.mean([-(1 - eps) * log(z) - eps * log(-z) for z in d])
    numbers = (beta, eps, gamma, alpha, divergence, power)
    return np.mean([expected_of_pair(name, pair, *numbers) for pair in pairs])


def log(x):
    return math.log(sigma(x))


def expected_of_pair(name, pair, beta, eps, gamma, alpha, divergence, power):
    def smooth(z):
        return -(1 - eps) * log(z) - eps * log(-z)

    def shaped(r):
        match divergence:
            case "forward_kl":
                return 1 - math.exp(-r)
            case "js":
                return math.log(2) + log(r)
            case "alpha":
                return (math.exp((power - 1) * r) - 1) / (power - 1)
        return r

    def reward(x):
        return (1 - math.exp(x) ** -alpha) / alpha if alpha else x

    def odds(x):
        return x - math.log(1 - math.exp(x))

    (pc, qc, nc), (pr, qr, nr) = pair["chosen"], pair["rejected"]
    rc, rr = pc - qc, pr - qr
    sc, sr = shaped(rc), shaped(rr)
    z, mc, mr = beta * (sc - sr), pc / nc, pr / nr
    gate = sigma(z / 0.05)
    target = 1 / (2 * beta)
    match name:
        case "sigmoid":
            return smooth(z)
        case "hinge":
            return max(0, 1 - z)
        case "ipo":
            return (sc / nc - sr / nr - target) ** 2
        case "robust":
            return (-(1 - eps) * log(z) + eps * log(-z)) / (1 - 2 * eps)
        case "exo_pair":
            right = sigma(z) * (log(z) - math.log(1 - eps))
            return right + sigma(-z) * (log(-z) - math.log(eps))
        case "nca_pair":
            return -log(beta * sc) - 0.5 * log(-beta * sc) - 0.5 * log(-beta * sr)
        case "bco_pair":
            return -log(beta * sc) - log(-beta * sr)
        case "sppo_hard":
            return (sc - 0.5 / beta) ** 2 + (sr + 0.5 / beta) ** 2
        case "apo_zero":
            return 1 - sigma(beta * rc) + sigma(beta * rr)
        case "apo_down":
            return sigma(beta * rc) + 1 - sigma(z)
        case "discopop":
            return -(1 - gate) * log(z) + gate * math.exp(-z)
        case "sigmoid_norm":
            return smooth(beta * (sc / nc - sr / nr))
        case "orpo":
            return -beta * log(odds(mc) - odds(mr))
        case "cpo":
            return smooth(beta * (reward(pc) - reward(pr)))
        case "cpo_hinge":
            return max(0, 1 - beta * (reward(pc) - reward(pr)))
        case "cpo_ipo":
            return (reward(mc) - reward(mr) - target) ** 2
        case "simpo" | "alphapo":
            return smooth(beta * (reward(mc) - reward(mr)) - gamma)
    assert name == "sft"
    return 0.0


NUMBERS = {
    "robust": {"eps": 0.1},
    "exo_pair": {"eps": 1e-3},
    "aot": {"eps": 0.05},
    "simpo": {"gamma": 0.5, "eps": 0.1},
    "alphapo": {"gamma": 0.5, "alpha": 0.25},
    "cpo_ipo": {"alpha": 0.5},
}
OF_PAIRS = [name for name in PRESETS if name not in ("kto", "apo_zero_unpaired")]


def objective(name, beta=BETA, eps=0.0, gamma=0.0, alpha=0.0, divergence="reverse_kl", power=0.5,
              **extra):  # fmt: skip
    losses = ((name, 1.0),) if isinstance(name, str) else name
    return PreferenceObjective(losses, beta, eps, divergence, power, gamma, alpha, **extra)


def mean_loss(batch, logp, expectation, peak=None):
    sums, _ = preference_terms(logp, batch, expectation, peak)
    return sums["preference"] / batch.weights["preference"].sum()


@pytest.mark.parametrize("name", OF_PAIRS)
@pytest.mark.parametrize("share", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pairs_lose_what_the_specification_says(name, share):
    """The value, and its slope along a random direction against central differences of the
    specification's, whose error is about 1e-9 here."""
    numbers = NUMBERS.get(name, {})
    batch, logp = make_batch(share=share)
    direction = np.random.default_rng(1).normal(size=logp.shape)

    def loss(logp):
        return mean_loss(batch, logp, objective(name, **numbers))

    def specified(h):
        return expected(name, read_pairs(batch, logp + h * direction), BETA, **numbers)

    value, slope = jax.jvp(loss, (jnp.asarray(logp),), (jnp.asarray(direction),))
    np.testing.assert_allclose(value, specified(0.0), rtol=1e-12)
    difference = (specified(1e-6) - specified(-1e-6)) / 2e-6
    np.testing.assert_allclose(slope, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "discopop", "sigmoid_norm"])
@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_divergences_shape_the_scores(name, divergence):
    batch, logp = make_batch(1)
    numbers = {"divergence": divergence, "power": 0.7}
    actual = mean_loss(batch, jnp.asarray(logp), objective(name, **numbers))
    expectation = expected(name, read_pairs(batch, logp), BETA, **numbers)
    np.testing.assert_allclose(actual, expectation, rtol=1e-12)


def test_numbers_worked_out_by_hand():
    """beta 0.1, no difference: ln 2, 1, 25, ln 2, 1, 2 ln 2 (the specification's section 2.2)."""
    batch, logp = make_batch()
    batch.streams["ref_logp"] = logp
    values = {"sigmoid": math.log(2), "hinge": 1, "ipo": 25, "robust": math.log(2), "apo_zero": 1,
              "nca_pair": 2 * math.log(2)}  # fmt: skip
    for name, value in values.items():
        actual = mean_loss(batch, jnp.asarray(logp), objective(name, beta=0.1))
        np.testing.assert_allclose(actual, value, rtol=1e-12)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_ranks_have_the_gradient_of_the_whole_steps_sort(name):
    """Two rows in one sort: the derivative of jnp.sort over all pairs, although each slot has only
    constants of the others."""
    batch, logp = make_batch(3)
    pairs = read_pairs(batch, logp)
    loss = jax.grad(lambda logp: mean_loss(batch, logp, objective(name, eps=0.1)))
    actual = loss(jnp.asarray(logp))

    def whole(logp):
        sums = []
        for b, t in np.argwhere(batch.weights["preference"]):
            for side in ("chosen", "rejected"):
                index = t + int(batch.streams[side][b, t])
                local_value = (batch.owner[b] == batch.owner[b, index]) & (
                    batch.weights["score"][b] != 0
                )
                sums.append(jnp.sum(logp[b] * local_value))
        pi = jnp.array(sums).reshape(-1, 2)
        ref = np.array([[p["chosen"][1], p["rejected"][1]] for p in pairs])
        if name == "aot":
            d = jnp.sort(pi[:, 0] - pi[:, 1]) - jnp.sort(ref[:, 0] - ref[:, 1])
        else:
            d = jnp.sort((pi - ref)[:, 0]) - jnp.sort((pi - ref)[:, 1])
        z = BETA * d
        return jnp.mean(-0.9 * jax.nn.log_sigmoid(z) - 0.1 * jax.nn.log_sigmoid(-z))

    np.testing.assert_allclose(actual, jax.grad(whole)(jnp.asarray(logp)), atol=1e-14)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_single_answers_are_held_against_the_baseline(name):
    batch, logp = make_batch(4, labels=True)
    base = 0.37 if name == "kto" else 0.0
    expectation = []
    for pair in read_pairs(batch, logp):
        [(side, (pi, ref, _))] = pair.items()
        up = sigma(BETA * (pi - ref - base))
        expectation.append(1.5 * (1 - up) if side == "chosen" else 0.7 * up)
    assert len(expectation) == 10
    numbers = objective(name, desirable=1.5, undesirable=0.7)
    actual = mean_loss(batch, jnp.asarray(logp), numbers)
    np.testing.assert_allclose(actual, np.mean(expectation), rtol=1e-12)
    _, metrics = preference_terms(jnp.asarray(logp), batch, numbers)
    if name == "kto":
        assert float(metrics["kl"][0] / metrics["kl"][1]) == pytest.approx(0.37)
    assert float(metrics["rewards/margins"][1]) == 0  # no pair: no margin


def test_several_losses_likelihood_tails_and_weights():
    batch, logp = make_batch(5, nll="sequence", tail=0.3)
    pairs = read_pairs(batch, logp)
    losses = (("sigmoid", 1.0), ("ipo", 0.2), ("sft", 0.5))
    sums, metrics = preference_terms(jnp.asarray(logp), batch, objective(losses))
    parts = {name: expected(name, pairs, BETA) for name, _ in losses}
    actual = sums["preference"] / batch.weights["preference"].sum()
    np.testing.assert_allclose(actual, parts["sigmoid"] + 0.2 * parts["ipo"], rtol=1e-12)
    np.testing.assert_allclose(sums["nll"], -(batch.weights["nll"] * logp).sum(), rtol=1e-12)
    assert float(metrics["loss/ipo"][0] / metrics["loss/ipo"][1]) == pytest.approx(parts["ipo"])
    # WPO: the product over both sides of exp(mean(logp - log sum p^2)).
    batch, logp = make_batch(6)
    peak = np.random.default_rng(0).normal(-1, 0.2, logp.shape)
    gaps = Batch(*batch)._replace(streams={**batch.streams, "ref_logp": 0 * logp})
    total = 0.0
    for pair, gap in zip(read_pairs(batch, logp), read_pairs(gaps, logp - peak), strict=True):
        weight = math.exp(sum(gap[s][0] / gap[s][2] for s in ("chosen", "rejected")))
        total += weight * expected("sigmoid", [pair], BETA)
    weighted = objective("sigmoid", weighted=True)
    sums, _ = preference_terms(jnp.asarray(logp), batch, weighted, jnp.asarray(peak))
    np.testing.assert_allclose(sums["preference"], total, rtol=1e-12)


def test_metrics_are_those_of_trl():
    batch, logp = make_batch(7)
    pairs = read_pairs(batch, logp)
    _, metrics = preference_terms(jnp.asarray(logp), batch, objective("sigmoid", divergence="js"))
    means = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    up = np.array([BETA * (p["chosen"][0] - p["chosen"][1]) for p in pairs])
    down = np.array([BETA * (p["rejected"][0] - p["rejected"][1]) for p in pairs])
    expectation = {
        "rewards/chosen": up.mean(),
        "rewards/rejected": down.mean(),
        "rewards/accuracies": (up > down).mean(),
        "rewards/margins": (up - down).mean(),
        "logps/chosen": np.mean([p["chosen"][0] for p in pairs]),
        "logps/rejected": np.mean([p["rejected"][0] for p in pairs]),
    }
    assert means == pytest.approx(expectation)
    _, metrics = preference_terms(jnp.asarray(logp), batch, objective("orpo"))
    odds = lambda m: m - math.log(1 - math.exp(m))  # noqa: E731
    gaps = [odds(p["chosen"][0] / p["chosen"][2]) - odds(p["rejected"][0] / p["rejected"][2])
            for p in pairs]  # fmt: skip
    total, weight = metrics["log_odds_chosen"]
    assert float(total / weight) == pytest.approx(np.mean(gaps))
    total, weight = metrics["log_odds_ratio"]
    assert float(total / weight) == pytest.approx(np.mean([math.log(sigma(g)) for g in gaps]))


@pytest.mark.slow
def test_numbers_stay_finite_far_out():
    """float32, log-ratios of hundreds and answers of probability 1: losses and gradients."""
    batch, logp = make_batch(8)
    every = tuple((name, 1.0) for name in OF_PAIRS)
    for size in (0.0, -300.0):
        far = jnp.full(logp.shape, size, jnp.float32)
        expectation = objective(every, eps=0.1, alpha=0.25)
        actual = jax.value_and_grad(lambda x, o=expectation: mean_loss(batch, x, o))(far)
        assert all(np.isfinite(entry).all() for entry in actual), size
        for name in ("forward_kl", "alpha", "js"):
            assert np.isfinite(mean_loss(batch, far, objective("sigmoid", divergence=name)))


SETTINGS = {
    "loss_weights": [0.7],
    "beta": 0.45,
    "label_smoothing": 0.2,
    "f_divergence": "js",
    "f_alpha": 0.3,
    "ld_alpha": 0.4,
    "use_weighting": True,
    "discopop_tau": 0.2,
    "simpo_gamma": 0.9,
    "alphapo_alpha": 0.6,
    "cpo_alpha": 0.35,
    "desirable_weight": 1.7,
    "undesirable_weight": 1.7,
}
"""A value of each number of a loss, other than any loss's own."""


def read_number(batches, table):
    """(loss, sum of the metrics) of a section task on log-probs; None where it is refused."""
    task = PreferenceTask(**table)
    if list(find_number_conflicts(task)) or list(find_mixture_conflicts(task)):
        return None
    kind = (task.of_labels, bool(task.nll_weight) and task.resolved("nll_on"), task.ld_alpha)
    if kind not in batches:
        batches[kind] = make_batch(3, kind[0], kind[1] or "none", kind[2])
    batch, logp = batches[kind]
    sums, metrics = preference_terms(
        jnp.asarray(logp), batch, read_objective(task), jnp.asarray(0.5 * logp)
    )
    loss = sum(factor * float(sums[name]) for name, factor in preference_coef(task).items())
    return loss, sum(float(value) for value, _ in metrics.values())


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (i % 4 > 0))
        for i, name in enumerate(get_args(LossName))
    ],
)
def test_no_number_is_ignored_silently(loss):
    """Every number of section task changes what a loss is, or is refused by its name."""
    batches: dict = {}
    plain = read_number(batches, {"loss": loss})
    assert plain is not None
    ignored = [
        key for key, value in SETTINGS.items()
        if (found := read_number(batches, {"loss": loss, key: value})) is not None
        and found[0] == plain[0]
    ]  # fmt: skip
    # beta scales the rewards of the metrics, too, which sft has beside its likelihood.
    assert ignored == (["beta"] if loss == "sft" else [])
    for key in set(SETTINGS) - {"loss_weights"}:
        if read_number(batches, {"loss": loss, key: SETTINGS[key]}) is None:
            conflicts = list(
                find_number_conflicts(PreferenceTask(loss=loss, **{key: SETTINGS[key]}))
            )
            assert conflicts and all(f"task.{key}" in sentence for sentence in conflicts), key


@pytest.mark.parametrize(("loss", "refused"), [
    ("sft", True), ("nca_pair", True), ("bco_pair", True), ("sppo_hard", True), ("apo_down", True),
    ("apo_zero", True), ("aot", True), ("sigmoid", False), ("sigmoid_norm", False), ("ipo", False),
    ("hinge", False), ("exo_pair", False), ("robust", False), ("discopop", False),
])  # fmt: skip
def test_divergences_need_a_difference(loss, refused):
    """The losses with f-divergences are those that TRL accepts, except sft alone."""
    conflicts = list(find_number_conflicts(PreferenceTask(loss=loss, f_divergence="forward_kl")))
    assert bool(conflicts) == refused
    if refused:
        assert f"f_divergence has no meaning in task.loss {loss}" in conflicts[0]
        assert "sigmoid_norm" in conflicts[0] and "nca_pair" not in conflicts[0].split(";")[1]
    limit = PreferenceTask(loss=loss, f_divergence="alpha", f_alpha=1.0)  # reverse_kl
    assert not list(find_number_conflicts(limit))
