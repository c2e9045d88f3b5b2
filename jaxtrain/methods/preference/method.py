"""Preference methods: compared answers, or answers labeled good or bad (docs/preferences.md).

A prompt with its answers is a tree. This module builds the loss, the reference, and the values that
comparisons of a step need from each other before the update.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.data.comparisons.pairs import (
    CHOSEN,
    NLL,
    PREFERENCE,
    REJECTED,
    SCORE,
    SHARE,
    PairTrees,
)
from jaxtrain.data.comparisons.preferences import Preferences
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.methods.offline import OfflineData, open_images
from jaxtrain.methods.preference.config import PreferenceTask
from jaxtrain.methods.preference.cross_batch_stats import at_same_rank, mismatch, sum_sides
from jaxtrain.methods.preference.loss import PreferenceObjective, preference_loss
from jaxtrain.methods.preference.precomputed import Precomputed
from jaxtrain.methods.reference_model import REFERENCE, find_reference, mixing
from jaxtrain.models.capabilities import require_trees

Section = PreferenceTask
CONSTANTS = {"kto": ("kto",), "aot": ("aot",), "aot_unpaired": ("aot_chosen", "aot_rejected")}
"""Streams of values that a loss needs from other comparisons of a step."""


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Open prompts with compared or labeled answers."""
    task = config.task
    assert isinstance(task, PreferenceTask)
    build = PairTrees(
        task.share_prompts,
        nll=task.resolved("nll_on") if task.nll_weight else "none",
        tail=task.ld_alpha,
        average=task.average,
    )
    fields = read_fields(task, config.model.compute_dtype)
    # KTO's answers behind other prompts, and a table keyed by tokens, do not follow images.
    if "kto" not in task.names and reads_reference(task) != "precomputed":
        rows = task.max_packed_tokens or 2 * config.data.sequence_len
        fields = replace(fields, images=open_images(config, tokenizer, rows))
    recipe = Preferences(
        config.data,
        tokenizer,
        build,
        fields,
        "labels" if task.of_labels else "pairs",
        row_tokens=task.max_packed_tokens,
        units=task.units_per_step,
    )
    return OfflineData(config, recipe)


def make(config: Config) -> Task:
    """Build the task: policy, reference if needed, loss, and preparation of steps."""
    task = config.task
    assert isinstance(task, PreferenceTask)
    bundle = build_model_bundle(config)
    reason = "task.kind preference puts the answers to a prompt into one row"
    require_trees(bundle.architecture, reason, 'train good answers with task.kind "sft"')
    roles = {POLICY: Role(bundle)}
    kind = reads_reference(task)
    weights = None
    if kind not in ("none", "precomputed"):
        weights = find_reference(kind, bundle.adapter)
        roles[REFERENCE] = Role(bundle, weights, in_loss=False)
    data = open_data(config, bundle.tokenizer)
    reference: Reference = ask_reference
    if kind == "precomputed":
        reference = Precomputed(config, bundle, data)
    loss = partial(preference_loss, objective=read_objective(task), impl=config.model.logp)
    return Task(
        roles=roles,
        loss=of_policy(loss),
        compiles_ahead=True,
        coef=preference_coef(task),
        data=data,
        prepare=PreferencePreparation(task, config, data, reference),
        varying_microsteps=task.units_per_step is not None,
        after_round=mixing(weights, task.reference_every, task.reference_alpha),
    )


def reads_reference(task: PreferenceTask) -> str:
    """Return task.reference, or "none" if no loss needs a reference."""
    return task.reference if task.needs_reference else "none"


def preference_coef(task: PreferenceTask) -> dict[str, float]:
    """Return the factor of each component; weights of several losses are in the objective."""
    return {"preference": 1.0, **({"nll": task.nll_weight} if task.nll_weight else {})}


def read_fields(task: PreferenceTask, compute_dtype: str) -> Fields:
    """Return the weights and streams of every batch."""
    dtype = np.float64 if compute_dtype == "float64" else np.float32
    streams: dict[str, Any] = {CHOSEN: np.int32, REJECTED: np.int32}
    if task.ld_alpha is not None:
        streams[SHARE] = dtype
    if reads_reference(task) != "none":
        streams["ref_logp"] = dtype
    for name in constants(task):
        streams[name] = dtype
    components = (PREFERENCE, SCORE, *([NLL] if task.nll_weight else []))
    return Fields(components, streams, dtype=dtype)


def constants(task: PreferenceTask) -> list[str]:
    """List the streams of values that the losses need from other comparisons of a step."""
    return [stream for name in task.names for stream in CONSTANTS.get(name, ())]


def read_objective(task: PreferenceTask) -> PreferenceObjective:
    """Build the objective from the config."""
    return PreferenceObjective(
        losses=tuple(task.losses),
        beta=task.resolved("beta"),
        epsilon=task.resolved("label_smoothing"),
        divergence=task.f_divergence,
        divergence_alpha=task.f_alpha,
        gamma=task.resolved("simpo_gamma"),
        alpha=task.resolved("alphapo_alpha"),
        discopop_tau=task.discopop_tau,
        desirable=task.desirable_weight,
        undesirable=task.undesirable_weight,
        reference=reads_reference(task) != "none",
        weighted=task.use_weighting,
    )


Reference = Callable[[Batch, Scorer], np.ndarray]
"""(batch, scorer) -> the reference's log-probs [A, B, T]."""


def ask_reference(batch: Batch, scorer: Scorer) -> np.ndarray:
    """Score a batch with the current reference weights."""
    return scorer.logp(batch, REFERENCE)


class PreferencePreparation:
    """Preparation of a step before its update: reference log-probs, and constants of the whole
    step.

    All processes compute it equally, from values that all of them receive.
    """

    def __init__(
        self,
        task: PreferenceTask,
        config: Config,
        data: OfflineData,
        reference: Reference = ask_reference,
    ):
        self.task, self.data, self.reference = task, data, reference
        self.kind = reads_reference(task)
        self.buckets = tuple(config.data.length_buckets)

    def __call__(self, round: Round, scorer: Scorer) -> Round:
        """Fill the streams of a round."""
        batches = [self.fill(batch, scorer) for batch in round.batches]
        slots = sum(int(np.count_nonzero(batch.weights[PREFERENCE])) for batch in batches)
        metrics = {**round.metrics, "num_pairs": float(slots)}
        return round._replace(batches=batches, metrics=metrics)

    def fill(self, batch: Batch, scorer: Scorer) -> Batch:
        """Fill the streams of an optimizer step's batch."""
        streams = dict(batch.streams)
        if self.kind != "none":
            streams["ref_logp"] = self.reference(batch, scorer)
        batch = batch._replace(streams=streams)
        names = self.task.names
        if "kto" in names:
            base = self.baseline(batch, scorer)
            streams["kto"] = np.where(batch.weights[PREFERENCE] != 0, base, 0).astype(
                streams["kto"].dtype
            )
        if "aot" in names or "aot_unpaired" in names:
            streams |= self.ranks(batch, scorer)
        return batch._replace(streams=streams)

    def baseline(self, batch: Batch, scorer: Scorer) -> float:
        """Return KTO's z0: the mean log-ratio of answers after mismatched prompts over the whole
        step, at least 0; 0 if the step has a single prompt."""
        rows = batch.tokens.shape[1]
        shape = StepShape(rows, None, self.data.row_tokens, self.buckets)
        mismatched = mismatch(batch, shape)
        if mismatched is None:
            return 0.0
        policy, reference = (scorer.logp(mismatched, role) for role in (POLICY, REFERENCE))
        mask = mismatched.weights[SCORE] != 0
        total = float(np.sum((policy.astype(np.float64) - reference)[mask]))
        slots = np.count_nonzero(batch.weights[PREFERENCE])
        return max(total / max(int(slots), 1), 0.0)

    def ranks(self, batch: Batch, scorer: Scorer) -> dict[str, np.ndarray]:
        """Return AOT's constants, which match each pair by rank under the current policy."""
        policy = sum_sides(batch, scorer.logp(batch, POLICY))
        ref_logp = batch.streams.get("ref_logp")
        reference = sum_sides(batch, np.zeros(batch.tokens.shape) if ref_logp is None else ref_logp)
        weights, constants = batch.weights[PREFERENCE], {}
        if "aot" in self.task.names:
            margins, ref_margins = (
                policy.chosen - policy.rejected,
                reference.chosen - reference.rejected,
            )
            constants["aot"] = policy.spread(at_same_rank(margins, ref_margins), weights)
        if "aot_unpaired" in self.task.names:
            chosen, rejected = (
                policy.chosen - reference.chosen,
                policy.rejected - reference.rejected,
            )
            constants["aot_chosen"] = policy.spread(at_same_rank(chosen, rejected), weights)
            constants["aot_rejected"] = policy.spread(at_same_rank(rejected, chosen), weights)
        return constants
