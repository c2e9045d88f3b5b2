"""What a key of the config names, made with the options beside it; wrong options are told apart
from code that fails."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import plugins
from jaxtrain.config.base import Section
from jaxtrain.config.load import validate
from jaxtrain.errors import UserError


def make(
    made: Callable[..., Any],
    *given: Any,
    options: Mapping[str, Any],
    key: str,
    options_key: str,
    what: str = "",
) -> Any:
    """made(*given, section) where it has a Section of its own for the options, else
    made(*given, **options).

    key: what messages call the thing; options_key: the config key of its options. what: the names
    of `given`, for people. UserError for options that it does not take, and for what it raises.
    """
    section = getattr(made, "Section", None)
    try:
        if isinstance(section, type) and issubclass(section, Section):
            return made(*given, validate(section, dict(options), key, f"{options_key}."))
        check_call(made, given, options, key, options_key, what)
        return made(*given, **options)
    except UserError:
        raise
    except Exception as error:  # the border: whatever foreign code may raise
        raise UserError(f"{key} cannot be made: {plugins.describe(error)}") from error


def check_call(
    made: Callable[..., Any],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    key: str,
    options_key: str,
    what: str = "",
) -> None:
    """UserError where a call's arguments do not fit its signature; nothing is called."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [one.name for one in signature.parameters.values() if one.kind in kinds]
        known = ", ".join(named[len(given) :]) or "none"
        arguments = f"({what + ', ' if what else ''}**{options_key})"
        raise UserError(
            f"{key} cannot be made with {arguments}: {error}; its options are {known}"
        ) from None
