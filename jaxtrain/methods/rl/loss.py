"""Policy-gradient losses: one ratio-and-clip core whose settings are GRPO and its family.

For a trained token t of sequence i, with advantage A_i:

    ratio      r = exp(logp - old_logp) of the token; of the sequence by mean (GSPO; GSPO-token has
               its value with the token's own gradient), sum (RLOO)
    surrogate  ppo        min(min(r, delta) A, clip(r, 1 - low, 1 + high) A)
               cispo      stop(min(r, high)) A logp
               reinforce  A logp
               none       r A
               sapo       A sigmoid(tau (r - 1)) 4 / tau, tau by the sign of A
               vespo      stop(exp(lambda + k log w - lambda w)) A logp, w the sequence's product of
                          ratios and importance weights, (k, lambda) by the sign of A
               gmpo       A exp(mean of the sequence's log-ratios, each cut off at -low for A < 0
                          and at high for A > 0)
    loss       -surrogate x off-policy mask x entropy mask x importance weight, then KL beside it

How tokens are averaged is no business of these functions: it lies in the batch's weights.
Sources: PPO (1707.06347), GRPO (2402.03300), DAPO (2503.14476), Dr.GRPO (2503.20783), GSPO
(2507.18071), CISPO (2506.13585), RLOO (2402.14740), M2PO (2510.01161), dual clip (1912.09729),
SAPO (2511.20347), GMPO (2507.20673), VESPO and the defaults of its numbers as in TRL.

Shapes: B rows, T packed tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.losses.segments import segment_mean, segment_sum
from jaxtrain.methods.rl.config import KLEstimator, Ratio

LOGP_FLOOR = -1e4
"""Log-probs below it count as it: differences of two impossible tokens stay finite."""
LOG_RATIO_LIMIT = 20.0
"""exp() of larger log-ratios would swamp every sum; no published clip range reaches it."""
FIRST_UPDATE = "first_update"
"""Stream: 1 in a round's first update, 0 in later ones; without it every update is a first one."""
VESPO_LEAST = 1e-8
"""Least weight of a sequence in VESPO."""
WIDEST = (0.95, 20.0)
"""Bounds of the clip range that M2PO's adaptive form starts from."""


@dataclass(frozen=True)
class PolicyObjective:
    """The numbers of one objective; see the module's docstring for the letters."""

    ratio: Ratio = "token"
    clip: Literal["ppo", "cispo", "reinforce", "none", "sapo", "vespo", "gmpo"] = "ppo"
    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    sapo: tuple[float, float] = (1.0, 1.05)
    """tau for A > 0 and for the others."""
    vespo: tuple[tuple[float, float], tuple[float, float]] = ((2.0, 3.0), (3.0, 2.0))
    """(k, lambda) for A >= 0 and for A < 0."""
    own_old: bool = False
    """The policy is its own old policy: r is 1 but has its gradient. For one update a round, where
    the log-probs before it are those of the update itself."""
    sampled_old: bool = False
    """The old log-probs are the sampler's."""
    m2_threshold: float | None = None
    """Take low and high from the second moment of the log-ratios instead (`m2_range`)."""
    correction: str = "none"
    """(token | sequence)_(truncate | mask): weigh by old policy / sampler."""
    correction_max: float = 3.0
    correction_min: float | None = None
    off_policy_threshold: float | None = None
    top_entropy: float = 1.0
    kl: KLEstimator | None = None
    kl_bias_correction: bool = False
    entropy_bonus: bool = False
    temperature: float | None = None
    """What the sampler divided logits by; the policy's log-probs are those of that distribution."""


def policy_loss(model, batch: Batch, objective: PolicyObjective, impl: str = "auto"):
    """Sums over the trained tokens of rows [B, T]: {"pg": ..., "kl": ..., "entropy": ...}, metrics.

    batch: `weights["pg"]` (0: not trained), `owner`, streams `advantage`, `sampler_logp`, and
    `old_logp` unless own_old, `ref_logp` with a KL term; "kl" weighs by `weights["kl"]`.
    """
    scores = token_logp(model, batch, impl, objective.temperature, drawable=True)
    return policy_terms(scores.logp, scores.entropy, batch, objective)


def policy_terms(logp_BT, entropy_BT, batch: Batch, objective: PolicyObjective):
    """Compute the loss from the policy's log-probs and entropies [B, T]."""
    weight_BT = batch.weights["pg"].astype(logp_BT.dtype)
    # By the weight, not the stream DRAWN: answers of the data that are trained have one, too.
    mask_BT = weight_BT != 0
    streams = {name: value.astype(logp_BT.dtype) for name, value in batch.streams.items()}
    advantage_BT = streams["advantage"]
    logp_BT = _floor(logp_BT, mask_BT)
    fixed_BT = jax.lax.stop_gradient(logp_BT)
    old_BT = fixed_BT if objective.own_old else _floor(streams["old_logp"], mask_BT)
    sampler_BT = _floor(streams["sampler_logp"], mask_BT)

    token_ratio_BT = jnp.exp(_limit(logp_BT - old_BT))
    ratio_BT = _ratio(logp_BT - old_BT, token_ratio_BT, mask_BT, batch.owner, objective.ratio)
    low, high, m2 = objective.low, objective.high, {}
    if objective.m2_threshold is not None:
        low, high, moment = m2_range(
            fixed_BT - old_BT, advantage_BT, mask_BT, objective.m2_threshold
        )
        m2 = {"m2": moment, "m2/epsilon_low": low, "m2/epsilon_high": high}
    importance_BT = importance_weight(old_BT - sampler_BT, mask_BT, batch.owner, objective)
    # A constant of the update: it enters below behind stop_gradient.
    weight_of_loss_BT = importance_BT
    if objective.clip == "gmpo":
        ratio_BT = gmpo_ratio(logp_BT - old_BT, advantage_BT, mask_BT, batch.owner, low, high)
    if objective.clip == "vespo":
        shape_BT = vespo_weight(
            fixed_BT - old_BT, importance_BT, advantage_BT, mask_BT, batch.owner, objective
        )
        surrogate_BT = jax.lax.stop_gradient(shape_BT) * advantage_BT * logp_BT
        weight_of_loss_BT = jnp.ones_like(importance_BT)  # it is in w already
    else:
        surrogate_BT = _surrogate(ratio_BT, logp_BT, advantage_BT, low, high, objective)

    kept_BT = jnp.ones_like(mask_BT)
    if objective.off_policy_threshold is not None:
        drift_BT = segment_mean(sampler_BT - fixed_BT, mask_BT, batch.owner)
        kept_BT &= (advantage_BT >= 0) | (drift_BT <= objective.off_policy_threshold)
    if objective.top_entropy < 1.0:
        kept_BT &= top_entropy_mask(entropy_BT, mask_BT, objective.top_entropy)
    loss_BT = -surrogate_BT * jax.lax.stop_gradient(kept_BT * weight_of_loss_BT)
    sums = {"pg": jnp.sum(jnp.where(mask_BT, weight_BT * loss_BT, 0.0))}

    metrics = describe_tokens(
        ratio_BT, advantage_BT, entropy_BT, mask_BT, batch.owner, (low, high), objective
    )
    metrics |= describe_gap(old_BT - sampler_BT, importance_BT, mask_BT)
    metrics |= describe_mismatch(fixed_BT if objective.sampled_old else old_BT, sampler_BT, batch)
    metrics["trained_share"] = _mean(kept_BT, mask_BT)
    unit = jnp.ones((), logp_BT.dtype)
    metrics |= {name: (value.astype(logp_BT.dtype), unit) for name, value in m2.items()}
    if objective.kl is not None:
        divergence_BT = kl_estimate(logp_BT, _floor(streams["ref_logp"], mask_BT), objective.kl)
        metrics["kl"] = _mean(jax.lax.stop_gradient(divergence_BT), mask_BT)
        if objective.kl_bias_correction:
            divergence_BT = divergence_BT * token_ratio_BT
        kl_weight_BT = batch.weights["kl"].astype(logp_BT.dtype)
        sums["kl"] = jnp.sum(jnp.where(mask_BT, kl_weight_BT * divergence_BT, 0.0))
    if objective.entropy_bonus:
        bonus_weight_BT = batch.weights["entropy"].astype(logp_BT.dtype)
        sums["entropy"] = -jnp.sum(jnp.where(mask_BT, bonus_weight_BT * entropy_BT, 0.0))
    return sums, metrics


def _ratio(log_ratio_BT, token_ratio_BT, mask_BT, owner_BT, level: str):
    if level == "token":
        return token_ratio_BT
    if level == "sequence":
        return jnp.exp(_limit(segment_mean(log_ratio_BT, mask_BT, owner_BT)))
    if level == "sequence_token":
        fixed_BT = jax.lax.stop_gradient(log_ratio_BT)
        # Zero with a gradient: the value is the sequence's ratio, the gradient the token's own
        # (GSPO-token).
        own_BT = log_ratio_BT - fixed_BT
        return jnp.exp(_limit(segment_mean(fixed_BT, mask_BT, owner_BT)) + own_BT)
    assert level == "sequence_sum", level
    return jnp.exp(_limit(segment_sum(log_ratio_BT, mask_BT, owner_BT)))


def _surrogate(ratio_BT, logp_BT, advantage_BT, low, high, objective: PolicyObjective):
    match objective.clip:
        case "ppo":
            bounded_BT = ratio_BT
            if objective.delta is not None:
                bounded_BT = at_most(ratio_BT, objective.delta)
            clipped_BT = at_most(at_least(ratio_BT, 1.0 - low), 1.0 + high)
            return at_most(bounded_BT * advantage_BT, clipped_BT * advantage_BT)
        case "cispo":
            # CISPO clips the weight of a token but keeps its gradient, where PPO's clip drops it.
            capped_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, high))
            return capped_BT * advantage_BT * logp_BT
        case "reinforce":
            return advantage_BT * logp_BT
        case "none" | "gmpo":
            return ratio_BT * advantage_BT
        case "sapo":
            tau_BT = jnp.where(advantage_BT > 0, *objective.sapo).astype(ratio_BT.dtype)
            gate_BT = jax.nn.sigmoid(tau_BT * (ratio_BT - 1.0)) * 4.0 / tau_BT
            return gate_BT * advantage_BT
    raise AssertionError(objective.clip)


def at_most(values, bound):
    """The minimum; where both are equal the gradient is that of the values alone, as everywhere
    inside the bound (jnp.minimum would halve it)."""
    return jnp.where(values > bound, bound, values)


def at_least(values, bound):
    """The maximum, with the gradient of `at_most`."""
    return jnp.where(values < bound, bound, values)


def gmpo_ratio(log_ratio_BT, advantage_BT, mask_BT, owner_BT, low, high):
    """GMPO's geometric mean of the sequence's ratios, each cut off where it would help the loss."""
    cut_BT = jnp.where(advantage_BT > 0, at_most(log_ratio_BT, high), at_least(log_ratio_BT, -low))
    return jnp.exp(_limit(segment_mean(cut_BT, mask_BT, owner_BT)))


def vespo_weight(log_ratio_BT, importance_BT, advantage_BT, mask_BT, owner_BT, objective):
    """VESPO's weight of a sequence, on each of its tokens [B, T]; no gradient is meant to pass.

    A correction by token counts with every token's weight, one by sequence once.
    """
    log_w_BT = segment_sum(_limit(log_ratio_BT), mask_BT, owner_BT)
    log_importance_BT = jnp.log(jnp.maximum(importance_BT, VESPO_LEAST))
    if objective.correction.startswith("token"):
        log_importance_BT = segment_sum(log_importance_BT, mask_BT, owner_BT)
    log_w_BT = jnp.clip(log_w_BT + log_importance_BT, math.log(VESPO_LEAST), LOG_RATIO_LIMIT)
    (k, shift), (k_below, shift_below) = objective.vespo
    k_BT = jnp.where(advantage_BT >= 0, k, k_below)
    shift_BT = jnp.where(advantage_BT >= 0, shift, shift_below)
    return jnp.exp(shift_BT + k_BT * log_w_BT - shift_BT * jnp.exp(log_w_BT))


def importance_weight(log_ratio_BT, mask_BT, owner_BT, objective: PolicyObjective):
    """Weight of each token for having been drawn by the sampler instead of the old policy [B, T].

    log_ratio: old policy - sampler. Sequence forms take the SUM over the sequence. mask forms give
    0 outside the bounds (never the bound itself), truncate forms the nearest bound.
    """
    if objective.correction == "none":
        return jnp.ones_like(log_ratio_BT)
    level, _, form = objective.correction.partition("_")
    if level == "sequence":
        log_ratio_BT = segment_sum(log_ratio_BT, mask_BT, owner_BT)
    weight_BT = jnp.exp(_limit(log_ratio_BT))
    least = objective.correction_min or 0.0
    if form == "truncate":
        return jnp.clip(weight_BT, least, objective.correction_max)
    inside_BT = (weight_BT >= least) & (weight_BT <= objective.correction_max)
    return jnp.where(inside_BT, weight_BT, 0.0)


def kl_estimate(logp_BT, ref_BT, estimator: str):
    """Schulman's estimators of KL(policy | reference) from one drawn token (joschu.net, 2020)."""
    gap_BT = _limit(ref_BT - logp_BT)
    if estimator == "k1":
        return -gap_BT
    if estimator == "k2":
        return 0.5 * gap_BT**2
    assert estimator == "k3", estimator
    return jnp.expm1(gap_BT) - gap_BT


def m2_range(log_ratio_BT, advantage_BT, mask_BT, threshold: float):
    """(low, high, moment): M2PO's clip range of these rows, scalars without gradient.

    Among the tokens that a clip could touch (A > 0 and r > 1, or A < 0 and r < 1) the largest
    squared log-ratios are left out until the mean of the rest is below `threshold`; the largest one
    kept is the range, and a rounding error more, so that this token, which lies on the bound, stays
    inside. Depends on the rows that are together in a microstep. (AstraFlow's form.)
    """
    log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
    touched_BT = mask_BT & (
        ((advantage_BT > 0) & (log_ratio_BT > 0)) | ((advantage_BT < 0) & (log_ratio_BT < 0))
    )
    squares_N = -jnp.sort(-jnp.where(touched_BT, log_ratio_BT**2, 0.0).reshape(-1))
    count = jnp.sum(touched_BT)
    index_N = jnp.arange(squares_N.size)
    # Zeros of untouched tokens are at the end and add nothing to a suffix's sum.
    suffix_N = jnp.cumsum(squares_N[::-1])[::-1]
    left_N = jnp.maximum(count - index_N, 1)
    good_N = (suffix_N / left_N < threshold) & (index_N < count)
    last = jnp.maximum(count - 1, 0)
    first = jnp.where(good_N.any(), jnp.argmax(good_N), last)
    reach = jnp.sqrt(squares_N[first])
    moment = suffix_N[0] / jnp.maximum(count, 1)
    wide = (count == 0) | (moment <= threshold)
    rounding = 8 * jnp.finfo(reach.dtype).eps  # of the square root, exp() and the sum with 1
    low = jnp.minimum(-jnp.expm1(-reach) + rounding, WIDEST[0])
    high = jnp.minimum(jnp.expm1(reach) + rounding * (1.0 + reach) * jnp.exp(reach), WIDEST[1])
    low, high = jnp.where(wide, WIDEST[0], low), jnp.where(wide, WIDEST[1], high)
    return low, high, moment


def top_entropy_mask(entropy_BT, mask_BT, share: float):
    """Tokens whose entropy reaches the (1 - share) quantile of the trained ones of these rows
    (80/20 rule, arXiv 2506.01939)."""
    entropy_BT = jax.lax.stop_gradient(entropy_BT)
    sorted_N = jnp.sort(jnp.where(mask_BT, entropy_BT, jnp.inf).reshape(-1))
    # numpy's linear quantile among the first `count` values.
    count = jnp.sum(mask_BT)
    rank = (1.0 - share) * jnp.maximum(count - 1, 0).astype(entropy_BT.dtype)
    below = jnp.floor(rank).astype(jnp.int32)
    above = jnp.minimum(below + 1, jnp.maximum(count - 1, 0))
    lower, upper = sorted_N[below], sorted_N[above]
    threshold = lower + (upper - lower) * (rank - below)
    return entropy_BT >= jnp.where(count > 0, threshold, 0.0)


def describe_tokens(
    ratio_BT, advantage_BT, entropy_BT, mask_BT, owner_BT, clip_range, objective: PolicyObjective
) -> dict[str, Any]:
    """Entropy, ratios and how often the clip bit, as (sum, weight) pairs or extremes; low_min and
    high_max are those of single branches (TRL: of sequences)."""
    (low, high), ratio_BT = clip_range, jax.lax.stop_gradient(ratio_BT)
    metrics = {
        "entropy": _mean(entropy_BT, mask_BT),
        "ratio/mean": _mean(ratio_BT, mask_BT),
        "ratio/min": _extreme(ratio_BT, mask_BT, jnp.min, jnp.inf),
        "ratio/max": _extreme(ratio_BT, mask_BT, jnp.max, -jnp.inf),
    }
    if objective.clip == "ppo":
        low_BT = (ratio_BT < 1.0 - low) & (advantage_BT < 0)
        high_BT = (ratio_BT > 1.0 + high) & (advantage_BT > 0)
        metrics["clip_ratio/low_mean"] = _mean(low_BT, mask_BT)
        metrics["clip_ratio/high_mean"] = _mean(high_BT, mask_BT)
        metrics["clip_ratio/region_mean"] = _mean(low_BT | high_BT, mask_BT)
        low_BT, high_BT = (
            segment_mean(bit_BT.astype(ratio_BT.dtype), mask_BT, owner_BT)
            for bit_BT in (low_BT, high_BT)
        )
        metrics["clip_ratio/low_min"] = _extreme(low_BT, mask_BT, jnp.min, jnp.inf)
        metrics["clip_ratio/high_max"] = _extreme(high_BT, mask_BT, jnp.max, -jnp.inf)
    if objective.clip == "cispo":
        metrics["cispo_clip_ratio"] = _mean((ratio_BT > high) & (advantage_BT > 0), mask_BT)
    return metrics


def describe_gap(log_ratio_BT, importance_BT, mask_BT) -> dict[str, Any]:
    """Describe how far sampler and old policy are apart; log_ratio: old policy - sampler."""
    log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
    size_BT, ratio_BT = jnp.abs(log_ratio_BT), jnp.exp(_limit(log_ratio_BT))
    name = "sampling/importance_sampling_ratio"
    return {
        "sampling/sampling_logp_difference/mean": _mean(size_BT, mask_BT),
        "sampling/sampling_logp_difference/max": _extreme(size_BT, mask_BT, jnp.max, -jnp.inf),
        f"{name}/mean": _mean(ratio_BT, mask_BT),
        f"{name}/min": _extreme(ratio_BT, mask_BT, jnp.min, jnp.inf),
        f"{name}/max": _extreme(ratio_BT, mask_BT, jnp.max, -jnp.inf),
        # k3 of the sampler against the old policy: never negative, 0 where they agree.
        "sampling/mismatch_kl": _mean(ratio_BT - 1.0 - _limit(log_ratio_BT), mask_BT),
        "sampling/importance_weight": _mean(importance_BT, mask_BT),
    }


def describe_mismatch(trainer_BT, sampler_BT, batch: Batch) -> dict[str, Any]:
    """Describe how equal the sampler's log-probs are to the trainer's before the first update of a
    round: the share of equal bits, and the largest distance."""
    mask_BT = batch.weights["pg"] != 0
    if FIRST_UPDATE in batch.streams:
        mask_BT &= batch.streams[FIRST_UPDATE] != 0
    gap_BT = jnp.abs(jax.lax.stop_gradient(trainer_BT) - sampler_BT)
    return {
        "mismatch/exact": _mean(gap_BT == 0, mask_BT),
        "mismatch/max_abs": _extreme(gap_BT, mask_BT, jnp.max, -jnp.inf),
    }


def _mean(values_BT, mask_BT):
    kept_BT = mask_BT.astype(jnp.result_type(float))
    values_BT = jnp.where(mask_BT, jax.lax.stop_gradient(values_BT), 0)
    return jnp.sum(values_BT).astype(kept_BT.dtype), jnp.sum(kept_BT)


def _extreme(values_BT, mask_BT, reduce, nothing: float):
    any_token = mask_BT.any().astype(values_BT.dtype)
    return reduce(jnp.where(mask_BT, values_BT, nothing)), any_token


def _floor(logp_BT, mask_BT):
    """Finite log-probs: untrained tokens count as 0, impossible ones as LOGP_FLOOR."""
    return jnp.where(mask_BT, jnp.maximum(logp_BT, LOGP_FLOOR), 0.0)


def _limit(log_ratio_BT):
    return jnp.clip(log_ratio_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
