"""Where a method meets the config: each task labels batches and names a loss, nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config import Config
from jaxtrain.tasks.rl import rl_coef, rl_loss
from jaxtrain.tasks.sft import sft_loss


@dataclass(frozen=True)
class Task:
    """What the step needs to know of a training method."""

    loss: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
    """(model, batch [B, T]) -> ({component: sum}, {metric: (sum, weight)}); pure."""
    coef: dict[str, float] = field(default_factory=dict)
    """Factor of each component in the total loss, after division by its denominator."""


def build_task(config: Config) -> Task:
    """The task that `task.kind` names."""
    match config.task.kind:
        case "sft" | "tree":
            return Task(sft_loss(config.model.logp), {"nll": 1.0})
        case "rl":
            return Task(rl_loss(config), rl_coef(config.task))
    raise AssertionError(config.task.kind)
