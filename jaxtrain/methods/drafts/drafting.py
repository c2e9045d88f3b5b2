"""Shared parts of the methods that train a draft: roles, data, per-batch draws.

    rows ─> sequences, as SFT reads them, with enough to guess     data.py
         ─> prepare: draws on the host, by seed and step           anchors.py
    step: target ── states of the captured layers ──> draft ──> loss      target_states.py

The states come from the step itself, or from a stage that runs ahead of it (target_stages.py,
prefetch.py: the stage waits while its queue is full, training while it is empty). The target is
never trained; only the draft is written at the end.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Models, Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import DRAFT, Round, Task
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.config import DraftTask
from jaxtrain.methods.drafts.data import DraftSequences
from jaxtrain.methods.drafts.draft_model import borrowed_parts
from jaxtrain.methods.drafts.prefetch import CaptureStage, PrefetchedRounds
from jaxtrain.methods.drafts.stored_states import StoredStates
from jaxtrain.methods.drafts.target_stages import open_stage
from jaxtrain.methods.offline import OfflineData, OfflineRounds, check_packing
from jaxtrain.models.capabilities import follows_trees

TARGET = "target"
"""Role of the target; the other role is DRAFT."""

Label = Callable[[Batch, np.random.Generator], Batch]
"""Adds a method's streams to a batch [A, B, T] before its step; the generator is its only source of
randomness."""


@dataclass(frozen=True, kw_only=True)
class DraftObjective:
    """A draft with its loss and labels, independent of where batches come from: the result of a
    method's `teach(config, target)`, for runs that train a draft and for those that refresh one."""

    bundle: ModelBundle
    """The draft."""
    loss: Callable[[Models, Batch], tuple[dict[str, Any], dict[str, Any]]]
    """Loss as in Task.loss, of DRAFT and TARGET."""
    component: str
    """The loss's one component."""
    label: Label
    streams: Mapping[str, Any]
    """Dtypes of the streams that `label` adds."""
    reads_last: bool = False
    """True if the loss reads the target's final-normed states, too."""


class DraftData(OfflineData):
    """A `core.task.Data` of rows, with the method's draws in each batch."""

    def __init__(
        self,
        config: Config,
        recipe: DraftSequences,
        label: Label,
        stage: CaptureStage | None = None,
    ):
        """stage: who adds the target's states; None: the step makes them."""
        super().__init__(config, recipe)
        self.label, self.stage = label, stage

    @property
    def states(self) -> Mapping[str, Any]:
        """Dtypes of the streams that the stage adds."""
        return {} if self.stage is None else self.stage.streams

    @override
    def check(self) -> Iterator[str]:
        yield from super().check()
        if self.stage is not None and (line := self.stage.check(self)):
            yield line

    @override
    def open(self, bundle: ModelBundle, log: Callable[[str], None]) -> OfflineRounds:
        rounds = super().open(bundle, log)
        if self.stage is None:
            return rounds
        assert isinstance(self.config.task, DraftTask)
        return PrefetchedRounds(rounds, self.stage, self.config.task.target.queue, log)

    @override
    def describe(self, console: Console) -> None:
        super().describe(console)
        if isinstance(self.stage, StoredStates):
            try:
                console.print(self.stage.check(self), markup=False)
            except UserError as error:
                console.print(f"not yet: {error}", markup=False)
        elif self.stage is not None:
            console.print(self.stage.describe(self.row_tokens), markup=False)

    def prepare(self, round: Round, scorer: Scorer) -> Round:
        """Label the batches of a round (Task.prepare). The draw is a function of run.seed and the
        step, and the same every time for held-out batches."""
        seed = self.config.run.seed
        rng = np.random.default_rng([seed, 0] if round.held_out else [seed, 1, round.version])
        batches = [self.label(batch, rng) for batch in round.batches]
        if round.held_out and self.stage is not None:
            batches = [self.stage.fill(batch) for batch in batches]
        return round._replace(batches=batches)


def open_draft_data(
    config: Config,
    tokenizer: Any,
    label: Label,
    target: Any = None,
    stage: CaptureStage | None = None,
) -> DraftData:
    """Open the data of a task that trains a draft; target: its architecture, if known; stage: from
    target_stages.open_stage."""
    task = config.task
    assert isinstance(task, DraftTask)
    trees = config.data.share_prefixes and (target is None or follows_trees(target))
    recipe = DraftSequences(config.data, tokenizer, task.min_loss_tokens, trees)
    return DraftData(config, recipe, label, stage)


def make_draft_task(config: Config, target: ModelBundle, objective: DraftObjective) -> Task:
    """Build the task of a run that trains a draft on section data."""
    stage = open_stage(config, target, objective.bundle, last=objective.reads_last)
    data = open_draft_data(config, target.tokenizer, objective.label, target.architecture, stage)
    return Task(
        roles=draft_roles(config, target, objective.bundle),
        loss=objective.loss,
        coef={objective.component: 1.0},
        data=data,
        prepare=data.prepare,
        prepared={**objective.streams, **data.states},
    )


def draft_roles(config: Config, target: ModelBundle, draft: ModelBundle) -> dict[str, Role]:
    """Return the roles of a task that trains a draft. Raises UserError for rows that the target
    cannot read."""
    check_packing(config, target.architecture)
    assert isinstance(config.task, DraftTask)
    if config.task.target.source != "step":
        target = borrowed_parts(target)
    return {DRAFT: Role(draft), TARGET: Role(target, "own")}
