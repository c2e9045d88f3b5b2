"""What goes wrong on process 0 alone, raised on all processes, so that they can end together.

    process 0   make() raises ──> told ──> raises it again ─┐  all at the same place of the program:
    others      wait ───────────> hear ──> raise the same  ─┴─ they may still save the state

An error that only one process sees, such as a full disk of its machine, leaves the others in the
middle of a collective: nothing can be done together then, and the hub ends the run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtrain.distributed.relay import broadcast
from jaxtrain.errors import Interrupted, RunStopped, UserError

T = TypeVar("T")
KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Interrupted, RunStopped, UserError, StopIteration)
}


def broadcast_or_raise(name: str, make: Callable[[], T]) -> T:
    """As relay.broadcast; what `make` raises on process 0, every process raises.

    The others get an error without a kind of its own as RunStopped, with its first line.
    """
    if jax.process_count() == 1:
        return make()
    failures: list[Exception] = []

    def attempt() -> tuple[str, Any]:
        try:
            return "", make()
        except Exception as error:  # the border: it is raised again below
            failures.append(error)
            return describe(error)

    kind, value = broadcast(name, attempt)
    if not kind:
        return value
    raise seen_by_all(failures[0] if failures else KINDS[kind](value))


def describe(error: Exception) -> tuple[str, str]:
    """(name in KINDS, text) of an error, for the other processes."""
    for name, kind in KINDS.items():
        if isinstance(error, kind):
            return name, str(error)
    first = str(error).strip().partition("\n")[0][:300]
    return RunStopped.__name__, f"process 0: {type(error).__name__}: {first}"


def seen_by_all(error: Exception) -> Exception:
    """The error, marked as one that every process raises at this place."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def can_act_together(error: BaseException) -> bool:
    """Whether all processes have come to where this error was raised."""
    return jax.process_count() == 1 or getattr(error, "everywhere", False)
