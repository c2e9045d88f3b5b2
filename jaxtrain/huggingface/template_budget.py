"""What a chat template may spend while it renders: time, steps, and bytes that it makes.

`chat_template.py` writes calls of these functions into a template. Nothing that multiplies (a
repetition, a join, a width) is computed before its size is known, and nothing runs long between two
looks at the clock, so the limits hold inside the process. `active` is of the thread that renders.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinMethodType, GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Macro, str_join
from jinja2.utils import generate_lorem_ipsum

SECONDS = 3.0
"""Of the thread's own time, so that a busy machine changes nothing."""
TOTAL_BYTES = 2**29
"""Made in one rendering, whether kept or not."""
LOOK_BYTES = 2**18
VALUE_BYTES = 2**26
"""Of one text or list."""
OUTPUT_LENGTH, OUTPUT_TIMES = 2**20, 20
"""Characters of a whole rendering: so many, and so many times what it was given."""
MAX_NODES = 2**20
"""Items of a list or an object, those of its items included."""
MAX_BITS = 4096
"""Of a whole number."""
MAX_NUMBER = 10**6
"""As a width, a count or a number of copies."""
WIDE_FORMAT = re.compile(r"\d{6,}|\*")
MULTIPLIES = frozenset({"center", "indent", "join", "replace", "wordwrap", "format", "sum"})
"""Filters and methods whose result can be far larger than what they get."""
CHECKED = MULTIPLIES | {"batch", "slice", "truncate", "tojson", "map", "round", "int", "float"}
"""Filters whose arguments are looked at."""
KEEPS_ITEMS = frozenset(
    {"list", "length", "count", "first", "last", "map", "select", "reject", "selectattr", "sort"}
    | {
        "rejectattr",
        "unique",
        "items",
        "dictsort",
        "groupby",
        "batch",
        "slice",
        "sum",
        "min",
        "max",
    }
    | {"random", "reverse", "default", "d", "attr"}
)
"""Filters that do not write out the lists that they are applied to."""
PLAIN = frozenset(
    {"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "find"}
    | {"get", "items", "keys", "values", "lower", "upper", "title", "capitalize"}
)
"""Methods of texts and objects that give about as much as they get, whatever the arguments."""
REFUSED = frozenset({"urlize", "translate", "format_map", "to_bytes", "from_bytes", "pprint"})


class OverBudget(Exception):
    """The template wants more than a rendering may take."""


class Budget:
    """What is left of one rendering."""

    def __init__(self) -> None:
        self.bytes = TOTAL_BYTES
        self.look_at = TOTAL_BYTES
        """Below as many bytes the clock is looked at."""
        self.deadline = time.thread_time() + SECONDS
        self.called: list[Any] = []
        """What is about to be called, the innermost last."""

    def spend(self, size: int) -> None:
        self.bytes -= size
        if self.bytes < 0:
            raise OverBudget(f"it makes more than {TOTAL_BYTES >> 20} MiB of text and lists")
        if self.bytes < self.look_at:
            self.look_at = self.bytes - LOOK_BYTES
            if time.thread_time() > self.deadline:
                raise OverBudget(f"it takes longer than {SECONDS:g} s")

    def allow(self, size: int) -> None:
        """Before something of about that many bytes is made."""
        if size > VALUE_BYTES:
            raise OverBudget(f"one of its values would have {size} bytes")
        if size > self.bytes:
            self.spend(size)


_local = threading.local()


@contextmanager
def limited() -> Iterator[None]:
    """Within the block the thread's templates have one budget."""
    before, _local.budget = getattr(_local, "budget", None), Budget()
    try:
        yield
    finally:
        _local.budget = before


def active() -> Budget:
    """The thread's budget."""
    budget = getattr(_local, "budget", None)
    assert budget is not None, "guarded templates are rendered by chat_template.render"
    return budget


def check_output(text: str, given: Any) -> None:
    """Raise OverBudget for a rendering that is out of proportion to what it was given."""
    most = OUTPUT_LENGTH + OUTPUT_TIMES * _measure(given)[1]
    if len(text) > most:
        raise OverBudget(f"it writes {len(text)} characters; {most} are allowed here")


class Operation:
    """A function as an operator, `OPERATION % (arguments)`: the sandbox looks at every call that a
    template makes, which for one of ours takes several times as long as the function."""

    def __init__(self, function: Callable):
        self.function = function

    def __mod__(self, args: tuple) -> Any:
        return self.function(*args)


# -- what guarded templates call


def tick(cost: int) -> str:
    """A turn of a loop or a call of a macro, whose body has so many bytes."""
    active().spend(cost)
    return ""


def made(value: Any) -> Any:
    """A value that was just computed."""
    if value is None or isinstance(value, bool):
        return value
    budget = active()
    budget.spend(sys.getsizeof(value))
    if isinstance(value, list | tuple | dict):
        budget.spend(8 * _measure(value)[0])
    return value


def shown(value: Any) -> Any:
    """A value that is written out next."""
    active().spend(_measure(value)[1] if isinstance(value, list | tuple | dict) else _size(value))
    return value


def compared(value: Any) -> Any:
    """A value that is compared next with one that is no constant."""
    if isinstance(value, list | tuple | dict):
        active().allow(_measure(value)[1])
    return value


def concat(*parts: Any) -> str:
    """a ~ b ~ ..."""
    active().allow(sum(_measure(part)[1] for part in parts))
    return made(str_join(parts))


def add(left: Any, right: Any) -> Any:
    """a + b"""
    active().allow(_size(left) + _size(right))
    return made(left + right)


def multiply(left: Any, right: Any) -> Any:
    """a * b"""
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
            wide = 4 if isinstance(value, str) else 8
            active().allow(wide * len(value) * max(int(times), 0))
    _allow_bits(_bits(left) + _bits(right))
    return made(left * right)


def power(left: Any, right: Any) -> Any:
    """a ** b"""
    if isinstance(right, int):
        _allow_bits(_bits(left) * abs(right))
    return made(left**right)


def modulo(left: Any, right: Any) -> Any:
    """a % b, which formats where a is a text."""
    if isinstance(left, str):
        _check_format("%", left, (right,))
    return made(left % right)


def calls(function: Any) -> Any:
    """What is called next; its arguments follow."""
    plain = isinstance(function, BuiltinMethodType) and function.__name__ in PLAIN
    active().called.append(None if plain else function)
    return function


def filters(subject: Any, name: str) -> Any:
    """What a filter is applied to next."""
    if name in REFUSED:
        raise SecurityError(f"the filter {name} is not available in chat templates")
    if isinstance(subject, GeneratorType):
        subject = made(list(subject))
    if name not in KEEPS_ITEMS and isinstance(subject, list | tuple | dict):
        active().allow(_measure(subject)[1])
    return subject


def filtered(subject: Any, name: str) -> Any:
    """As `filters`; its arguments follow."""
    subject = filters(subject, name)
    active().called.append((name, subject))
    return subject


def positional(args: Sequence[Any], more: Any = ()) -> list[Any]:
    """The arguments of what is called next, checked."""
    found = [*args, *more]
    called = active().called[-1]
    if called is None:
        return found
    if _multiplies(called):
        found = [made(list(a)) if isinstance(a, GeneratorType) else a for a in found]
    check_call(called, found)
    return found


def named(kwargs: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Its arguments by name."""
    called = active().called.pop()
    found = {**kwargs, **more} if more else dict(kwargs)
    if found and called is not None:
        check_call(called, list(found.values()))
    return found


# -- what they are checked for


def check_call(called: Any, args: list[Any]) -> None:
    """Raise OverBudget or SecurityError where a filter or a function would make too much."""
    if isinstance(called, tuple):
        name, subject = called
        if name == "map" and args and isinstance(args[0], str):
            if args[0] in MULTIPLIES | REFUSED:
                raise SecurityError(f"map({args[0]!r}) is not available in chat templates")
            active().allow(_measure(subject)[1])
    elif isinstance(called, Macro):
        return
    else:
        if called is generate_lorem_ipsum:
            raise SecurityError("lipsum is not available in chat templates")
        called = getattr(called, "__wrapped__", called)  # the sandbox's own str.format
        name, subject = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        if not isinstance(subject, str | bytes | int | float | list | tuple):
            return
        if name in REFUSED:
            raise SecurityError(f"the method {name} is not available in chat templates")
    if name == "format":
        _check_format("%" if isinstance(called, tuple) else "{", subject, args)
        return
    numbers = [abs(arg) for arg in args if isinstance(arg, int)]
    if numbers and max(numbers) > MAX_NUMBER:
        raise OverBudget(f"{name}({max(numbers)})")
    texts = [arg for arg in args if isinstance(arg, str | bytes)]
    widest = max([*numbers, *map(len, texts), 1])
    size = _size(subject)
    match name:
        case "replace" if texts:
            active().allow(size + _count(subject, args[0]) * max(map(_size, texts)))
        case "join" if not isinstance(called, tuple) and args and hasattr(args[0], "__len__"):
            active().allow(_measure(args[0])[1] + len(args[0]) * size)
        case "join":
            active().allow(_measure(subject)[1] + _length(subject) * widest)
        case "indent" | "expandtabs" | "wordwrap":
            breaks = _count(subject, "\t" if name == "expandtabs" else "\n")
            if name == "wordwrap":
                breaks = max(breaks, len(str(subject)) // max(min([*numbers, 79]), 1))
            active().allow(size + (breaks + 2) * widest)
        case "sum":
            if any(not isinstance(arg, int | float | str) for arg in args):
                raise SecurityError("sum with a start that is no number is not available")
        case "tojson":
            if widest > 1000:
                raise OverBudget(f"tojson with an indent of {widest}")
            active().allow(6 * _measure(subject)[1])


def _multiplies(called: Any) -> bool:
    name = called[0] if isinstance(called, tuple) else getattr(called, "__name__", "")
    return name in MULTIPLIES


def _check_format(kind: str, text: Any, args: Sequence[Any]) -> None:
    """A format may hold no width that multiplies, nor take one from its arguments."""
    text = str(text)
    nested = kind == "{" and re.search(r"\{[^{}]*\{", text)
    if WIDE_FORMAT.search(text) or nested:
        raise OverBudget("a format with a width that is too large, or not written in it")
    active().allow(sum(_measure(arg)[1] for arg in args) + len(text))


def _size(value: Any) -> int:
    if isinstance(value, str | bytes | list | tuple | dict):
        return sys.getsizeof(value)
    return 64


def _measure(value: Any) -> tuple[int, int]:
    """(items, bytes when written out) of a value and all within; what stands in it twice counts
    twice. Raises OverBudget for more than MAX_NODES."""
    if not isinstance(value, list | tuple | dict):
        return 1, _size(value)
    nodes, size, left = 0, 0, [value]
    while left:
        found = left.pop()
        nodes += 1
        if isinstance(found, dict):
            left += found.keys()
            left += found.values()
        elif isinstance(found, list | tuple):
            left += found
        else:
            size += _size(found)
        if nodes + len(left) > MAX_NODES:
            raise OverBudget(f"one of its lists has more than {MAX_NODES} items within")
    return nodes, size + 8 * nodes


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _count(text: Any, part: Any) -> int:
    """Places where `part` is in a text."""
    if isinstance(text, bytes):
        return text.count(part) if isinstance(part, bytes) else len(text)
    return str(text).count(str(part))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _allow_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverBudget(f"a number of {bits} bits")


TICK = Operation(tick)
MADE = Operation(made)
SHOWN = Operation(shown)
COMPARED = Operation(compared)
CONCAT = Operation(concat)
ADD = Operation(add)
MULTIPLY = Operation(multiply)
POWER = Operation(power)
MODULO = Operation(modulo)
CALLS = Operation(calls)
FILTERS = Operation(filters)
FILTERED = Operation(filtered)
POSITIONAL = Operation(positional)
NAMED = Operation(named)
