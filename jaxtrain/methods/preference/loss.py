"""Preference losses: scores of answers by branch, and presets of measures and links.

pi is the sum of log-probs of an answer's tokens, ref the same of the reference, |y| the number of
tokens. A preset names a *measure* u of an answer and a *link*, the loss of u+ (of the chosen
answer) and u- (of the rejected one). beta, epsilon (label smoothing), gamma and alpha are numbers.

    measure  ratio  r = pi - ref          score       s = f(r), f by the f-divergence
             sum    pi                    mean_score  s / |y|
             mean   pi / |y| = l; with alpha (1 - exp(-alpha l)) / alpha
             odds   l - log(1 - exp l)
    link     logistic  -(1 - epsilon) log sigma(z) - epsilon log sigma(-z), z = beta d - gamma
             hinge     max(0, 1 - beta d)          with d = u+ - u-; the others: see LINKS
             square    (d - 1 / (2 beta))^2

Two losses depend on other pairs: KTO on the mean log-ratio of answers after mismatched prompts, AOT
on the pair of the same rank in the whole step. These values are constants in streams of the slots,
computed before the update. Accumulation is therefore exact, and the gradient is that of the whole
step (the derivative of a sort is its permutation).

Several rejected answers to a prompt are as many pairs, which share its chosen answer. If a loss has
a term of each side alone, the term of the chosen answer counts once in each pair.

Sources: DPO (2305.18290), its label smoothing (cDPO) and robust (2403.00409), hinge (SLiC,
2305.10425), IPO (2310.12036), EXO (2402.00856), NCA (2402.05369), BCO (2404.04656), SPPO
(2405.00675), AOT (2406.05882), APO (2408.06266), DiscoPOP (2406.08414), f-divergences
(2309.16240), WPO (2406.11827), LD-DPO (2409.06411), KTO (2402.01306), ORPO (2403.07691), CPO
(2401.08417), SimPO (2405.14734), AlphaPO (2501.03884); forms and names as in TRL.

Shapes: B rows, T packed tokens; values of a comparison are on its slot (data/comparisons/pairs.py).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import predictions
from jaxtrain.core.losses.segments import segment_sum
from jaxtrain.core.losses.vocabulary import gather_logp

EXP_LIMIT = 80.0
"""exp() of larger values would overflow float32."""
MIN_ODDS = 1e-7
"""Upper bound -MIN_ODDS of a mean log-prob, so that its odds are finite."""


class Preset(NamedTuple):
    """Measure and link of a loss."""

    measure: Literal["ratio", "score", "mean_score", "sum", "mean", "odds", "none"]
    link: str
    """A key of LINKS (of pairs) or LABEL_LINKS (of single answers); "none": no comparison."""


PRESETS = {
    "sigmoid": Preset("score", "logistic"),
    "hinge": Preset("score", "hinge"),
    "ipo": Preset("mean_score", "square"),
    "robust": Preset("score", "robust"),
    "exo_pair": Preset("score", "exo"),
    "nca_pair": Preset("ratio", "nca"),
    "bco_pair": Preset("ratio", "bco"),
    "sppo_hard": Preset("ratio", "sppo"),
    "aot": Preset("ratio", "aot"),
    "aot_unpaired": Preset("ratio", "aot_unpaired"),
    "apo_zero": Preset("ratio", "apo_zero"),
    "apo_down": Preset("ratio", "apo_down"),
    "discopop": Preset("score", "discopop"),
    "sigmoid_norm": Preset("mean_score", "logistic"),
    "sft": Preset("none", "none"),
    "kto": Preset("ratio", "kto"),
    "apo_zero_unpaired": Preset("ratio", "apo_zero"),
    "orpo": Preset("odds", "odds"),
    "cpo": Preset("sum", "logistic"),
    "cpo_hinge": Preset("sum", "hinge"),
    "cpo_ipo": Preset("mean", "square"),
    "simpo": Preset("mean", "logistic"),
    "alphapo": Preset("mean", "logistic"),
}
"""Losses by name."""
OF_LABELS = ("kto", "apo_zero_unpaired")
"""Losses of labeled answers; all others compare two answers."""


@dataclass(frozen=True)
class PreferenceObjective:
    """Options of a loss, or of a sum of several; the module's docstring defines the letters."""

    losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    """(name in PRESETS, its weight)."""
    beta: float = 0.1
    epsilon: float = 0.0
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    divergence_alpha: float = 0.5
    gamma: float = 0.0
    alpha: float = 0.0
    """AlphaPO's alpha; 0 leaves the measure unchanged."""
    discopop_tau: float = 0.05
    desirable: float = 1.0
    """Weight of desirable labeled answers."""
    undesirable: float = 1.0
    reference: bool = True
    """True if the batch has reference log-probs; otherwise they are 0."""
    weighted: bool = False
    """Weight pairs by their likelihood under the policy (WPO)."""

    @property
    def measure(self) -> str:
        """Measure of the rewards in the metrics (times beta): that of the first loss, as raw
        log-ratios whatever the divergence."""
        measures = [PRESETS[name].measure for name, _ in self.losses]
        first = next((measure for measure in measures if measure != "none"), "ratio")
        return {"score": "ratio", "mean_score": "ratio", "odds": "mean"}.get(first, first)


class Side(NamedTuple):
    """Chosen or rejected side of every comparison, on its slot [B, T]; elsewhere placeholders that
    keep all losses finite."""

    logp: jax.Array
    ref_logp: jax.Array
    length: jax.Array
    present: jax.Array
    """bool: True if the slot has this side."""


def preference_loss(model, batch: Batch, objective: PreferenceObjective, impl: str = "auto"):
    """Sum losses over the slots of rows [B, T]: {"preference": ..., "nll": ...}, and metrics.

    batch: weights and streams of comparisons.pairs.PairTrees, `owner`; stream `ref_logp` with a
    reference; streams of method.CONSTANTS if a loss needs them. "nll" is present if `weights` has
    it.
    """
    hidden_BTD, target_BT = predictions(model, batch)
    head_VD = model.head()
    gather = functools.partial(gather_logp, softcap=model.logit_softcap, impl=impl)
    scores = gather(hidden_BTD, head_VD, target_BT)
    fixed_BTD = jax.lax.stop_gradient(hidden_BTD)
    peak_BT = None
    if objective.weighted:
        # log sum_v p_v^2 = lse(2 x) - 2 lse(x), by the same op at temperature 1/2.
        head = jax.lax.stop_gradient(head_VD)
        doubled = gather(fixed_BTD, head, target_BT, temperature=0.5)
        peak_BT = jax.lax.stop_gradient(doubled.lse - 2 * scores.lse)
    sums, metrics = preference_terms(scores.logp, batch, objective, peak_BT)
    # The mean logit over the vocabulary (before a softcap) is a product with the mean of the head,
    # which avoids logits [B, T, V].
    head_D = jnp.mean(jax.lax.stop_gradient(head_VD).astype(scores.logp.dtype), axis=0)
    logit_BT = jnp.einsum("BTD,D->BT", fixed_BTD.astype(head_D.dtype), head_D)
    return sums, {**metrics, **describe_tokens(logit_BT, scores.entropy, batch)}


def preference_terms(logp_BT, batch: Batch, objective: PreferenceObjective, peak_BT=None):
    """Compute the terms of preference_loss from the policy's log-probs [B, T].

    peak_BT: log of the sum of squared probabilities of each token's distribution, for WPO.
    """
    dtype = logp_BT.dtype
    weight_BT = batch.weights["preference"].astype(dtype)
    slot_BT = weight_BT != 0
    chosen, rejected = read_sides(logp_BT, batch, objective)
    measure_chosen, measure_rejected = (measures_of(side, objective) for side in (chosen, rejected))
    both_BT = slot_BT & chosen.present & rejected.present
    streams = {name: value.astype(dtype) for name, value in batch.streams.items()}

    loss_BT, metrics = jnp.zeros_like(weight_BT), {}
    for name, factor in objective.losses:
        preset = PRESETS[name]
        if preset.link == "none":
            continue
        if name in OF_LABELS:
            terms = LABEL_LINKS[preset.link](chosen, rejected, objective, streams)
            good_BT, bad_BT = objective.desirable * terms[0], objective.undesirable * terms[1]
            part_BT = jnp.where(chosen.present, good_BT, jnp.where(rejected.present, bad_BT, 0.0))
        else:
            measured = SideMeasures(
                measure_chosen(preset.measure), measure_rejected(preset.measure), chosen, rejected
            )
            part_BT = jnp.where(both_BT, LINKS[preset.link](measured, objective, streams), 0.0)
        loss_BT += factor * part_BT
        if len(objective.losses) > 1:
            metrics[f"loss/{name}"] = _mean(part_BT, slot_BT, weight_BT)
    if objective.weighted:
        assert peak_BT is not None, "WPO needs the distributions' sharpness"
        likely_BT = wpo_weight(logp_BT, peak_BT, batch)
        metrics["wpo/weight"] = _mean(likely_BT, slot_BT, weight_BT)
        loss_BT *= likely_BT
    sums = {"preference": jnp.sum(jnp.where(slot_BT, weight_BT * loss_BT, 0.0))}
    if "nll" in batch.weights:
        nll_BT = batch.weights["nll"].astype(dtype)
        sums["nll"] = -jnp.sum(jnp.where(nll_BT != 0, nll_BT * logp_BT, 0.0))
        metrics["nll_loss"] = (jax.lax.stop_gradient(sums["nll"]), jnp.sum(nll_BT))
    pair_metrics = describe_pairs(
        chosen, rejected, measure_chosen, measure_rejected, slot_BT, objective
    )
    if any(name == "kto" for name, _ in objective.losses):
        pair_metrics["kl"] = _mean(streams["kto"], slot_BT)
    return sums, {**pair_metrics, **metrics}


def read_sides(logp_BT, batch: Batch, objective: PreferenceObjective) -> tuple[Side, Side]:
    """Return (chosen, rejected) of every slot: sums by branch, fetched from where the slot
    points."""
    dtype = logp_BT.dtype
    mask_BT = batch.weights["score"] != 0
    share_BT = batch.streams["share"].astype(dtype) if "share" in batch.streams else 1.0
    count_BT = segment_sum(jnp.ones_like(logp_BT), mask_BT, batch.owner)
    pi_BT = segment_sum(logp_BT * share_BT, mask_BT, batch.owner)
    ref_BT = jnp.zeros_like(pi_BT)
    if objective.reference:
        ref_BT = segment_sum(
            batch.streams["ref_logp"].astype(dtype) * share_BT, mask_BT, batch.owner
        )
    slot_BT = batch.weights["preference"] != 0

    def side(name: str) -> Side:
        fetch, here_BT = point(batch.streams[name], slot_BT)
        numbers = ((pi_BT, -1.0), (ref_BT, -1.0), (jnp.maximum(count_BT, 1.0), 1.0))
        return Side(*(jnp.where(here_BT, fetch(v), default) for v, default in numbers), here_BT)

    return side("chosen"), side("rejected")


def point(distance_BT, slot_BT) -> tuple[Callable, jax.Array]:
    """Return (function that fetches values [B, T] from where the slots point, bool: slot
    points)."""
    index_BT = jnp.arange(distance_BT.shape[1], dtype=distance_BT.dtype) + distance_BT
    here_BT = slot_BT & (index_BT >= 0)
    inside_BT = jnp.where(here_BT, index_BT, 0)
    return lambda values_BT: jnp.take_along_axis(values_BT, inside_BT, axis=1), here_BT


def measures_of(side: Side, objective: PreferenceObjective) -> Callable[[str], jax.Array]:
    """Return a function that computes a side's measures by name."""

    def measure(name: str) -> jax.Array:
        mean_BT = side.logp / side.length
        match name:
            case "ratio":
                return side.logp - side.ref_logp
            case "score":
                return f_score(side.logp - side.ref_logp, objective)
            case "mean_score":
                return f_score(side.logp - side.ref_logp, objective) / side.length
            case "sum":
                return alpha_reward(side.logp, objective.alpha)
            case "mean":
                return alpha_reward(mean_BT, objective.alpha)
            case "odds":
                return log_odds(mean_BT)
        raise AssertionError(name)

    return measure


def f_score(ratio, objective: PreferenceObjective):
    """Apply the derivative of the f-divergence to a log-ratio, minus its value at ratio 0."""
    match objective.divergence:
        case "reverse_kl":
            return ratio
        case "forward_kl":
            return -jnp.expm1(jnp.minimum(-ratio, EXP_LIMIT))
        case "js":
            return math.log(2.0) + jax.nn.log_sigmoid(ratio)
    power = objective.divergence_alpha - 1.0
    if abs(power) < 1e-6:
        return ratio
    return jnp.expm1(jnp.minimum(power * ratio, EXP_LIMIT)) / power


def alpha_reward(value, alpha: float):
    """Return AlphaPO's reward (1 - p^-alpha) / alpha of a log-prob; its limit at 0 is the
    log-prob."""
    if alpha == 0:
        return value
    return -jnp.expm1(jnp.minimum(-alpha * value, EXP_LIMIT)) / alpha


def log_odds(mean_logp):
    """Return log(p / (1 - p)) of a mean log-prob.

    log(1 - p) is computed as log1p(-p) for small p and log(-expm1(log p)) else, because each form
    cancels where the other is accurate.
    """
    safe = jnp.minimum(mean_logp, -MIN_ODDS)
    small = safe < -math.log(2.0)
    # Both branches get safe inputs: `where` alone would let NaN gradients of the unused one
    # through.
    below = jnp.log1p(-jnp.exp(jnp.where(small, safe, -1.0)))
    above = jnp.log(-jnp.expm1(jnp.where(small, -0.1, safe)))
    return safe - jnp.where(small, below, above)


class SideMeasures(NamedTuple):
    """Inputs of a link: the measures of both sides [B, T], and the sides."""

    chosen: jax.Array
    rejected: jax.Array
    chosen_side: Side
    rejected_side: Side

    @property
    def gap(self) -> jax.Array:
        """Difference d = u+ - u-."""
        return self.chosen - self.rejected


def logistic(gap, objective: PreferenceObjective):
    """Return the two-sided logistic loss of a difference."""
    z = objective.beta * gap - objective.gamma
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return -(1.0 - objective.epsilon) * yes - objective.epsilon * no


def robust(pair: SideMeasures, o: PreferenceObjective, streams):
    """Return the robust DPO loss, unbiased if a share epsilon of the pairs is swapped."""
    z = o.beta * pair.gap
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return (-(1.0 - o.epsilon) * yes + o.epsilon * no) / (1.0 - 2.0 * o.epsilon)


def exo(pair: SideMeasures, o: PreferenceObjective, streams):
    """Return the KL from the policy's choice to the smoothed label."""
    z = o.beta * pair.gap
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return jnp.exp(yes) * (yes - math.log1p(-o.epsilon)) + jnp.exp(no) * (no - math.log(o.epsilon))


def nca(pair: SideMeasures, o: PreferenceObjective, streams):
    """Compare each side with 0, so that the chosen answer's likelihood does not fall."""
    up, down = o.beta * pair.chosen, o.beta * pair.rejected
    both_down = jax.nn.log_sigmoid(-up) + jax.nn.log_sigmoid(-down)
    return -jax.nn.log_sigmoid(up) - 0.5 * both_down


def bco(pair: SideMeasures, o: PreferenceObjective, streams):
    """Return the loss of a classifier of good and bad answers."""
    return -jax.nn.log_sigmoid(o.beta * pair.chosen) - jax.nn.log_sigmoid(-o.beta * pair.rejected)


def sppo(pair: SideMeasures, o: PreferenceObjective, streams):
    """Move both sides towards their win rates of 1 and 0."""
    return (pair.chosen - 0.5 / o.beta) ** 2 + (pair.rejected + 0.5 / o.beta) ** 2


def aot(pair: SideMeasures, o: PreferenceObjective, streams):
    """Compare the policy's margin with the reference's margin of the same rank in the step.

    stream "aot": margin of the pair whose rank among the reference's margins equals this pair's
    rank among the policy's.
    """
    return logistic(pair.chosen_side.logp - pair.rejected_side.logp - streams["aot"], o)


def aot_unpaired(pair: SideMeasures, o: PreferenceObjective, streams):
    """Compare the chosen log-ratio with the rejected one of the same rank in the step.

    streams "aot_chosen", "aot_rejected": log-ratios matched to the pair's chosen and rejected
    answer. Each difference occurs twice, once from either side: its value counts once, and each
    side gets its own gradient.
    """
    up = logistic(pair.chosen - streams["aot_chosen"], o)
    down = logistic(streams["aot_rejected"] - pair.rejected, o)
    return up + down - jax.lax.stop_gradient(down)


def apo_down(pair: SideMeasures, o: PreferenceObjective, streams):
    """Lower the chosen answer's likelihood, and the rejected one's more."""
    ratio = pair.chosen_side.logp - pair.chosen_side.ref_logp
    return jax.nn.sigmoid(o.beta * ratio) + 1.0 - jax.nn.sigmoid(o.beta * pair.gap)


def discopop(pair: SideMeasures, o: PreferenceObjective, streams):
    """Mix the logistic and exponential loss by a gate."""
    z = o.beta * pair.gap
    gate = jax.nn.sigmoid(z / o.discopop_tau)
    steep = jnp.exp(jnp.minimum(-z, EXP_LIMIT))
    return -(1.0 - gate) * jax.nn.log_sigmoid(z) + gate * steep


LINKS: dict[str, Callable[[SideMeasures, PreferenceObjective, dict[str, jax.Array]], jax.Array]] = {
    "logistic": lambda pair, o, streams: logistic(pair.gap, o),
    "hinge": lambda pair, o, streams: jax.nn.relu(1.0 - o.beta * pair.gap),
    "square": lambda pair, o, streams: (pair.gap - 0.5 / o.beta) ** 2,
    "odds": lambda pair, o, streams: -o.beta * jax.nn.log_sigmoid(pair.gap),
    "apo_zero": lambda pair, o, streams: (
        1.0 - jax.nn.sigmoid(o.beta * pair.chosen) + jax.nn.sigmoid(o.beta * pair.rejected)
    ),
    "robust": robust,
    "exo": exo,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_down": apo_down,
    "discopop": discopop,
}
"""Losses of a pair by link."""


def kto(chosen: Side, rejected: Side, o: PreferenceObjective, streams):
    """Compare answers with KTO's baseline; stream "kto": the baseline, a mean over the whole step
    that is at least 0."""
    base = streams["kto"]
    up = o.beta * (chosen.logp - chosen.ref_logp - base)
    down = o.beta * (base - (rejected.logp - rejected.ref_logp))
    return 1.0 - jax.nn.sigmoid(up), 1.0 - jax.nn.sigmoid(down)


def apo_zero_unpaired(chosen: Side, rejected: Side, o: PreferenceObjective, streams):
    """Compare answers with 0 instead of KTO's baseline."""
    up, down = (
        o.beta * (chosen.logp - chosen.ref_logp),
        o.beta * (rejected.logp - rejected.ref_logp),
    )
    return 1.0 - jax.nn.sigmoid(up), jax.nn.sigmoid(down)


LABEL_LINKS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "kto": kto,
    "apo_zero": apo_zero_unpaired,
}
"""Losses of a desirable and an undesirable answer by link."""


def wpo_weight(logp_BT, peak_BT, batch: Batch):
    """Return WPO's weight of each slot, the product of exp(mean_t (logp_t - log sum_v p_v^2)) of
    its sides, without gradient."""
    mask_BT = batch.weights["score"] != 0
    sharp_BT = segment_sum(jax.lax.stop_gradient(logp_BT) - peak_BT, mask_BT, batch.owner)
    count_BT = segment_sum(jnp.ones_like(sharp_BT), mask_BT, batch.owner)
    log_BT = sharp_BT / jnp.maximum(count_BT, 1.0)
    slot_BT = batch.weights["preference"] != 0
    total_BT = jnp.zeros_like(log_BT)
    for name in ("chosen", "rejected"):
        fetch, here_BT = point(batch.streams[name], slot_BT)
        total_BT += jnp.where(here_BT, fetch(log_BT), 0.0)
    return jnp.exp(total_BT)


def describe_pairs(
    chosen: Side,
    rejected: Side,
    measure_chosen,
    measure_rejected,
    slot_BT,
    objective: PreferenceObjective,
) -> dict[str, Any]:
    """Return TRL's metrics of comparisons as (sum, weight); rewards are beta times the measure,
    ignoring the divergence."""
    both_BT = chosen.present & rejected.present
    up, down = (
        objective.beta * measure(objective.measure)
        for measure in (measure_chosen, measure_rejected)
    )
    means = objective.measure == "mean"
    logps = [side.logp / side.length if means else side.logp for side in (chosen, rejected)]
    metrics = {
        "rewards/chosen": _mean(up, chosen.present),
        "rewards/rejected": _mean(down, rejected.present),
        "rewards/accuracies": _mean(up > down, both_BT),
        "rewards/margins": _mean(up - down, both_BT),
        "logps/chosen": _mean(logps[0], chosen.present),
        "logps/rejected": _mean(logps[1], rejected.present),
    }
    if any(name == "orpo" for name, _ in objective.losses):
        gap_BT = measure_chosen("odds") - measure_rejected("odds")
        metrics["log_odds_chosen"] = _mean(gap_BT, both_BT)
        metrics["log_odds_ratio"] = _mean(jax.nn.log_sigmoid(gap_BT), both_BT)
    return metrics


def describe_tokens(logit_BT, entropy_BT, batch: Batch) -> dict[str, Any]:
    """Return means over tokens of answers: logits by side, entropy."""
    mask_BT = batch.weights["score"] != 0
    slot_BT = batch.weights["preference"] != 0
    sums_BT = segment_sum(jax.lax.stop_gradient(logit_BT), mask_BT, batch.owner)
    counts_BT = segment_sum(jnp.ones_like(logit_BT), mask_BT, batch.owner)
    metrics = {"entropy": _mean(entropy_BT, mask_BT)}
    for name in ("chosen", "rejected"):
        fetch, here_BT = point(batch.streams[name], slot_BT)
        total, count = (jnp.sum(jnp.where(here_BT, fetch(v), 0.0)) for v in (sums_BT, counts_BT))
        metrics[f"logits/{name}"] = (total, count)
    return metrics


def _mean(values_BT, mask_BT, weight_BT=None):
    values_BT = jax.lax.stop_gradient(values_BT)
    weight_BT = (
        jnp.ones(values_BT.shape, jnp.result_type(float)) if weight_BT is None else weight_BT
    )
    kept_BT = jnp.where(mask_BT, weight_BT, 0.0)
    return jnp.sum(jnp.where(mask_BT, values_BT * kept_BT, 0.0)), jnp.sum(kept_BT)
