"""Construct what a key of the config names, with its options; wrong options and failing code get
different errors."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain import plugins
from jaxtrain.config.base import Section
from jaxtrain.config.load import validate
from jaxtrain.errors import UserError


def make(
    constructor: Callable[..., Any],
    *arguments: Any,
    options: Mapping[str, Any],
    key: str,
    options_key: str,
    argument_names: str = "",
) -> Any:
    """made(*given, section) where it has a Section of its own for the options, else
    made(*given, **options).

    key: what messages call the thing; options_key: the config key of its options. argument_names:
    the names of `given`, for people. UserError for options that it does not take, and for what it
    raises.
    """
    section = getattr(constructor, "Section", None)
    try:
        if isinstance(section, type) and issubclass(section, Section):
            return constructor(*arguments, validate(section, dict(options), key, f"{options_key}."))
        check_call(constructor, arguments, options, key, options_key, argument_names)
        return constructor(*arguments, **options)
    except UserError:
        raise
    except plugins.FAILURES as error:  # the border: whatever foreign code may raise
        raise UserError(f"{key} cannot be made: {plugins.describe(error)}") from error


def check_call(
    constructor: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
    key: str,
    options_key: str,
    argument_names: str = "",
) -> None:
    """Raise UserError where a call's arguments do not fit its signature; nothing is called."""
    try:
        signature = inspect.signature(constructor)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [
            parameter.name for parameter in signature.parameters.values() if parameter.kind in kinds
        ]
        option_names = ", ".join(named[len(arguments) :]) or "none"
        call_form = f"({argument_names + ', ' if argument_names else ''}**{options_key})"
        raise UserError(
            f"{key} cannot be made with {call_form}: {error}; its options are {option_names}"
        ) from None
