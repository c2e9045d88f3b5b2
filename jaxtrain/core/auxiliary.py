"""A model of its own that learns between the rounds of a run's trained model, such as a draft.

    round trained ─> Task.after_round ─> live.auxiliary["draft"].train(batch, the trained model)
                                             loss, optimizer and state of its own
                  ─> Rounds.finish: both models' weights to the engine

Its state is in every checkpoint, beside that of the trained model and under its own name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.batch import Batch
from jaxtrain.config import OptimConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.roles import Models, ModelSnapshot, Role, Roles, prefix
from jaxtrain.core.step import State, StepOutput, abstract_state, init_state, make_step
from jaxtrain.distributed.feed import feed


@dataclass(frozen=True, kw_only=True)
class AuxiliaryObjective:
    """What such a model is, and how it learns."""

    name: str
    """What the loss calls it."""
    role: Role
    """Its parts; weights "trained"."""
    teacher: str
    """What the loss calls the run's trained model, whose weights of the moment it learns from."""
    loss: Callable[[Models, Batch], tuple[dict[str, Any], dict[str, Any]]]
    """As Task.loss, of both."""
    coef: Mapping[str, float]
    """As Task.coef."""
    optim: OptimConfig
    """Its optimizer; a schedule that needs no number of steps."""


class AuxiliaryModel:
    """A Learner in a running session."""

    def __init__(self, learner: AuxiliaryObjective, trained: ModelBundle):
        """trained: of the run's trained model. Holds shapes until opened or restored."""
        self.learner = learner
        self.roles = Roles({learner.name: learner.role})
        models = {learner.name: learner.role, learner.teacher: Role(trained, "own")}
        optim, shapes = learner.optim, self.roles.trained_shapes
        self.optimizer = build_optimizer(optim, build_schedule(optim, 1), shapes)
        self.run_step = make_step(
            Roles(models).build, learner.loss, learner.coef, self.optimizer, optim.max_grad_norm
        )
        self.state: State = abstract_state(
            shapes, self.optimizer, self.roles.copy_shapes, optim.offload
        )

    def open(self, seed: int) -> None:
        """The state of a fresh run."""
        trained, _, copies = self.roles.open(seed)
        self.state = init_state(trained, self.optimizer, copies, self.learner.optim.offload)

    def snapshot(self) -> ModelSnapshot:
        """The model with its current weights; `step` counts its own updates."""
        state = self.state
        return ModelSnapshot(self.roles, {**state.copies, **state.params}, int(state.step))

    def train(self, batch: Batch, teacher: ModelSnapshot) -> StepOutput:
        """One step on a host batch [A, B, T], by the teacher's current weights; one that is not
        finite changes nothing. On every process."""
        frozen = prefix(self.learner.teacher, teacher.params())
        placed = feed(batch, self.roles.bundle.mesh)
        self.state, output = self.run_step(self.state, placed, frozen)
        return output
