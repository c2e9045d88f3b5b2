"""Auxiliary models, such as drafts, that train between the rounds of a run's trained model.

    round trained ─> Task.after_round ─> context.auxiliary["draft"].train(batch, the trained model)
                                             with its own loss, optimizer and state
                  ─> Rounds.finish: both models' weights to the engine

Every checkpoint contains its state, next to that of the trained model, under its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.batch import Batch
from jaxtrain.config import OptimConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.optimizer import build_schedule
from jaxtrain.core.roles import Models, ModelSnapshot, Role, Roles, open_optimizer, prefix
from jaxtrain.core.step import State, StepOutput, abstract_state, init_state, make_step


@dataclass(frozen=True, kw_only=True)
class AuxiliaryObjective:
    """Role, loss and optimizer of an auxiliary model."""

    name: str
    """Role of the model in the loss."""
    role: Role
    """Bundle of the model; weights "trained"."""
    teacher: str
    """Role in the loss of the run's trained model, whose current weights it learns from."""
    loss: Callable[[Models, Batch], tuple[dict[str, Any], dict[str, Any]]]
    """As Task.loss, of both models."""
    coef: Mapping[str, float]
    """As Task.coef."""
    optim: OptimConfig
    """Optimizer of the model, with a schedule that needs no number of steps."""


class AuxiliaryModel:
    """An auxiliary model in a running session."""

    def __init__(self, learner: AuxiliaryObjective, trained: ModelBundle):
        """trained: bundle of the run's trained model. State is shapes until opened or restored."""
        self.learner = learner
        self.roles = Roles({learner.name: learner.role})
        # "own": the teacher's weights come with every step, and nothing here reads or saves them.
        models = {learner.name: learner.role, learner.teacher: Role(trained, "own")}
        optim, shapes = learner.optim, self.roles.trained_shapes
        # The number of its steps is unknown: the config admits only schedules that need none.
        self.optimizer, build = open_optimizer(
            optim, build_schedule(optim, 1), self.roles, Roles(models).build
        )
        self.run_step = make_step(
            build, learner.loss, learner.coef, self.optimizer, optim.max_grad_norm
        )
        self.state: State = abstract_state(
            shapes, self.optimizer, self.roles.copy_shapes, optim.offload
        )

    def open(self, seed: int) -> None:
        """Initialize the state of a fresh run."""
        trained, _, copies = self.roles.open(seed)
        self.state = init_state(trained, self.optimizer, copies, self.learner.optim.offload)

    def snapshot(self) -> ModelSnapshot:
        """Return the model with its current weights; `step` counts its updates."""
        state = self.state
        return ModelSnapshot(self.roles, {**state.copies, **state.params}, int(state.step))

    def train(self, batch: Batch, teacher: ModelSnapshot) -> StepOutput:
        """Run one step on a host batch [A, B, T] against the teacher's current weights, on every
        process. A non-finite step changes nothing."""
        # An argument of the compiled step, as these weights change every round.
        frozen = prefix(self.learner.teacher, teacher.params())
        self.state, output = self.run_step(self.state, batch, frozen)
        return output
