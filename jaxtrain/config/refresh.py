"""Section rollout.draft_refresh: a draft that follows the policy which it guesses for."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Discriminator, Field

from jaxtrain.config.base import Section
from jaxtrain.config.limits import ROWS
from jaxtrain.config.methods import KINDS, load_section, union_of
from jaxtrain.config.model import OptimConfig
from jaxtrain.config.task import TaskSection


class RefreshOptim(OptimConfig):
    """Section optim of the draft; a round is a step, or a few."""

    learning_rate: float = Field(1e-4, gt=0, le=1000)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "inverse_sqrt"] = "constant"  # pyright: ignore
    """Shape after warm-up. Others need a number of steps, which rounds do not have."""


def find_kind(task: Any) -> Any:
    """The kind that a table or a section names."""
    return task.get("kind") if isinstance(task, dict) else getattr(task, "kind", None)


DRAFTS = {kind: load_section(kind) for kind, entry in KINDS.items() if entry.trains == "draft"}
"""The sections of the methods that train a draft, by kind."""

if TYPE_CHECKING:
    DraftTask = TaskSection
else:
    DraftTask = union_of(
        DRAFTS,
        Discriminator(
            find_kind,
            custom_error_type="draft_kind",
            custom_error_message="kind must be " + " or ".join(f'"{kind}"' for kind in DRAFTS),
        ),
    )


class DraftRefresh(Section):
    """The draft of rollout.draft learns between rounds, from the answers that were just drawn and
    the policy's new weights."""

    task: DraftTask
    """How it learns, as in section task of a run that trains such a draft: kind, num_anchors, ...
    """
    every: int = Field(1, ge=1, le=ROWS)
    """Rounds from one refresh to the next; each learns from the last round's answers."""
    passes: int = Field(1, ge=1, le=ROWS)
    """Optimizer steps of the draft on each batch of a round."""
    optim: RefreshOptim = RefreshOptim()
    """As section optim, for the draft."""


def find_refresh_conflicts(config: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination around rollout.draft_refresh."""
    refresh, key = config.rollout.draft_refresh, "rollout.draft_refresh"
    if refresh is None:
        return
    if config.rollout.draft is None:
        yield f"{key} has no effect without rollout.draft; name the draft's folder there"
    if config.rollout.draft == "mtp":
        yield f'{key} trains the folder of a draft, not rollout.draft "mtp"; set model.mtp.train'
    for text in refresh.task.find_refresh_conflicts(config):
        yield text.replace("task.", f"{key}.task.")
    optim = refresh.optim
    yield from (f"{key}.{text}" for text in optim.find_conflicts())
    if optim.warmup_ratio is not None:
        yield f"{key}.optim.warmup_ratio needs a number of steps; set warmup_steps instead"
    if optim.gradient_accumulation_steps > 1:
        yield f"{key}.optim.gradient_accumulation_steps: rounds set the size of a step; remove it"
