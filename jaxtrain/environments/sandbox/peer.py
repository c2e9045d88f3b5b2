"""Calls by value between two processes: plain values are copied, other objects become handles.

A message is a line of JSON. A value is null, a bool, a text, a number, or [kind, ...], with exact
types of the standard library only, which the other side constructs again. So no method or `__eq__`
of an untrusted class ever reaches the process that compares. Other objects stay with their owner,
whose `SandboxPeer` sends ["mine", number, ...], and become a `RemoteHandle` on the other side.
"""

import builtins
import importlib
import json
import socket
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

LONGEST = 16 * 2**20
"""Limit of bytes of a message; a longer one closes the connection."""
MANY = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
DICTS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": dict}
BYTES = {"bytes": bytes, "bytearray": bytearray}
NUMBERS = {"complex": complex, "Fraction": Fraction, "Decimal": Decimal, "range": range}
DATES = {"date": date, "datetime": datetime, "time": time}
NAMES = {
    kind: name
    for table in (MANY, BYTES, {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter})
    for name, kind in table.items()
} | {defaultdict: "defaultdict"}
BASES = (bool, int, float, complex, str, bytes, tuple, list, set, frozenset, dict)
NOTHING = object()


class ConnectionClosed(BaseException):
    """The other side has ended or violates the protocol. A BaseException, so that a test's `except
    Exception` cannot catch it."""


class SandboxPeer:
    """End of a connection: `ask` sends a request, and the other side may send requests before it
    replies.

    answer(verb, arguments) -> value of a request from the other side.
    """

    stdlib_by_name = False
    """True: functions and classes of the standard library are sent as their names alone, so that
    the other side cannot have them called here."""

    def __init__(self, connection: socket.socket, answer, remote):
        self.connection = connection
        self.answer = answer
        self.remote = remote
        self.rest = bytearray()
        self.lock = threading.RLock()
        self.ended = False
        """True if the connection broke, even if the exception was caught."""
        self.given: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.known: dict[int, Any] = {}
        self.errors: dict[int, type] = {}
        """Classes made for the other side's exceptions, by their numbers there."""

    def use(self, verb: str, *arguments) -> Any:
        """Send a request of a `RemoteHandle`."""
        return self.ask(verb, *arguments)

    def ask(self, verb: str, *arguments) -> Any:
        """Send a request and return the reply; raises what the other side raised."""
        with self.lock:
            try:
                self.send([verb, *map(self.pack, arguments)])
                return self.listen(reply=True)
            except ConnectionClosed:
                self.ended = True
                raise

    def serve(self) -> None:
        """Answer requests until the other side has ended."""
        try:
            self.listen(reply=False)
        except ConnectionClosed:
            return

    def listen(self, reply: bool) -> Any:
        """Answer requests; with `reply`, until a reply arrives, which is returned or raised."""
        while True:
            message = self.receive()
            if not isinstance(message, list) or not message:
                raise ConnectionClosed("not a message")
            kind, *rest = message
            if kind in ("value", "error"):
                if not reply:
                    raise ConnectionClosed("a reply that nobody asked for")
                return self.read_reply(kind, rest)
            try:
                answer = self.answer(kind, [self.unpack(value) for value in rest])
                self.send(["value", self.pack(answer)])
            except ConnectionClosed:
                raise
            except BaseException as error:  # any exception is passed on to the requester
                self.send(["error", self.pack_error(error)])

    def read_reply(self, kind: str, rest: list):
        if kind == "value":
            return self.unpack(rest[0])
        raise self.unpack_error(rest[0])

    def send(self, message: list) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError, RecursionError) as error:
            raise ConnectionClosed(str(error)) from None

    def receive(self):
        while (end := self.rest.find(b"\n")) < 0:
            try:
                chunk = self.connection.recv(65536)
            except OSError as error:
                raise ConnectionClosed(str(error)) from None
            if not chunk or len(self.rest) > LONGEST:
                raise ConnectionClosed(
                    "the other side ended" if not chunk else "too long a message"
                )
            self.rest += chunk
        line = bytes(self.rest[:end])
        del self.rest[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionClosed("not JSON") from None

    # -- values ----------------------------------------------------------------------------------

    def pack(self, value):
        """Encode a value as JSON; cyclic and very deep ones become handles."""
        try:
            return self.pack_plain(value)
        except RecursionError:
            return self.give(value)

    def pack_plain(self, value):
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if abs(value) < 2**53 else ["int", hex(value)]
        if kind in MANY.values():
            return [NAMES[kind], [self.pack_plain(item) for item in value]]
        if kind in NAMES and issubclass(kind, dict):
            pairs = [[self.pack_plain(k), self.pack_plain(v)] for k, v in dict.items(value)]
            return [NAMES[kind], pairs]
        if kind in BYTES.values():
            return [NAMES[kind], value.hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is Fraction:
            return ["Fraction", hex(value.numerator), hex(value.denominator)]
        if kind is Decimal:
            return ["Decimal", str(value)]
        if kind in (range, slice):
            parts = [self.pack_plain(part) for part in (value.start, value.stop, value.step)]
            return [kind.__name__, *parts]
        if kind in DATES.values() and getattr(value, "tzinfo", None) is None:
            return [kind.__name__, value.isoformat()]
        if kind is timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if value is Ellipsis:
            return ["..."]
        if isinstance(value, type) and value is getattr(builtins, value.__name__, None):
            return ["type", value.__name__]
        if isinstance(value, self.remote):
            return ["yours", value._remote_number]
        return self.give(value)

    def give(self, value):
        """Encode a handle, with the plain content of a subclass of a plain type, read by that
        type's own methods."""
        stdlib_name = stdlib_place(value)
        if stdlib_name and self.stdlib_by_name:
            return ["import", *stdlib_name]
        kind = "coroutine" if isinstance(value, types.CoroutineType) else ""
        handle = ["mine", self.number_of(value), kind]
        if stdlib_name:
            return ["import", *stdlib_name, *handle]
        base = next((base for base in BASES if isinstance(value, base)), None)
        if base is not None and type(value) is not base:
            try:
                handle.append([self.pack_plain(to_base(value, base))])
            except RecursionError:
                pass
        return handle

    def number_of(self, value) -> int:
        """Return the number under which the other side may ask for an object from now on."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.given)
            self.given.append(value)
        return self.numbers[id(value)]

    def unpack(self, value) -> Any:
        """Decode a value from JSON; ConnectionClosed if it is invalid."""
        try:
            return self.unpack_plain(value)
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise ConnectionClosed(f"not a value: {error}") from None

    def unpack_plain(self, value) -> Any:
        if value is None or isinstance(value, (bool, str, float, int)):
            return value
        kind, *rest = value
        if kind in MANY:
            return MANY[kind](self.unpack_plain(item) for item in rest[0])
        if kind in DICTS:
            pairs = {self.unpack_plain(k): self.unpack_plain(v) for k, v in rest[0]}
            return DICTS[kind](pairs)
        if kind == "int":
            return int(rest[0], 16)
        if kind in BYTES:
            return BYTES[kind].fromhex(rest[0])
        if kind == "Fraction":
            return Fraction(int(rest[0], 16), int(rest[1], 16))
        if kind in NUMBERS:
            return NUMBERS[kind](*rest)
        if kind == "slice":
            return slice(*map(self.unpack_plain, rest))
        if kind in DATES:
            return DATES[kind].fromisoformat(rest[0])
        if kind == "timedelta":
            return timedelta(*rest)
        if kind == "...":
            return Ellipsis
        if kind == "type":
            builtin = getattr(builtins, rest[0])
            if not isinstance(builtin, type):
                raise ValueError("no type")
            return builtin
        if kind == "yours":
            return self.given[rest[0]]
        if kind == "import":
            return self.unpack_import(rest)
        if kind == "mine":
            return self.take(rest)
        raise ValueError(f"kind {kind!r}")

    def unpack_import(self, rest: list):
        """Decode an object of the standard library as a handle; a program's cell uses its own."""
        handle = self.take(rest[3:])
        handle._remote_place = (str(rest[0]), str(rest[1]))
        return handle

    def take(self, rest: list):
        """Return the RemoteHandle of an object of the other side, always the same one."""
        number, kind, *base = rest
        if type(number) is not int:
            raise ValueError("no number")
        if number not in self.known:
            plain = self.unpack_plain(base[0][0]) if base else NOTHING
            self.known[number] = self.remote(self, number, kind, plain)
        elif base:
            self.known[number]._remote_plain = self.unpack_plain(base[0][0])
        return self.known[number]

    # -- exceptions ------------------------------------------------------------------------------

    def pack_error(self, error: BaseException):
        """Encode an exception: [classes down to the builtin one, arguments, text, handle]."""
        classes = self.classes_of(type(error))
        try:
            return [classes, self.pack(tuple(error.args)), str(error)[:10000], self.give(error)]
        except BaseException:  # its own methods raise
            return [["Exception"], ["tuple", []], "", self.give(error)]

    def classes_of(self, kind: type) -> list:
        """Return [(name, number) of custom classes ..., name of the builtin one] of an
        exception."""
        classes = []
        for base in kind.__mro__:
            if base is getattr(builtins, base.__name__, None):
                return [*classes, base.__name__]
            classes.append([base.__name__, self.number_of(base)])
        return ["Exception"]

    def unpack_error(self, packed) -> BaseException:
        """Decode an exception, of a class by which it can be caught on this side."""
        try:
            classes, arguments, text, handle = packed
            kind = self.error_class(classes)
            arguments, handle = self.unpack(arguments), self.unpack(handle)
            try:
                error = kind(*arguments)
            except Exception:
                error = kind.__new__(kind)
            if len(classes) > 1:
                error._remote_text, error._remote_error = str(text), handle
            return error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise ConnectionClosed(f"not an error: {error}") from None

    def error_class(self, classes: list) -> Any:
        *custom, last = classes
        kind = getattr(builtins, last)
        if not issubclass(kind, BaseException):
            raise ValueError(last)
        for name, number in reversed(custom):
            if number not in self.errors:
                body = {"__str__": error_text, "__getattr__": error_attribute}
                self.errors[number] = type(name, (kind,), body)
            kind = self.errors[number]
        return kind


def error_text(error) -> str:
    return getattr(error, "_remote_text", None) or Exception.__str__(error)


def error_attribute(error, name: str):
    if name.startswith("_remote") or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(name)
    return getattr(object.__getattribute__(error, "_remote_error"), name)


def to_base(value, base: type):
    """Return the plain value inside an instance of a subclass, bypassing its overrides."""
    if base is dict:
        return dict(dict.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    if base in (str, bytes):
        return base.__getitem__(value, slice(None))
    return base.__add__(value, base(0))


def stdlib_place(value) -> list[str] | None:
    """Return [module, name] of a function or class of the standard library; None for others."""
    if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names | {"builtins"}:
        return None
    try:
        attribute = find_stdlib(module, name)
    except (ImportError, AttributeError):
        return None
    return [module, name] if attribute is value else None


def find_stdlib(module: str, name: str) -> Any:
    """Return an attribute of a standard library module by its dotted name."""
    attribute = importlib.import_module(module)
    for part in name.split("."):
        attribute = getattr(attribute, part)
    return attribute
