"""Train a draft further between the rounds of its policy, so that it follows the policy.

    prepare(round) ── keeps the round's batches ──> the method's own
    after_round    ── drawn tokens of these batches, labeled as the draft's method does it
                   ─> live.auxiliary["draft"].train: the policy's new weights are the target
    publish        ── both go to the sampler

All randomness is a function of run.seed, the round and the step within it; the draft's state is all
that persists between rounds.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.config.refresh import DraftRefresh
from jaxtrain.core.auxiliary import AuxiliaryObjective
from jaxtrain.core.metrics import Pair, add_pairs, average
from jaxtrain.core.roles import Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.task import DRAFT, Round, Task, TrainingContext
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.anchors import WEIGHTS
from jaxtrain.methods.drafts.drafting import TARGET, DraftObjective, Label
from jaxtrain.methods.rl.batch_builder import DRAWN


def with_refresh(task: Task, config: Config, method: Any) -> Task:
    """Return the task of a policy with rollout.draft, which is trained between rounds by section
    rollout.draft_refresh. method: the module of the draft's kind."""
    section = config.rollout.draft_refresh
    assert section is not None and config.rollout.draft is not None
    if DRAWN not in task.data.fields.streams:
        raise UserError(
            f"rollout.draft_refresh learns from drawn answers, and task.kind {config.task.kind}"
            " draws none here; remove it"
        )
    trained = next(role.bundle for role in task.roles.values() if role.weights == "trained")
    task_section: Any = section.task
    draft = task_section.draft.model_copy(update={"path": config.rollout.draft})
    draft_task = task_section.model_copy(update={"draft": draft})
    try:
        objective: DraftObjective = method.teach(
            config.model_copy(update={"task": draft_task}), trained
        )
    except UserError as error:
        text = str(error).replace("task.draft.path", "rollout.draft")
        raise UserError(text.replace("task.", "rollout.draft_refresh.task.")) from None
    refresh = Refresh(section, objective.label, config.run.seed)
    return dataclasses.replace(
        task,
        prepare=functools.partial(refresh.prepare, task),
        after_round=functools.partial(refresh.after_round, task),
        auxiliary={
            **task.auxiliary,
            DRAFT: AuxiliaryObjective(
                name=DRAFT,
                role=Role(objective.bundle),
                teacher=TARGET,
                loss=objective.loss,
                coef={objective.component: 1.0},
                optim=section.optim,
            ),
        },
    )


class Refresh:
    """Keeps the batches of a round until its end, and trains the draft on them."""

    def __init__(self, section: DraftRefresh, label: Label, seed: int):
        self.section, self.label, self.seed = section, label, seed
        self.batches: list[Batch] = []
        self.version = 0

    def prepare(self, task: Task, round: Round, scorer: Scorer) -> Round:
        """Keep the round's batches, then run the method's own prepare."""
        if not round.held_out:
            earlier = self.batches if round.part else []
            self.batches, self.version = [*earlier, *round.batches], round.version
        return task.prepare(round, scorer)

    def after_round(self, task: Task, live: TrainingContext, before: int) -> dict[str, float]:
        """Run the method's own after_round, then the draft's steps."""
        metrics = dict(task.after_round(live, before) or {})
        batches, self.batches = self.batches, []
        if not batches or (self.version + 1) % self.section.every:
            return metrics
        with live.phase("training the draft"):
            return metrics | self.train(live, batches)

    def train(self, live: TrainingContext, batches: Sequence[Batch]) -> dict[str, float]:
        """Train several passes over the round; return means over their steps: {"draft/loss":
        ...}."""
        start, target, outputs = time.monotonic(), live.snapshot(), []
        for number in range(self.section.passes):
            for index, batch in enumerate(batches):
                rng = np.random.default_rng([self.seed, 2, self.version, number, index])
                labeled = self.label(only_drawn(batch), rng)
                outputs.append(live.auxiliary[DRAFT].train(labeled, target))
        total: dict[str, Pair] = {}
        skipped = 0
        for output in jax.device_get(outputs):
            skipped += not output.finite
            if output.finite:
                pairs = {name: (float(s), float(w)) for name, (s, w) in output.metrics.items()}
                total = add_pairs(total, pairs)
        metrics = {f"draft/{name}": value for name, value in average(total).items()}
        metrics["draft/seconds"] = time.monotonic() - start
        return {**metrics, "draft/skipped": float(skipped)} if skipped else metrics


def only_drawn(batch: Batch) -> Batch:
    """Reduce the trees of a round to the weights of a draft's data: 1 on the tokens that the policy
    drew (which no branches share)."""
    weights = (batch.streams[DRAWN] > 0).astype(next(iter(batch.weights.values())).dtype)
    return batch._replace(weights={WEIGHTS: weights}, streams={}, denoms={})
