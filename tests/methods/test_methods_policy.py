"""Policy losses against numbers worked out by hand and a plain float64 loop over sequences.

The reference below reads like the papers: one sequence at a time, plain Python numbers. Tolerances:
1e-12 relative in float64, where both only differ by the order of sums.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxtrain.batch import Batch
from jaxtrain.methods.rl.loss import (
    PolicyObjective,
    importance_weight,
    kl_estimate,
    m2_range,
    policy_terms,
    top_entropy_mask,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make_batch(seed=0, rows=2, length=12, weights=None):
    """Rows of two or three branches with a few untrained tokens each, and the policy's numbers."""
    rng = np.random.default_rng(seed)
    owner = np.sort(rng.integers(0, 3, (rows, length)), axis=1).astype(np.int32)
    trained = rng.random((rows, length)) < 0.8
    trained[:, 0] = False
    advantage = rng.normal(size=(rows, 3))[np.arange(rows)[:, None], owner]
    streams = {
        "advantage": np.where(trained, advantage, 0.0),
        "old_logp": rng.normal(-1.5, 0.4, (rows, length)),
        "sampler_logp": rng.normal(-1.5, 0.4, (rows, length)),
        "ref_logp": rng.normal(-1.5, 0.4, (rows, length)),
    }
    zeros = np.zeros((rows, length), np.int32)
    weight = trained * (rng.uniform(0.5, 2.0, (rows, length)) if weights is None else weights)
    batch = Batch(
        zeros, zeros, zeros - 1, zeros, {"pg": weight, "kl": weight}, owner=owner, streams=streams
    )
    logp = rng.normal(-1.5, 0.4, (rows, length))
    entropy = rng.uniform(0.0, 3.0, (rows, length))
    return batch, logp, entropy


def plain_batch(weight, advantage, old_logp=0.0, sampler_logp=None):
    """A batch whose rows are one sequence each; numbers of streams or arrays like the weights."""
    ints, entry = np.zeros(weight.shape, np.int32), np.ones_like(weight)
    sampler_logp = old_logp if sampler_logp is None else sampler_logp
    streams = {"advantage": advantage, "old_logp": old_logp, "sampler_logp": sampler_logp}
    streams = {name: entry * value for name, value in streams.items()}
    return Batch(ints, ints, ints - 1, ints, {"pg": weight}, owner=ints, streams=streams)


def total(logp, entropy, batch, objective):
    """The sum of all components."""
    return sum(policy_terms(logp, jnp.asarray(entropy), batch, objective)[0].values())


def reference(batch, logp, entropy, objective):
    """(pg, kl) sums of the specification, token by token; no top-entropy mask, no m2."""
    pg = kl = 0.0
    rows, length = logp.shape
    weight, streams, owner = batch.weights["pg"], batch.streams, batch.owner
    for b in range(rows):
        for t in range(length):
            if weight[b, t] == 0:
                continue
            local_value = [s for s in range(length) if owner[b, s] == owner[b, t] and weight[b, s]]
            importance = importance_of(b, t, local_value, logp, streams, objective)
            old = logp if objective.own_old else streams["old_logp"]
            gaps = [logp[b, s] - old[b, s] for s in local_value]
            token_ratio = math.exp(logp[b, t] - old[b, t])
            ratio = {
                "token": token_ratio,
                "sequence": math.exp(sum(gaps) / len(local_value)),
                "sequence_token": math.exp(sum(gaps) / len(local_value)),
                "sequence_sum": math.exp(sum(gaps)),
            }[objective.ratio]
            advantage = streams["advantage"][b, t]
            if objective.clip == "ppo":
                bounded = ratio if objective.delta is None else min(ratio, objective.delta)
                clipped = min(max(ratio, 1 - objective.low), 1 + objective.high)
                gain = min(bounded * advantage, clipped * advantage)
            elif objective.clip == "cispo":
                gain = min(ratio, objective.high) * advantage * logp[b, t]
            elif objective.clip == "reinforce":
                gain = advantage * logp[b, t]
            elif objective.clip == "sapo":
                tau = objective.sapo[0] if advantage > 0 else objective.sapo[1]
                gain = advantage / (1 + math.exp(-tau * (ratio - 1))) * 4 / tau
            elif objective.clip == "gmpo":
                high, low = objective.high, objective.low
                cut = [min(g, high) if advantage > 0 else max(g, -low) for g in gaps]
                gain = advantage * math.exp(sum(cut) / len(local_value))
            elif objective.clip == "vespo":
                logs = [
                    math.log(importance_of(b, s, local_value, logp, streams, objective))
                    for s in local_value
                ]
                by_token = objective.correction.startswith("token")
                log_w = sum(gaps) + (sum(logs) if by_token else math.log(importance))
                log_w = min(max(log_w, math.log(1e-8)), 20.0)
                k, shift = objective.vespo[0 if advantage >= 0 else 1]
                gain = math.exp(shift + k * log_w - shift * math.exp(log_w))
                gain *= advantage * logp[b, t]
                importance = 1.0
            else:
                gain = ratio * advantage
            loss = -gain
            if objective.off_policy_threshold is not None:
                drift = sum(streams["sampler_logp"][b, s] - logp[b, s] for s in local_value) / len(
                    local_value
                )
                if advantage < 0 and drift > objective.off_policy_threshold:
                    loss = 0.0
            loss *= importance
            pg += weight[b, t] * loss
            if objective.kl:
                gap = streams["ref_logp"][b, t] - logp[b, t]
                actual = {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - gap - 1}[objective.kl]
                kl += weight[b, t] * actual * (token_ratio if objective.kl_bias_correction else 1.0)
    return pg, kl


def importance_of(b, t, local_value, logp, streams, objective):
    """Weight of a token for having been drawn by the sampler."""
    level, _, form = objective.correction.partition("_")
    if level == "none":
        return 1.0
    old = logp if objective.own_old else streams["old_logp"]
    differences = [old[b, s] - streams["sampler_logp"][b, s] for s in local_value]
    of_token = old[b, t] - streams["sampler_logp"][b, t]
    importance = math.exp(of_token if level == "token" else sum(differences))
    least = objective.correction_min or 0.0
    if form == "truncate":
        return min(max(importance, least), objective.correction_max)
    return importance if least <= importance <= objective.correction_max else 0.0


OBJECTIVES = {
    "grpo": PolicyObjective(low=0.2, high=0.2, kl="k3"),
    "dapo": PolicyObjective(low=0.2, high=0.28, delta=1.5),
    "gspo": PolicyObjective(ratio="sequence", low=0.05, high=0.1),
    "rloo": PolicyObjective(ratio="sequence_sum", low=0.2, high=0.2),
    "cispo": PolicyObjective(clip="cispo", high=1.1, kl="k1"),
    "reinforce": PolicyObjective(clip="reinforce", kl="k2"),
    "bare": PolicyObjective(clip="none", kl="k3", kl_bias_correction=True),
    "own old": PolicyObjective(own_old=True, correction="token_truncate", correction_max=1.2),
    "floor": PolicyObjective(correction="token_truncate", correction_max=1.3, correction_min=0.8),
    "token mask": PolicyObjective(correction="token_mask", correction_max=1.3, correction_min=0.7),
    "sequence": PolicyObjective(correction="sequence_truncate", correction_max=1.5),
    "sequence mask": PolicyObjective(correction="sequence_mask", correction_max=1.5),
    "sapo": PolicyObjective(clip="sapo", correction="token_truncate", correction_max=1.2),
    "gmpo": PolicyObjective(clip="gmpo", low=0.1, high=0.2),
    "gspo token": PolicyObjective(ratio="sequence_token", low=0.05, high=0.1),
    "vespo": PolicyObjective(clip="vespo"),
    "vespo token": PolicyObjective(clip="vespo", correction="token_truncate", correction_max=1.2),
    "vespo sequence": PolicyObjective(
        clip="vespo", correction="sequence_truncate", correction_max=1.5
    ),
    "off policy": PolicyObjective(off_policy_threshold=0.01),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_the_specifications(name):
    batch, logp, entropy = make_batch()
    objective = OBJECTIVES[name]
    sums, _ = policy_terms(jnp.asarray(logp), jnp.asarray(entropy), batch, objective)
    pg, kl = reference(batch, logp, entropy, objective)
    np.testing.assert_allclose(sums["pg"], pg, rtol=1e-12)
    if objective.kl:
        np.testing.assert_allclose(sums["kl"], kl, rtol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        *("grpo", "gspo", "off policy"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("dapo", "rloo", "bare", "gmpo")),
    ],
)
def test_gradients_are_those_of_finite_differences(name):
    """Away from clip edges, which random numbers never hit; of all that stops no gradient."""
    batch, logp, entropy = make_batch(3)
    function = functools.partial(total, entropy=entropy, batch=batch, objective=OBJECTIVES[name])
    check_grads(function, (jnp.asarray(logp),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def token(advantage, logp, old, **changes):
    """The loss of one token with weight 1, and its gradient by the policy's log-prob."""
    mask = np.array([[0.0, 1.0]])
    batch, objective = plain_batch(mask, mask * advantage, old), PolicyObjective(**changes)

    def loss(value):
        return total(jnp.full((1, 2), value), np.zeros((1, 2)), batch, objective)

    return [float(x) for x in jax.value_and_grad(loss)(jnp.asarray(logp, jnp.float64))]


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient, -A
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # clipped at 1.2
        (0.5, 2.0, -1.0, -1.0),  # a worse ratio with A > 0 is never clipped
        (0.5, -1.0, 0.8, 0.0),  # clipped at 0.8
        (1.5, -1.0, 1.5, 1.5),
    ],
)
def test_one_token_by_hand(ratio, advantage, loss, slope):
    actual = token(advantage, math.log(ratio) - 1.0, -1.0)
    np.testing.assert_allclose(actual, [loss, slope], rtol=1e-12, atol=1e-12)


def test_dual_clip_bounds_what_a_negative_advantage_can_cost():
    assert token(-1.0, math.log(10.0), 0.0)[0] == pytest.approx(10.0)
    assert token(-1.0, math.log(10.0), 0.0, delta=3.0) == pytest.approx([3.0, 0.0])


def test_cispo_caps_the_weight_but_keeps_the_gradient():
    loss, slope = token(1.0, math.log(8.0) - 3.0, -3.0, clip="cispo", high=5.0)
    assert loss == pytest.approx(-5.0 * (math.log(8.0) - 3.0))
    assert slope == pytest.approx(-5.0)  # -cap x A, where ppo would give 0


@pytest.mark.parametrize(
    "ratio, advantage, loss, slope",
    [
        # -A sigmoid(r - 1) 4 at r = 1: 2 A; its slope by log r is -A 4 r s (1 - s) = -A.
        (1.0, 1.0, -2.0, -1.0),
        # tau 1.05: sigmoid(0) 4 / 1.05; the slope does not know tau there.
        (1.0, -1.0, 2.0 / 1.05, 1.0),
        # sigmoid(1) = 0.731058..., slope 4 x 2 x 0.196611...
        (2.0, 1.0, -4 * 0.7310585786300049, -8 * 0.19661193324148185),
    ],
)
def test_sapo_is_a_soft_gate(ratio, advantage, loss, slope):
    actual = token(advantage, math.log(ratio), 0.0, clip="sapo")
    np.testing.assert_allclose(actual, [loss, slope], rtol=1e-12)


def test_vespo_weighs_a_token_of_ratio_one_by_one():
    # exp(lambda + k log 1 - lambda 1) = 1: on policy the plain gradient, -A logp.
    assert token(2.0, -1.5, -1.5, clip="vespo") == pytest.approx([3.0, -2.0])
    # w = 2, A < 0: exp(2 + 3 log 2 - 2 x 2) = 8 exp(-2).
    loss, slope = token(-1.0, -1.0, -1.0 - math.log(2.0), clip="vespo")
    assert (loss, slope) == pytest.approx((-8 * math.exp(-2), 8 * math.exp(-2)))


def test_gmpo_cuts_log_ratios_where_they_would_help():
    assert token(1.0, 0.9, 0.0, clip="gmpo", low=0.4, high=0.4) == pytest.approx(
        [-math.exp(0.4), 0.0]
    )
    value = math.exp(0.9)
    assert token(-1.0, 0.9, 0.0, clip="gmpo", low=0.4, high=0.4) == pytest.approx([value, value])


def test_gspo_token_has_gspos_value_and_the_tokens_own_gradient():
    """Two tokens, log-ratios log 1.1 and log 1.3, weights 1 and 3: by GSPO both get half of the
    gradient, by GSPO-token each what its weight is worth."""
    batch, ratio = plain_batch(np.array([[1.0, 3.0]]), 1.0), math.sqrt(1.1 * 1.3)
    logp = jnp.log(jnp.array([[1.1, 1.3]]))
    for level, want in (("sequence", [2.0, 2.0]), ("sequence_token", [1.0, 3.0])):
        objective = PolicyObjective(ratio=level, low=0.5, high=0.5)
        value, slope = jax.value_and_grad(total)(logp, np.zeros((1, 2)), batch, objective)
        np.testing.assert_allclose(value, -4 * ratio, rtol=1e-12)
        np.testing.assert_allclose(slope, -ratio * np.array([want]), rtol=1e-12)


def test_an_own_old_policy_has_ratio_one_and_its_gradient():
    assert token(2.0, -1.3, -7.0, own_old=True) == pytest.approx([-2.0, -2.0])


def test_sequence_ratio_is_the_mean_over_the_sequences_trained_tokens():
    """Two tokens with log-ratios log 1.1 and log 1.3, one untrained with log 9: sqrt(1.43)."""
    batch = plain_batch(np.array([[0.5, 0, 0.5]]), np.array([[1.0, 0.0, 1.0]]))
    logp = jnp.log(jnp.array([[1.1, 9.0, 1.3]]))
    sums, metrics = policy_terms(
        logp, jnp.zeros((1, 3)), batch, PolicyObjective(ratio="sequence", low=0.5, high=0.5)
    )
    np.testing.assert_allclose(sums["pg"], -math.sqrt(1.1 * 1.3), rtol=1e-12)
    np.testing.assert_allclose(metrics["ratio/max"][0], math.sqrt(1.1 * 1.3), rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "sequence mask", "sapo", "gmpo", "vespo token"])
def test_all_masked_is_zero_without_nan(name):
    batch, logp, entropy = make_batch(weights=0.0)
    value, slope = jax.value_and_grad(total)(jnp.asarray(logp), entropy, batch, OBJECTIVES[name])
    assert float(value) == 0.0
    assert not np.asarray(slope).any()


@pytest.mark.parametrize("name", ["grpo", "cispo", "sequence mask", "sapo", "gmpo", "vespo token"])
@pytest.mark.parametrize("where", ["policy", "old_logp", "sampler_logp", "ref_logp", "all"])
def test_impossible_tokens_stay_finite(name, where):
    batch, logp, entropy = make_batch(5)
    t = int(np.flatnonzero(batch.weights["pg"][0])[0])
    if where in ("policy", "all"):
        logp[0, t] = -np.inf
    for key in batch.streams:
        if where in (key, "all") and key != "advantage":
            batch.streams[key][0, t] = -np.inf
    value, slope = jax.value_and_grad(total)(jnp.asarray(logp), entropy, batch, OBJECTIVES[name])
    assert np.isfinite(float(value))
    assert np.isfinite(np.asarray(slope)).all()


def test_kl_estimators_by_hand():
    logp, ref = jnp.array([-1.0]), jnp.array([-1.5])
    np.testing.assert_allclose(kl_estimate(logp, ref, "k1"), [0.5], rtol=1e-12)
    np.testing.assert_allclose(kl_estimate(logp, ref, "k2"), [0.125], rtol=1e-12)
    np.testing.assert_allclose(kl_estimate(logp, ref, "k3"), [math.exp(-0.5) - 0.5], rtol=1e-12)
    same = kl_estimate(ref, ref, "k3")
    assert float(same[0]) == 0.0


def test_masked_importance_is_zero_never_the_bound():
    gap = jnp.log(jnp.array([[4.0, 0.1, 1.0]]))
    objective = PolicyObjective(correction="token_mask", correction_max=3.0, correction_min=0.5)
    owner = np.zeros((1, 3), np.int32)
    actual = importance_weight(gap, np.ones((1, 3), bool), owner, objective)
    np.testing.assert_allclose(actual, [[0.0, 0.0, 1.0]])


def slow_m2_range(log_ratio, advantage, mask, threshold):
    """AstraFlow's rule as the specification states it."""
    squares = sorted(
        (
            r**2
            for r, a, m in zip(log_ratio, advantage, mask, strict=True)
            if m and ((a > 0 and r > 0) or (a < 0 and r < 0))
        ),
        reverse=True,
    )
    if not squares or sum(squares) / len(squares) <= threshold:
        return 0.95, 20.0
    means = [sum(squares[i:]) / len(squares[i:]) for i in range(len(squares))]
    k = next((i for i, mean in enumerate(means) if mean < threshold), len(squares) - 1)
    reach = math.sqrt(squares[k])
    return min(1 - math.exp(-reach), 0.95), min(math.exp(reach) - 1, 20.0)


@pytest.mark.parametrize("threshold", [1e-6, 0.04, 0.3, 100.0])
@pytest.mark.parametrize("seed", range(4))
def test_m2_range_is_the_sorted_rule(seed, threshold):
    rng = np.random.default_rng(seed)
    ratio, advantage = rng.normal(0, 0.5, (2, 9)), rng.normal(size=(2, 9))
    mask = rng.random((2, 9)) < 0.7
    low, high, _ = m2_range(
        jnp.asarray(ratio), jnp.asarray(advantage), jnp.asarray(mask), threshold
    )
    want = slow_m2_range(ratio.ravel(), advantage.ravel(), mask.ravel(), threshold)
    np.testing.assert_allclose([low, high], want, rtol=1e-12)


slopes = jax.jit(jax.grad(total), static_argnums=3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("seed", range(3))
def test_m2pos_largest_kept_token_keeps_its_whole_gradient(sign, seed, dtype):
    """By hand: a kept token's slope is -A r, whichever it is, and that of a left-out one 0. The
    largest kept one lies on the bound that is made of it."""
    rng = np.random.default_rng(seed)
    gap = (sign * rng.uniform(0.001, 0.6, (1, 40))).astype(dtype)
    if seed == 0:  # by hand: squares 0.25, 0.16, 0.09, 0.01; the mean of the last three is 0.0867
        gap[:] = 0.0
        gap[0, :4] = sign * np.array([0.5, 0.4, 0.3, 0.1])
    threshold = 0.09 if seed == 0 else 0.04
    mask = (gap != 0).astype(dtype)
    batch, objective = plain_batch(mask, sign * 1.5, -1), PolicyObjective(m2_threshold=threshold)
    zeros = np.zeros_like(gap)
    slope = np.asarray(slopes(jnp.asarray(gap) - 1, zeros, batch, objective))
    squares = np.sort(gap[mask > 0].astype(np.float64) ** 2)[::-1]
    means = [squares[i:].mean() for i in range(len(squares))]
    first = next(i for i, mean in enumerate(means) if mean < threshold)
    assert 0 < first < len(squares) - 1
    retained = (gap.astype(np.float64) ** 2 <= squares[first] * (1 + 1e-6)) & (mask > 0)
    want = np.where(retained, -sign * 1.5 * np.exp(gap.astype(np.float64)), 0.0)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(slope, want, rtol=tolerance, atol=tolerance)


def test_gmpo_is_verls():
    """Loss and gradients that compute_policy_loss_geo_mean of verl 0.9.1 gives in float64; tokens
    on the bounds (0.4 with A > 0, -0.4 with A < 0) included. Its 1e-8 in the mean: rtol 1e-7."""
    gap = np.array([[0.5, -0.1, 0.3, 9.0], [-0.5, 0.2, -0.4, -0.4], [0.4, 0.1, -0.45, 0.25]])
    mask = np.array([[1.0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    advantage = np.array([[1.5], [-0.5], [0.75]]) * np.ones_like(gap)
    batch = plain_batch(mask / mask.sum(1, keepdims=True) / 3, advantage)  # a mean of sequences
    objective = PolicyObjective(clip="gmpo", low=0.4, high=0.4)
    value, slope = jax.value_and_grad(total)(jnp.asarray(gap), gap, batch, objective)
    np.testing.assert_allclose(value, -0.7503722833657084, rtol=1e-7)
    first, second, third = -0.20356712486720271, 0.03245003248600631, -0.06736775908081921
    want = [[0, first, first, 0], [0, second, second, second], [third] * 4]
    np.testing.assert_allclose(slope, want, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(
    "ratio, advantage, changes",
    [(1.25, 2.0, {"high": 0.25}), (0.75, -2.0, {"low": 0.25}), (1.25, -2.0, {"delta": 1.25})],
)
def test_a_token_on_the_bound_is_inside(ratio, advantage, changes):
    """Like torch.clamp and torch.min: r A and its full slope."""
    entry, logp = np.ones((1, 1)), math.log(ratio)
    assert math.exp(logp) == ratio
    arguments = (jnp.full((1, 1), logp), entry, plain_batch(entry, advantage))
    actual = jax.value_and_grad(total)(*arguments, PolicyObjective(**changes))
    np.testing.assert_allclose(actual[0], -ratio * advantage, rtol=1e-12)
    np.testing.assert_allclose(actual[1], [[-ratio * advantage]], rtol=1e-12)


def test_m2_range_of_nothing_is_wide_open():
    low, high, moment = m2_range(jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.zeros((1, 3), bool), 0.04)
    assert (float(low), float(high), float(moment)) == (0.95, 20.0, 0.0)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_top_entropy_is_numpys_quantile_of_the_trained_tokens(share):
    rng = np.random.default_rng(1)
    entropy, mask = rng.random((3, 7)), rng.random((3, 7)) < 0.6
    array = np.asarray(top_entropy_mask(jnp.asarray(entropy), jnp.asarray(mask), share))
    want = entropy >= np.quantile(entropy[mask], 1 - share)
    np.testing.assert_array_equal(array[mask], want[mask])


def test_clip_ratios_count_tokens():
    batch, _, entropy = make_batch(2)
    weight = batch.weights["pg"] != 0
    logp = batch.streams["old_logp"] + np.log(1.5)
    _, metrics = policy_terms(jnp.asarray(logp), jnp.asarray(entropy), batch, PolicyObjective())
    total, count = metrics["clip_ratio/high_mean"]
    assert count == weight.sum()
    assert total == (weight & (batch.streams["advantage"] > 0)).sum()
    assert metrics["clip_ratio/low_mean"][0] == 0
    gap = (batch.streams["old_logp"] - batch.streams["sampler_logp"])[weight]
    actual = metrics["sampling/sampling_logp_difference/max"]
    np.testing.assert_allclose(actual[0], np.abs(gap).max(), rtol=1e-12)


def test_extremes_of_clip_ratios_are_those_of_single_sequences():
    batch, logp, entropy = make_batch(2, length=40)
    objective = PolicyObjective(low=0.1, high=0.1)
    _, metrics = policy_terms(jnp.asarray(logp), jnp.asarray(entropy), batch, objective)
    ratio = np.exp(logp - batch.streams["old_logp"])
    low = (ratio < 0.9) & (batch.streams["advantage"] < 0)
    high = (ratio > 1.1) & (batch.streams["advantage"] > 0)
    lows, highs = [], []
    for row, weights in enumerate(batch.weights["pg"]):
        for branch in np.unique(batch.owner[row]):
            local_value = (weights != 0) & (batch.owner[row] == branch)
            if local_value.any():
                lows.append(low[row, local_value].mean())
                highs.append(high[row, local_value].mean())
    assert 0 < max(highs) < 1
    np.testing.assert_allclose(metrics["clip_ratio/low_min"], (min(lows), 1), rtol=1e-12)
    np.testing.assert_allclose(metrics["clip_ratio/high_max"], (max(highs), 1), rtol=1e-12)
    low_means, high_means = (metrics[f"clip_ratio/{name}_mean"][0] for name in ("low", "high"))
    assert (low_means, high_means) == (
        (low & (batch.weights["pg"] != 0)).sum(),
        (high & (batch.weights["pg"] != 0)).sum(),
    )
