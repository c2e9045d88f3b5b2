"""Preference losses: one core, the scores of a tree's branches, and presets of what is compared.

A branch's score is the sum of its tokens' log-probs, pi, beside the reference's, ref; |y| is how
many there are. A preset names a *measure* u of a branch and a *link*, the loss of u+ (of the chosen
answer) and u- (of the rejected one); beta, epsilon (label smoothing), gamma, alpha are numbers.

    measure  ratio  r = pi - ref          score       s = f(r), f by the f-divergence
             sum    pi                    mean_score  s / |y|
             mean   pi / |y| = l; with alpha (1 - exp(-alpha l)) / alpha
             odds   l - log(1 - exp l)
    link     logistic  -(1 - epsilon) log sigma(z) - epsilon log sigma(-z), z = beta d - gamma
             hinge     max(0, 1 - beta d)          with d = u+ - u-; the others: see LINKS
             square    (d - 1 / (2 beta))^2

Two of them compare with more than the own pair: KTO with the mean log-ratio of answers behind
prompts that are not theirs, AOT with the pair of the same rank in the whole step. What they need of
others comes as constants, in streams of the slots, computed before the update: so accumulation is
exact, and the gradient is that of the whole step (a sort's derivative is its permutation).

Several rejected answers to a prompt are as many pairs, which share its chosen answer; where a loss
has a term of each side alone, the chosen one's counts once in each pair.

Sources: DPO (2305.18290), its label smoothing (cDPO) and robust (2403.00409), hinge (SLiC,
2305.10425), IPO (2310.12036), EXO (2402.00856), NCA (2402.05369), BCO (2404.04656), SPPO
(2405.00675), AOT (2406.05882), APO (2408.06266), DiscoPOP (2406.08414), f-divergences
(2309.16240), WPO (2406.11827), LD-DPO (2409.06411), KTO (2402.01306), ORPO (2403.07691), CPO
(2401.08417), SimPO (2405.14734), AlphaPO (2501.03884); forms and names as in TRL.

Shapes: B rows, T packed tokens; numbers of a comparison stand on its slot (data/comparisons/pairs.py).
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
"""exp() of more would overflow float32."""
LEAST_ODDS = 1e-7
"""How far below 0 a mean log-prob stays, so that its odds are finite."""


class Preset(NamedTuple):
    """What a loss compares, and how."""

    measure: Literal["ratio", "score", "mean_score", "sum", "mean", "odds", "none"]
    link: str
    """A key of LINKS (of pairs) or LABEL_LINKS (of single answers); "none": no comparison."""


PRESETS = {
    "sigmoid": Preset("score", "logistic"),
    "hinge": Preset("score", "hinge"),
    "ipo": Preset("mean_score", "square"),
    "robust": Preset("score", "robust"),
    "exo_pair": Preset("score", "exo"),
    "nca_pair": Preset("score", "nca"),
    "bco_pair": Preset("score", "bco"),
    "sppo_hard": Preset("score", "sppo"),
    "aot": Preset("ratio", "aot"),
    "aot_unpaired": Preset("ratio", "aot_unpaired"),
    "apo_zero": Preset("ratio", "apo_zero"),
    "apo_down": Preset("score", "apo_down"),
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
"""The losses by name."""
OF_LABELS = ("kto", "apo_zero_unpaired")
"""Those that judge single answers; all others compare two."""


@dataclass(frozen=True)
class PreferenceObjective:
    """The numbers of a loss, or of a sum of several; see the module's docstring for the letters."""

    losses: tuple[tuple[str, float], ...] = (("sigmoid", 1.0),)
    """(name in PRESETS, its weight)."""
    beta: float = 0.1
    epsilon: float = 0.0
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = "reverse_kl"
    divergence_alpha: float = 0.5
    gamma: float = 0.0
    alpha: float = 0.0
    """AlphaPO's; 0 leaves the measure as it is."""
    discopop_tau: float = 0.05
    desirable: float = 1.0
    """Weight of desirable single answers."""
    undesirable: float = 1.0
    reference: bool = True
    """Whether the batch has reference log-probs; without them they count as 0."""
    weighted: bool = False
    """Weigh pairs by how likely the policy is to write them (WPO)."""

    @property
    def measure(self) -> str:
        """What rewards in the metrics are beta times of: that of the first loss, with raw
        log-ratios whatever the divergence."""
        measures = [PRESETS[name].measure for name, _ in self.losses]
        first = next((measure for measure in measures if measure != "none"), "ratio")
        return {"score": "ratio", "mean_score": "ratio", "odds": "mean"}.get(first, first)


class Side(NamedTuple):
    """One side of every comparison, on its slot [B, T]; harmless numbers where there is none."""

    pi: jax.Array
    ref: jax.Array
    length: jax.Array
    present: jax.Array
    """bool: whether the slot has this side."""


def preference_loss(model, batch: Batch, objective: PreferenceObjective, impl: str = "auto"):
    """Sums over the slots of rows [B, T]: {"preference": ..., "nll": ...}, and metrics.

    batch: data/pairs.PairTrees' weights and streams, `owner`; stream `ref_logp` with a reference,
    the streams of `constants` where a loss compares with others. "nll" where `weights` has it.
    """
    hidden_BTD, target_BT = predictions(model, batch)
    head_VD = model.head()
    gather = functools.partial(gather_logp, softcap=model.logit_softcap, impl=impl)
    scores = gather(hidden_BTD, head_VD, target_BT)
    fixed_BTD = jax.lax.stop_gradient(hidden_BTD)
    peak_BT = None
    if objective.weighted:
        # log sum_v p_v^2 = lse(2 x) - 2 lse(x): the same op at temperature 1/2.
        head = jax.lax.stop_gradient(head_VD)
        doubled = gather(fixed_BTD, head, target_BT, temperature=0.5)
        peak_BT = jax.lax.stop_gradient(doubled.lse - 2 * scores.lse)
    sums, metrics = preference_terms(scores.logp, batch, objective, peak_BT)
    # The mean over the vocabulary of a token's logits, before a softcap, is one product with the
    # mean of the head.
    head_D = jnp.mean(jax.lax.stop_gradient(head_VD).astype(scores.logp.dtype), axis=0)
    logit_BT = jnp.einsum("BTD,D->BT", fixed_BTD.astype(head_D.dtype), head_D)
    return sums, {**metrics, **describe_tokens(logit_BT, scores.entropy, batch)}


def preference_terms(logp_BT, batch: Batch, objective: PreferenceObjective, peak_BT=None):
    """The same from the policy's log-probs [B, T]; peak_BT: log of the sum of squared
    probabilities of each token's distribution, for WPO."""
    dtype = logp_BT.dtype
    weight_BT = batch.weights["preference"].astype(dtype)
    slot_BT = weight_BT != 0
    better, worse = read_sides(logp_BT, batch, objective)
    chosen, rejected = (as_side(side, objective) for side in (better, worse))
    both_BT = slot_BT & better.present & worse.present
    streams = {name: value.astype(dtype) for name, value in batch.streams.items()}

    loss_BT, metrics = jnp.zeros_like(weight_BT), {}
    for name, factor in objective.losses:
        preset = PRESETS[name]
        if preset.link == "none":
            continue
        if name in OF_LABELS:
            terms = LABEL_LINKS[preset.link](better, worse, objective, streams)
            good_BT, bad_BT = objective.desirable * terms[0], objective.undesirable * terms[1]
            part_BT = jnp.where(better.present, good_BT, jnp.where(worse.present, bad_BT, 0.0))
        else:
            measured = SideMeasures(chosen(preset.measure), rejected(preset.measure), better, worse)
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
    pair_metrics = describe_pairs(better, worse, chosen, rejected, slot_BT, objective)
    if any(name == "kto" for name, _ in objective.losses):
        pair_metrics["kl"] = _mean(streams["kto"], slot_BT)
    return sums, {**pair_metrics, **metrics}


def read_sides(logp_BT, batch: Batch, objective: PreferenceObjective) -> tuple[Side, Side]:
    """(chosen, rejected) of every slot: sums by branch, fetched from where the slot points to."""
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
    """(what fetches values [B, T] from where the slots point to; whether they point anywhere)."""
    index_BT = jnp.arange(distance_BT.shape[1], dtype=distance_BT.dtype) + distance_BT
    here_BT = slot_BT & (index_BT >= 0)
    inside_BT = jnp.where(here_BT, index_BT, 0)
    return lambda values_BT: jnp.take_along_axis(values_BT, inside_BT, axis=1), here_BT


def as_side(side: Side, objective: PreferenceObjective) -> Callable[[str], jax.Array]:
    """A side's measures by name."""

    def measure(name: str) -> jax.Array:
        mean_BT = side.pi / side.length
        match name:
            case "ratio":
                return side.pi - side.ref
            case "score":
                return f_score(side.pi - side.ref, objective)
            case "mean_score":
                return f_score(side.pi - side.ref, objective) / side.length
            case "sum":
                return alpha_reward(side.pi, objective.alpha)
            case "mean":
                return alpha_reward(mean_BT, objective.alpha)
            case "odds":
                return log_odds(mean_BT)
        raise AssertionError(name)

    return measure


def f_score(ratio, objective: PreferenceObjective):
    """A log-ratio as the derivative of an f-divergence sees it, less that of no difference."""
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
    """AlphaPO's reward (1 - p^-alpha) / alpha of a log-prob; its limit at 0 is the log-prob."""
    if alpha == 0:
        return value
    return -jnp.expm1(jnp.minimum(-alpha * value, EXP_LIMIT)) / alpha


def log_odds(mean_logp):
    """log(p / (1 - p)) of a mean log-prob, by whichever form of log(1 - p) keeps its digits."""
    safe = jnp.minimum(mean_logp, -LEAST_ODDS)
    small = safe < -math.log(2.0)
    below = jnp.log1p(-jnp.exp(jnp.where(small, safe, -1.0)))
    above = jnp.log(-jnp.expm1(jnp.where(small, -0.1, safe)))
    return safe - jnp.where(small, below, above)


class SideMeasures(NamedTuple):
    """What a link gets: the measures of both sides [B, T], and the sides."""

    chosen: jax.Array
    rejected: jax.Array
    better: Side
    worse: Side

    @property
    def gap(self) -> jax.Array:
        """d = u+ - u-."""
        return self.chosen - self.rejected


def logistic(gap, objective: PreferenceObjective):
    """The two-sided logistic loss of a difference."""
    z = objective.beta * gap - objective.gamma
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return -(1.0 - objective.epsilon) * yes - objective.epsilon * no


def robust(pair: SideMeasures, o: PreferenceObjective, streams):
    """Unbiased where a share epsilon of the pairs is the wrong way round."""
    z = o.beta * pair.gap
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return (-(1.0 - o.epsilon) * yes + o.epsilon * no) / (1.0 - 2.0 * o.epsilon)


def exo(pair: SideMeasures, o: PreferenceObjective, streams):
    """KL from the policy's choice to the smoothed label."""
    z = o.beta * pair.gap
    yes, no = jax.nn.log_sigmoid(z), jax.nn.log_sigmoid(-z)
    return jnp.exp(yes) * (yes - math.log1p(-o.epsilon)) + jnp.exp(no) * (no - math.log(o.epsilon))


def nca(pair: SideMeasures, o: PreferenceObjective, streams):
    """Each side against 0, so that the chosen answer's likelihood does not fall."""
    up, down = o.beta * pair.chosen, o.beta * pair.rejected
    both_down = jax.nn.log_sigmoid(-up) + jax.nn.log_sigmoid(-down)
    return -jax.nn.log_sigmoid(up) - 0.5 * both_down


def bco(pair: SideMeasures, o: PreferenceObjective, streams):
    """A classifier of good and bad answers."""
    return -jax.nn.log_sigmoid(o.beta * pair.chosen) - jax.nn.log_sigmoid(-o.beta * pair.rejected)


def sppo(pair: SideMeasures, o: PreferenceObjective, streams):
    """Both sides towards their win rates of 1 and 0."""
    return (pair.chosen - 0.5 / o.beta) ** 2 + (pair.rejected + 0.5 / o.beta) ** 2


def aot(pair: SideMeasures, o: PreferenceObjective, streams):
    """The policy's margin against the reference's margin of the same rank in the step.

    stream "aot": that margin, of the pair whose rank among the reference's margins is this pair's
    among the policy's.
    """
    return logistic(pair.better.pi - pair.worse.pi - streams["aot"], o)


def aot_unpaired(pair: SideMeasures, o: PreferenceObjective, streams):
    """The chosen log-ratio against the rejected one of the same rank in the step.

    streams "aot_chosen", "aot_rejected": the log-ratio on the other side of the pair's chosen and
    rejected answer. Each difference is met twice, once from either side: its value counts once,
    and each side gets its own gradient.
    """
    up = logistic(pair.chosen - streams["aot_chosen"], o)
    down = logistic(streams["aot_rejected"] - pair.rejected, o)
    return up + down - jax.lax.stop_gradient(down)


def apo_down(pair: SideMeasures, o: PreferenceObjective, streams):
    """The chosen answer's likelihood falls, the rejected one's more."""
    ratio = pair.better.pi - pair.better.ref
    return jax.nn.sigmoid(o.beta * ratio) + 1.0 - jax.nn.sigmoid(o.beta * pair.gap)


def discopop(pair: SideMeasures, o: PreferenceObjective, streams):
    """Logistic and exponential loss, mixed by a gate."""
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
"""Losses of a pair, by link."""


def kto(better: Side, worse: Side, o: PreferenceObjective, streams):
    """How far an answer is above, or below, the baseline; stream "kto": that baseline, a mean over
    the whole step that is at least 0."""
    base = streams["kto"]
    up = o.beta * (better.pi - better.ref - base)
    down = o.beta * (base - (worse.pi - worse.ref))
    return 1.0 - jax.nn.sigmoid(up), 1.0 - jax.nn.sigmoid(down)


def apo_zero_unpaired(better: Side, worse: Side, o: PreferenceObjective, streams):
    """KTO against 0."""
    up, down = o.beta * (better.pi - better.ref), o.beta * (worse.pi - worse.ref)
    return 1.0 - jax.nn.sigmoid(up), jax.nn.sigmoid(down)


LABEL_LINKS: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "kto": kto,
    "apo_zero": apo_zero_unpaired,
}
"""Losses of a desirable and of an undesirable answer, by link."""


def wpo_weight(logp_BT, peak_BT, batch: Batch):
    """WPO's weight of each slot: the product of its sides' exp(mean_t (logp_t - log sum_v p_v^2)),
    without gradient."""
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
    better: Side, worse: Side, chosen, rejected, slot_BT, objective: PreferenceObjective
) -> dict[str, Any]:
    """TRL's metrics of comparisons as (sum, weight); rewards are beta times the measure, without
    any divergence's shape."""
    both_BT = better.present & worse.present
    up, down = (objective.beta * side(objective.measure) for side in (chosen, rejected))
    means = objective.measure == "mean"
    logps = [side.pi / side.length if means else side.pi for side in (better, worse)]
    metrics = {
        "rewards/chosen": _mean(up, better.present),
        "rewards/rejected": _mean(down, worse.present),
        "rewards/accuracies": _mean(up > down, both_BT),
        "rewards/margins": _mean(up - down, both_BT),
        "logps/chosen": _mean(logps[0], better.present),
        "logps/rejected": _mean(logps[1], worse.present),
    }
    if any(name == "orpo" for name, _ in objective.losses):
        gap_BT = chosen("odds") - rejected("odds")
        metrics["log_odds_chosen"] = _mean(gap_BT, both_BT)
        metrics["log_odds_ratio"] = _mean(jax.nn.log_sigmoid(gap_BT), both_BT)
    return metrics


def describe_tokens(logit_BT, entropy_BT, batch: Batch) -> dict[str, Any]:
    """Means over answers' tokens: logits by side, entropy."""
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
