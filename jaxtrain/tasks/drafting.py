"""What the methods that train a draft model share: roles, data, what is drawn for each batch.

    rows ─> sequences, as SFT reads them, with enough to guess          data/drafts.py
         ─> prepare: what is drawn on the host, by seed and step         data/anchors.py
    step: target ── states of the captured layers ──> draft ──> loss     losses/target_states.py

The target is never trained. What is written at the end is the draft alone.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DraftTask
from jaxtrain.core.assemble import Parts
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import Round
from jaxtrain.data.drafts import DraftSequences
from jaxtrain.models.trees import follows_trees
from jaxtrain.tasks.offline import OfflineData, check_packing

DRAFT, TARGET = "draft", "target"
"""The roles."""

Label = Callable[[Batch, np.random.Generator], Batch]
"""What a method adds to a batch [A, B, T] before its step; all that is random comes from the
generator."""


class DraftData(OfflineData):
    """`core.task.Data` of rows, each batch with what the method draws for it."""

    def __init__(self, config: Config, recipe: DraftSequences, label: Label):
        super().__init__(config, recipe)
        self.label = label

    def prepare(self, round: Round, scorer: Scorer) -> Round:
        """See Task.prepare. The draw is a function of run.seed and the step; of held-out batches it
        is always the same."""
        seed = self.config.run.seed
        rng = np.random.default_rng([seed, 0] if round.held_out else [seed, 1, round.version])
        return round._replace(batches=[self.label(batch, rng) for batch in round.batches])


def open_draft_data(config: Config, tokenizer: Any, label: Label, target: Any = None) -> DraftData:
    """The data of a task that trains a draft; target: its architecture, where it is known."""
    task = config.task
    assert isinstance(task, DraftTask)
    trees = config.data.share_prefixes and (target is None or follows_trees(target))
    recipe = DraftSequences(config.data, tokenizer, task.min_loss_tokens, trees)
    return DraftData(config, recipe, label)


def draft_roles(config: Config, target: Parts, draft: Parts) -> dict[str, Role]:
    """The roles of a task that trains a draft. UserError for rows that the target cannot read."""
    check_packing(config, target.architecture)
    return {DRAFT: Role(draft), TARGET: Role(target, "own")}
