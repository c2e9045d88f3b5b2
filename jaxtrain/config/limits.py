"""Limits of the numbers in a config, and checks of types: booleans are not numbers."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from jaxtrain.text_safety import show

LARGEST = 10**9
"""Of every number whose key names no bound of its own."""
SECONDS = 10**6
"""Of waiting: eleven days; what the operating system takes ends at twenty-four."""
TOKENS = 2**23
"""Of one row or answer."""
ITEMS = 2**20
"""Of rows, answers, groups or samples that are held or planned at once."""
ROWS = 2**16
"""Of rows of a microstep, answers to a prompt, devices of an axis, attempts."""
WIDTH = 2**16
"""Of matrices."""
PASS_TOKENS = 2**23
"""Of what one device computes in one forward pass: rows times the tokens of a row. The host holds a
few such batches, at 28 bytes a token."""
STEP_TOKENS = 2**31
"""Of an optimizer step."""
WORKERS = 512
"""Processes that one process starts."""
SEED = 2**32 - 1


def find_misfits(value: Any, annotation: Any) -> Iterator[str]:
    """Yield a problem for each boolean in place of a number or text, and the other way round."""
    kinds = list(_kinds(annotation))
    if Any in kinds:
        return
    if isinstance(value, bool):
        if {int, float, str} & set(kinds) and bool not in kinds:
            expected = "a number" if {int, float} & set(kinds) else "a text, in quotes"
            yield f"must be {expected}, found {show(value)}"
    elif isinstance(value, int | float | str) and bool in kinds:
        words = ("true", "false", "yes", "no", "on", "off")
        is_word = isinstance(value, str) and value.lower() in words
        if not is_word and not {int, float, str} & set(kinds):
            yield f"must be true or false, found {show(value)}"
    elif isinstance(value, list | tuple):
        inner = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
        for item in value if inner else ():
            yield from find_misfits(item, inner[0])
    elif isinstance(value, dict):
        inner = [get_args(kind)[1] for kind in kinds if get_origin(kind) is dict]
        for key, item in value.items() if inner else ():
            yield from (f"{show(key)} {problem}" for problem in find_misfits(item, inner[0]))


def find_numbers(value: Any, annotation: Any) -> Iterator[int | float]:
    """Yield the numbers of a value, except where the annotation is Any (options of plug-ins)."""
    kinds = list(_kinds(annotation))
    if isinstance(value, bool) or Any in kinds:
        return
    if isinstance(value, int | float):
        yield value
    inner = [get_args(kind)[-1] for kind in kinds if get_origin(kind) in (list, dict)]
    inner += [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if inner and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from find_numbers(item, inner[0])


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union, and the types of a Literal's values, without Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif origin is Literal:
        yield from {type(literal) for literal in get_args(annotation)}
    elif annotation is not NoneType:
        yield annotation
