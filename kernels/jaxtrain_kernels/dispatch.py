"""Dispatch: every op selects its backend here, by name or by trying them in order.

A backend is a function with the op's own signature. One that cannot take a call (wrong device,
shape, dtype or option) raises NotImplementedError with the reason before it computes anything.
"""

import logging
from collections.abc import Callable, Mapping

import jax

log = logging.getLogger(__name__)


def require_shapes(
    op: str,
    first: tuple[str, jax.Array],
    expected: Mapping[str, tuple[jax.Array | None, tuple[int, ...], jax.typing.DTypeLike]],
) -> None:
    """Raise ValueError for an operand of another shape or dtype than expected; None has none.

    first: name and array of the operand that the others follow from. expected: {name: (array,
    shape, dtype)}.
    """
    label, base = first
    for name, (array, shape, dtype) in expected.items():
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(
                f"{op}: {name} is {array.dtype}{list(array.shape)}, {label}"
                f" {base.dtype}{list(base.shape)}; want {dtype}{list(shape)}"
            )


def dispatch(op: str, impl: str, backends: Mapping[str, Callable], *args, **kwargs):
    """Call one backend of `op`.

    `impl` names a backend, which then takes the call or raises: a named backend never falls back.
    "auto" tries them in the order of the mapping and uses the first that does not decline.
    Raises ValueError for an unknown name, NotImplementedError with every backend's reason
    when all decline.
    """
    if impl != "auto":
        if impl not in backends:
            allowed = ", ".join(["auto", *backends])
            raise ValueError(f"{op}: there is no impl={impl!r}; allowed: {allowed}")
        try:
            return backends[impl](*args, **kwargs)
        except NotImplementedError as reason:
            raise NotImplementedError(f"{op}: impl={impl!r} declines: {reason}") from reason
    declined = []
    for name, backend in backends.items():
        try:
            # Backends decline before they compute anything, so a declined attempt costs only its
            # checks.
            result = backend(*args, **kwargs)
        except NotImplementedError as reason:
            log.debug("%s: %s declines: %s", op, name, reason)
            declined.append(f"  {name}: {reason}")
        else:
            log.debug("%s: %s", op, name)
            return result
    raise NotImplementedError(f"{op}: every backend declines this call:\n" + "\n".join(declined))
