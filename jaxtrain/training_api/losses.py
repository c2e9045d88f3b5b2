"""Losses by name: those of Tinker's API, and `jaxtrain:NAME` for the objectives of task.kind rl.

A loss is a sum over places, never a mean: the client divides, through weights or advantages. For
the log-prob lp of a target, that of the sampler q, advantage A and r = exp(lp - q):

    cross_entropy         -w lp
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)
    cispo                 -stop(clip(r)) A lp
    dro                   -(A lp - beta / 2 (lp - q)^2)
    gspo                  as ppo, r that of the sequence: exp(mean of lp - q where the mask is set)

Shapes: B rows, T packed tokens.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.errors import UserError
from jaxtrain.methods.rl.config import OBJECTIVES, RLTask
from jaxtrain.methods.rl.loss import policy_terms
from jaxtrain.text_safety import show

TOTAL = "loss"
"""Only component of these losses."""
TARGETS, WEIGHTS, SAMPLED = "target_tokens", "weights", "logprobs"
ADVANTAGES, MASK = "advantages", "sequence_ratio_mask"
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
OBJECTIVE_PREFIX = "jaxtrain:"
KNOBS = (
    *("ratio", "clip", "epsilon", "epsilon_high", "delta", "m2_threshold", "off_policy_threshold"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "top_entropy_quantile"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""Keys of section task that loss_fn_config may set for `jaxtrain:NAME`."""
REFUSED = {
    "stable_reinforce": "its formula is not published",
    "custom": "losses are not uploaded here; forward_backward_custom computes them in the client",
    f"{OBJECTIVE_PREFIX}m2po_mask": "its mask is made of a whole round of answers",
}
"""Names that are refused, and why."""

Terms = Callable[..., jax.Array]
"""(log-probs [B, T], streams, numbers) -> loss of each place [B, T]."""


@dataclass(frozen=True)
class LossKind:
    """Loss, with its numbers."""

    terms: Terms | None
    """None: a policy's objective, see `make_loss`."""
    required: tuple[str, ...] = (SAMPLED, ADVANTAGES)
    """Inputs beside the targets."""
    optional: tuple[str, ...] = ()
    """Further inputs."""
    config: Mapping[str, float | str] = field(default_factory=dict)
    """Names in loss_fn_config, with the values that count."""
    weight_input: str = ""
    """Input that holds the weights of the places."""
    counts_all: bool = False
    """Without that input all places count, once; else those whose advantage is not 0."""
    shares_trained: bool = False
    """Places of several data that begin alike are one place with the sum of their weights."""


def find_loss(name: str, settings: Mapping[str, float | str]) -> LossKind:
    """Return a loss by its name with the numbers of loss_fn_config; UserError."""
    if name in REFUSED:
        raise UserError(f"loss_fn {show(name)} is not computed here: {REFUSED[name]}")
    if name.startswith(OBJECTIVE_PREFIX) and name.removeprefix(OBJECTIVE_PREFIX) in OBJECTIVES:
        unknown = sorted(set(settings) - set(KNOBS))
        if unknown:
            refuse_setting(unknown[0], name, KNOBS)
        return LossKind(None, optional=(WEIGHTS,), config=dict(settings), weight_input=WEIGHTS)
    if name not in KINDS:
        names = [*KINDS, *(f"{OBJECTIVE_PREFIX}{objective}" for objective in OBJECTIVES)]
        valid_names = ", ".join(name for name in names if name not in REFUSED)
        raise UserError(f"loss_fn {show(name, 60)} is unknown; there are {valid_names}")
    kind = KINDS[name]
    config = dict(kind.config)
    for key, value in settings.items():
        if key not in config:
            refuse_setting(key, name, tuple(config))
        if isinstance(value, str) or not np.isfinite(value):
            raise UserError(f"loss_fn_config.{key} must be a number, not {show(value, 60)}")
        config[key] = value
    for key, value in config.items():
        if isinstance(value, float) and np.isnan(value):
            raise UserError(f"loss_fn_config.{key} is needed: {name} has no default for it")
    return replace(kind, config=config)


def refuse_setting(key: str, name: str, valid_keys: tuple[str, ...]) -> NoReturn:
    """Raise UserError for a name in loss_fn_config that the loss does not read."""
    names = ", ".join(valid_keys) or "nothing"
    raise UserError(f"loss_fn_config.{show(key, 60)} is nothing that {name} reads: {names}")


def make_loss(name: str, kind: LossKind, config: Config) -> Callable:
    """Return the loss `(models, batch [B, T]) -> ({TOTAL: sum}, {"logp": [B, T], ...})`; metrics
    of a policy's objective are (sum, weight) pairs. UserError for settings of no objective."""
    impl = config.model.logp
    if kind.terms is not None:
        terms = functools.partial(kind.terms, numbers=dict(kind.config))

        def simple(models: Mapping[str, Any], batch: Batch):
            (model,) = models.values()
            logp_BT = token_logp(model, batch, impl, drawable=name != "cross_entropy").logp
            weight_BT = batch.weights[TOTAL].astype(logp_BT.dtype)
            counts_BT = weight_BT != 0
            # Where nothing counts a log-prob may be anything, and its gradient must be 0.
            loss_BT = terms(jnp.where(counts_BT, logp_BT, 0.0), batch.streams)
            total = jnp.sum(jnp.where(counts_BT, weight_BT * loss_BT, 0.0))
            return {TOTAL: total}, {"logp": jax.lax.stop_gradient(logp_BT)}

        return simple
    objective = read_policy(name, kind, config)

    def policy(models: Mapping[str, Any], batch: Batch):
        (model,) = models.values()
        scores = token_logp(model, batch, impl, drawable=True)
        renamed = batch._replace(
            weights={"pg": batch.weights[TOTAL]},
            streams={
                "advantage": batch.streams[ADVANTAGES],
                "old_logp": batch.streams[SAMPLED],
                "sampler_logp": batch.streams[SAMPLED],
            },
        )
        sums, metrics = policy_terms(scores.logp, scores.entropy, renamed, objective)
        return {TOTAL: sums["pg"]}, {**metrics, "logp": jax.lax.stop_gradient(scores.logp)}

    return policy


def read_policy(name: str, kind: LossKind, config: Config) -> Any:
    """Return the PolicyObjective of `jaxtrain:NAME` or gspo; UserError."""
    from jaxtrain.methods.rl.method import read_objective

    knobs = dict(kind.config)
    if name == "gspo":
        low, high = (float(knobs.pop(key)) for key in CLIP)
        knobs |= {"epsilon": 1.0 - low, "epsilon_high": high - 1.0}
    # The log-probs of a request are the sampler's.
    section = {"objective": name.removeprefix(OBJECTIVE_PREFIX), "old_logp": "sampler", **knobs}
    try:
        task = RLTask.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"loss_fn_config.{key}: {first['msg']}") from None
    sampling = config.sampling.model_copy(update={"temperature": 1.0})
    return read_objective(task, config.model_copy(update={"sampling": sampling}))


def _cross_entropy(logp_BT, streams, numbers):
    return -logp_BT


def _ratio(logp_BT, streams):
    return jnp.exp(logp_BT - streams[SAMPLED])


def _importance_sampling(logp_BT, streams, numbers):
    return -_ratio(logp_BT, streams) * streams[ADVANTAGES]


def _ppo(logp_BT, streams, numbers):
    ratio_BT, advantage_BT = _ratio(logp_BT, streams), streams[ADVANTAGES]
    clipped_BT = jnp.clip(ratio_BT, *(numbers[key] for key in CLIP))
    return -jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)


def _cispo(logp_BT, streams, numbers):
    clipped_BT = jnp.clip(_ratio(logp_BT, streams), *(numbers[key] for key in CLIP))
    return -jax.lax.stop_gradient(clipped_BT) * streams[ADVANTAGES] * logp_BT


def _dro(logp_BT, streams, numbers):
    drift_BT = logp_BT - streams[SAMPLED]
    return -(logp_BT * streams[ADVANTAGES] - 0.5 * numbers["beta"] * drift_BT**2)


GSPO = {
    "clip_low_threshold": 1.0 - OBJECTIVES["gspo"]["epsilon"],
    "clip_high_threshold": 1.0 + OBJECTIVES["gspo"]["epsilon_high"],
}
KINDS = {
    "cross_entropy": LossKind(
        _cross_entropy, (), (WEIGHTS,), {}, WEIGHTS, counts_all=True, shares_trained=True
    ),
    "importance_sampling": LossKind(_importance_sampling),
    "ppo": LossKind(_ppo, config=CLIP),
    "cispo": LossKind(_cispo, config=CLIP),
    "dro": LossKind(_dro, config={"beta": float("nan")}, counts_all=True),
    "gspo": LossKind(None, (SAMPLED, ADVANTAGES, MASK), (), GSPO, MASK),
}
