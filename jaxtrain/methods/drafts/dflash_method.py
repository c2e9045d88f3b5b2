"""DFlash: a draft that guesses a block of tokens in one pass, trained with a frozen target.

step: target ── states of the captured layers ──> draft: blocks at anchors ──> loss
anchors: trained tokens, drawn anew in every step by run.seed (anchors.py)
"""

from functools import partial
from typing import Any

import numpy as np

from jaxtrain.batch import ANCHOR, NEXT, Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Models
from jaxtrain.core.task import DRAFT, Task
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.anchors import lay_blocks
from jaxtrain.methods.drafts.config import DFlashTask
from jaxtrain.methods.drafts.dflash_loss import COMPONENT, DFlashLossOptions, dflash_loss
from jaxtrain.methods.drafts.draft_model import assemble_draft, assemble_target, find_mask_token
from jaxtrain.methods.drafts.drafting import (
    TARGET,
    DraftData,
    DraftObjective,
    Label,
    make_draft_task,
    open_draft_data,
)
from jaxtrain.models import dflash

Section = DFlashTask
NUM_LAYERS = 5
"""Default number of layers of a draft."""
BLOCK_SIZE = 16
"""Default number of tokens of a block."""


def open_data(config: Config, tokenizer: Any) -> DraftData:
    """Open documents, conversations and prompts with answers that have enough trained tokens."""
    task = config.task
    assert isinstance(task, DFlashTask)
    return open_draft_data(config, tokenizer, make_label(task, task.block_size or BLOCK_SIZE))


def make(config: Config) -> Task:
    """Build the task: the draft, its target, and the loss of the draft's guesses."""
    target = assemble_target(config)
    return make_draft_task(config, target, teach(config, target))


def teach(config: Config, target: ModelBundle) -> DraftObjective:
    """Build the objective of a draft of this target from section task."""
    task = config.task
    assert isinstance(task, DFlashTask)
    draft = open_draft(config, task, target)
    numbers = DFlashLossOptions(
        min(task.num_anchors, config.data.sequence_len), task.decay, task.weighting, task.alpha
    )
    return DraftObjective(
        bundle=draft,
        loss=partial(guess, numbers=numbers, impl=config.model.logp),
        component=COMPONENT,
        label=make_label(task, draft.architecture.block_size),
        streams={ANCHOR: np.int32, NEXT: np.int32},
    )


def guess(models: Models, batch: Batch, numbers: DFlashLossOptions, impl: str):
    """Compute the loss of the draft given its target."""
    return dflash_loss(models[DRAFT], models[TARGET], batch, numbers, impl)


def make_label(task: DFlashTask, block_size: int) -> Label:
    """Return the function that draws the blocks of a batch."""
    by_block = task.weighting != "decay"
    return partial(
        lay_blocks,
        num_anchors=task.num_anchors,
        block_size=block_size,
        decay=task.decay,
        component=COMPONENT,
        by_block=by_block,
    )


def open_draft(config: Config, task: DFlashTask, target: ModelBundle) -> ModelBundle:
    """Build the bundle of the draft. Raises UserError if it does not fit the target or the
    section."""
    section = task.draft

    def new(sizes: dict[str, Any]) -> dflash.Config:
        count = sizes.setdefault("num_hidden_layers", NUM_LAYERS)
        types = section.layer_types
        if types is not None and len(types) != count:
            raise UserError(
                f"task.draft.layer_types has {len(types)} entries, the draft {count} layers"
                " (task.draft.num_layers); make them as many"
            )
        spread = dflash.spread_layers(target.architecture.num_hidden_layers, count)
        sizes.setdefault("capture", spread)
        mask = find_mask_token(section, target.tokenizer, sizes["vocab_size"])
        return dflash.Config(
            **sizes,
            mask_token_id=mask,
            block_size=task.block_size or BLOCK_SIZE,
            attention_bias=section.attention_bias,
            layer_types=tuple(types or ["full_attention"] * count),
            use_sliding_window=section.sliding_window is not None,
            sliding_window=section.sliding_window,
            max_window_layers=count,
        )

    compute, impl = config.model.compute_dtype, config.model.attention
    bundle = assemble_draft(section, target, dflash.Config, new, compute, impl)
    if task.block_size not in (None, bundle.architecture.block_size):
        raise UserError(
            f"task.block_size is {task.block_size}, the draft of task.draft.path guesses blocks of"
            f" {bundle.architecture.block_size}; remove it"
        )
    return bundle
