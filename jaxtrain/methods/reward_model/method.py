"""Reward models: a score head, trained on pairs of answers or on labeled steps.

The model starts from a language model, whose head is replaced by a random one, or from a reward
model. Exports are transformers' *ForSequenceClassification or *ForTokenClassification.
"""

from functools import partial
from typing import Any

import numpy as np

from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle, build_model_bundle
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import POLICY, Round, Task, of_policy
from jaxtrain.data.comparisons.pairs import CHOSEN, MARGIN, PREFERENCE, REJECTED, SCORE, PairTrees
from jaxtrain.data.comparisons.preferences import Preferences
from jaxtrain.data.comparisons.stepwise import STEP, Stepwise
from jaxtrain.data.packing.pack import Fields
from jaxtrain.methods.offline import OfflineData, check_packing, open_images
from jaxtrain.methods.reward_model.config import RewardModelTask
from jaxtrain.methods.reward_model.loss import pair_loss, step_loss
from jaxtrain.models.capabilities import require_trees
from jaxtrain.models.scores import KNOWN, ScoreHead, split_architecture

Section = RewardModelTask
HEADS = {
    "pairs": ScoreHead("sequence", ("reward",)),
    "steps": ScoreHead("token", ("wrong", "right")),
}
"""Score heads by task.labels."""


def open_data(config: Config, tokenizer: Any) -> OfflineData:
    """Open pairs of answers, or answers with labeled steps."""
    return _open(config, tokenizer)


def _open(config: Config, tokenizer: Any, note: str = "") -> OfflineData:
    task, data = config.task, config.data
    assert isinstance(task, RewardModelTask)
    dtype = np.float64 if config.model.compute_dtype == "float64" else np.float32
    if task.labels == "steps":
        recipe = Stepwise(
            data,
            tokenizer,
            separator=task.step_separator,
            last_only=task.train_on_last_step_only,
            max_completion=task.max_completion_length,
            dtype=dtype,
            images=open_images(config, tokenizer, data.sequence_len),
        )
    else:
        streams = {CHOSEN: np.int32, REJECTED: np.int32, MARGIN: dtype}
        images = open_images(config, tokenizer, 2 * data.sequence_len)
        fields = Fields((PREFERENCE, SCORE), streams, dtype=dtype, images=images)
        build = PairTrees(share_prompts=task.share_prompts)
        recipe = Preferences(data, tokenizer, build, fields, want="pairs")
    return OfflineData(config, recipe, note)


def make(config: Config) -> Task:
    """Build the task: Bradley-Terry on pairs, or cross-entropy on steps."""
    task = config.task
    assert isinstance(task, RewardModelTask)
    bundle = build_model_bundle(config, score=HEADS[task.labels])
    if task.labels == "pairs":
        reason = 'task.labels "pairs" compares answers that lie in one row'
        require_trees(bundle.architecture, reason, "choose a built-in family")
        loss = partial(pair_loss, center=task.center_rewards_coefficient)
    else:
        check_packing(config, bundle.architecture)
        loss = step_loss
    return Task(
        roles={POLICY: Role(bundle)},
        loss=of_policy(loss),
        compiles_ahead=True,
        coef={PREFERENCE if task.labels == "pairs" else STEP: 1.0},
        data=_open(config, bundle.tokenizer, describe_start(bundle)),
        prepare=count_labels,
    )


def count_labels(round: Round, scorer: Scorer) -> Round:
    """Add the number of pairs or labeled steps to the metrics of a round."""
    counts = {
        name: float(sum(np.count_nonzero(b.weights[component]) for b in round.batches))
        for name, component in (("num_pairs", PREFERENCE), ("num_steps", STEP))
        if component in round.batches[0].weights
    }
    return round._replace(metrics={**round.metrics, **counts})


def describe_start(bundle: ModelBundle) -> str:
    """Describe the head, and problems with the last token of a text in transformers."""
    head, notes = bundle.architecture.score, []
    if head.drawn:
        notes.append(
            "the model is a language model: its head is replaced by a drawn one that scores"
        )
    named = bundle.architecture.to_hf()["architectures"][0]
    if bundle.architecture.vision is not None and named not in KNOWN:
        notes.append(f"transformers has no class {named}: the export is read here alone")
    pad, eos = bundle.tokenizer.pad_token_id, bundle.tokenizer.eos_token_id
    if head.per == "sequence" and pad is None:
        notes.append("the tokenizer has no pad token: transformers will score one text at a time")
    elif head.per == "sequence" and pad == eos:
        notes.append(
            "the tokenizer pads with its eos token: transformers takes the token before it for the"
            " last one of a text and gives other scores; give the tokenizer a pad token of its own"
        )
    return "; ".join(notes)


def find_section(architecture: str) -> dict[str, str]:
    """Return section task for opening a model folder of an architecture; {} for language models."""
    _, per = split_architecture(architecture)
    kind = RewardModelTask.model_fields["kind"].default
    return next(({"kind": kind, "labels": k} for k, head in HEADS.items() if head.per == per), {})
