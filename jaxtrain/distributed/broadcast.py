"""Values and errors of process 0, shared with all processes: rounds of answers, evaluation results.

    process 0   make() ──────> value or error ─┐ TCP (`relay.py`)
    others      wait, on their hosts <─────────┘ return the value, or raise the same error

No device takes part, so that process 0 may take as long as it needs: a collective would time out,
and would keep the devices busy. The hub ends all processes when one ends while others wait.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtrain.distributed.processes import peers
from jaxtrain.errors import Interrupted, RunStopped, UserError

T = TypeVar("T")
SHARED_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (Interrupted, RunStopped, UserError, StopIteration)
}


def broadcast(name: str, make: Callable[[], T]) -> T:
    """Call `make` on process 0 alone, and return its value on every process.

    Every process calls this, in the same order. The value consists of the types that
    `serialization.py` lists. An error of `make` ends all processes through the hub.
    """
    if jax.process_count() == 1:
        return make()
    connection = peers()
    assert connection is not None, "processes that share something have joined"
    if jax.process_index() == 0:
        value = make()
        connection.send_value(name, value)
        return value
    return connection.receive_value(name)


def broadcast_or_raise(name: str, make: Callable[[], T]) -> T:
    """Like `broadcast`, but every process raises what `make` raises on process 0.

    So they all leave at the same place of the program, and may still save the state together. An
    error outside SHARED_ERRORS becomes a RunStopped with its first line on the other processes.
    (An error that only another process sees, such as a full disk of its machine, leaves the rest
    in the middle of a collective; nothing can be done together then, and the hub ends the run.)
    """
    if jax.process_count() == 1:
        return make()
    failures: list[Exception] = []

    def attempt() -> tuple[str, Any]:
        try:
            return "", make()
        except Exception as error:  # raised again below, on every process
            failures.append(error)
            return _describe_error(error)

    kind, value = broadcast(name, attempt)
    if not kind:
        return value
    raise mark_shared(failures[0] if failures else SHARED_ERRORS[kind](value))


def _describe_error(error: Exception) -> tuple[str, str]:
    """Return (name in SHARED_ERRORS, text) of an error, for the other processes."""
    for name, kind in SHARED_ERRORS.items():
        if isinstance(error, kind):
            return name, str(error)
    first_line = str(error).strip().partition("\n")[0][:300]
    return RunStopped.__name__, f"process 0: {type(error).__name__}: {first_line}"


def mark_shared(error: Exception) -> Exception:
    """Mark an error as one that every process raises at this place."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def is_shared(error: BaseException) -> bool:
    """Return True if all processes have reached the place where this error was raised."""
    return jax.process_count() == 1 or getattr(error, "everywhere", False)
