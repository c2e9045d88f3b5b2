"""Eagle3: a draft of one layer, trained on the states that it feeds itself while decoding."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.batch import NEXT, Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Models, Role
from jaxtrain.core.task import DRAFT, Task
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.anchors import WEIGHTS, count_branches, draw_next
from jaxtrain.methods.drafts.config import Eagle3Task
from jaxtrain.methods.drafts.draft_model import assemble_draft, assemble_target
from jaxtrain.methods.drafts.drafting import (
    TARGET,
    DraftData,
    DraftObjective,
    make_draft_task,
    open_draft_data,
)
from jaxtrain.methods.drafts.eagle3_loss import BRANCHES, COMPONENT, GUESS, Unroll, eagle3_loss
from jaxtrain.methods.drafts.frequency import count_trained, keep_frequent
from jaxtrain.methods.drafts.soft_targets import SoftTargets
from jaxtrain.models.draft import check_capture
from jaxtrain.models.eagle3 import Config as Architecture

Section = Eagle3Task
LARGEST = 32_000
"""Default size of a draft's vocabulary."""
LENGTH = 7
"""Default number of steps of the unroll."""


def open_data(config: Config, tokenizer: Any) -> DraftData:
    """Open sequences as SFT reads them."""
    return open_draft_data(config, tokenizer, label_guesses)


def make(config: Config) -> Task:
    """Build the task: the unrolled draft against its target's distributions."""
    target = assemble_target(config)
    objective = teach(config, target)
    task, draft = make_draft_task(config, target, objective), objective.bundle
    if draft.folder is None and draft.architecture.prunes:
        assert isinstance(task.data, DraftData)
        role = Role(draft, tables=draft_vocabulary(config, draft, task.data))
        return dataclasses.replace(task, roles={**task.roles, DRAFT: role})
    return task


def teach(config: Config, target: ModelBundle) -> DraftObjective:
    """Build the objective of a draft of this target from section task."""
    task = config.task
    assert isinstance(task, Eagle3Task)
    draft = assemble_draft(
        task.draft,
        target,
        Architecture,
        partial(describe_draft, task, target),
        config.model.compute_dtype,
        config.model.attention,
    )
    length = task.length or draft.architecture.length
    numbers = Unroll(length, task.decay, SoftTargets(task.loss, task.kl_scale, task.kl_decay))
    floats = np.float64 if config.model.compute_dtype == "float64" else np.float32
    return DraftObjective(
        bundle=draft,
        loss=partial(loss_of, numbers),
        component=COMPONENT,
        label=label_guesses,
        streams={NEXT: np.int32, BRANCHES: np.int32, GUESS: floats},
        reads_last=True,
    )


def loss_of(numbers: Unroll, models: Models, batch: Batch):
    """Compute the loss of the draft given its target."""
    return eagle3_loss(models[DRAFT], models[TARGET], batch, numbers)


def describe_draft(task: Eagle3Task, target: ModelBundle, sizes: dict[str, Any]) -> Architecture:
    """Return the config of a new draft. Raises UserError for settings that the target rules out."""
    layers, vocab_size = target.architecture.num_hidden_layers, target.architecture.vocab_size
    if "capture" not in sizes:
        sizes["capture"] = (1, layers // 2 - 1, layers - 4)
        if not 1 < sizes["capture"][1] < sizes["capture"][2]:
            raise UserError(
                f"an Eagle3 draft reads layers 1, L / 2 - 1 and L - 4 of its target, which are not"
                f" three different ones for L = {layers}; name layers from 0 to {layers - 1} in"
                " task.draft.target_layers, such as"
                f" {sorted({0, layers // 2, layers - 1})}"
            )
        check_capture(sizes["capture"], layers)
    draft_size = task.draft_vocab_size
    if draft_size is not None and draft_size > vocab_size:
        raise UserError(
            f"task.draft_vocab_size {draft_size} is more than the {vocab_size} tokens of the"
            " target;"
            " lower it, or leave it out"
        )
    sizes["num_hidden_layers"] = 1
    sizes["draft_vocab_size"] = min(LARGEST, vocab_size) if draft_size is None else draft_size
    return Architecture(**sizes, length=task.length or LENGTH)


def draft_vocabulary(
    config: Config, draft: ModelBundle, data: DraftData
) -> Callable[[], Mapping[str, np.ndarray]]:
    """Return a function that computes the table of the draft's ids, counted in the data."""
    task, vocab_size = config.task, draft.architecture.vocab_size
    assert isinstance(task, Eagle3Task)
    size = draft.architecture.draft_vocab_size

    def count() -> np.ndarray:
        counts = count_trained(
            [data.recipe.open(dataset) for dataset in config.data.datasets],
            vocab_size,
            row_tokens=data.row_tokens,
            seed=config.run.seed,
            most=task.vocab_rows,
            num_workers=config.data.num_workers,
            log=data.log,
        )
        if not counts.any():
            raise UserError("no token of the data is trained, so that a draft has nothing to say")
        ids = keep_frequent(counts, size)
        data.log(
            f"the draft can say {size:,} of {vocab_size:,} tokens:"
            f" {counts[ids].sum() / counts.sum():.2%} of the trained ones"
        )
        return ids

    return lambda: {"kept": broadcast_or_raise("the draft's vocabulary", count)}


def label_guesses(batch: Batch, rng: np.random.Generator) -> Batch:
    """Add the streams NEXT, BRANCHES and GUESS, and the loss's denominator, to a batch [A, B,
    T]."""
    branches = count_branches(batch)
    weights, length = batch.weights[WEIGHTS], batch.prev.shape[-1]
    prev = batch.prev.reshape(-1, length)
    rows, tokens = np.nonzero(prev >= 0)
    guess = np.zeros(prev.shape)
    np.add.at(guess, (rows, prev[rows, tokens]), weights.reshape(-1, length)[rows, tokens])
    guess = guess.reshape(weights.shape) / branches
    total = weights.sum(dtype=np.float64)
    denom = np.full(len(batch.tokens), total if total > 0 else 1.0, weights.dtype)
    return batch._replace(
        streams={
            **batch.streams,
            NEXT: draw_next(batch, branches, rng),
            BRANCHES: branches.astype(np.int32),
            GUESS: guess.astype(weights.dtype),
        },
        denoms={**batch.denoms, COMPONENT: denom},
    )
