"""Reference policy: choice of its weights, and updates of a moving one."""

from collections.abc import Callable
from functools import partial

from jaxtrain.adapters.spec import Adapter
from jaxtrain.core.roles import Weights
from jaxtrain.core.task import TrainingContext, keep_weights
from jaxtrain.errors import UserError

REFERENCE = "reference"
"""Name of the role."""


def find_reference(kind: str, adapter: Adapter | None) -> Weights:
    """Return the weights of the reference policy for task.reference: auto, adapter_off, frozen,
    mixed.

    Raises UserError where the adapter of adapter.path trains tables in full: without it the model
    is not the base.
    """
    full = () if adapter is None else adapter.full
    if kind == "adapter_off" and full:
        raise UserError(
            f"task.reference adapter_off: the adapter of adapter.path trains {', '.join(full)} in"
            ' full, which stays when the adapter is off; set task.reference to "frozen"'
        )
    if kind == "auto":
        return "start" if adapter is None or full else "bare"
    kinds: dict[str, Weights] = {"adapter_off": "bare", "frozen": "start", "mixed": "moving"}
    return kinds[kind]


def mixing(
    weights: Weights | None, every: int, share: float
) -> Callable[[TrainingContext, int], dict[str, float]]:
    """Return `Task.after_round` for a reference of these weights: a moving one mixes in `share` of
    the policy every `every` steps (TR-DPO, arXiv 2404.09656); others do not change."""
    return partial(mix_reference, every, share) if weights == "moving" else keep_weights


def mix_reference(
    every: int, share: float, context: TrainingContext, before: int
) -> dict[str, float]:
    """Mix the policy into the moving reference every `every` steps."""
    if context.step // every > before // every:
        context.mix(REFERENCE, share)
    return {}
