"""Handles of objects in the other process, used by sending requests.

Equality and order are the critical operations. A handle never equals a plain value, whatever its
class claims: the object at the other end is untrusted and could claim equality with anything. Two
handles are compared by their common class, as a test of that class expects. Arithmetic between a
handle and a plain value would reveal expected values to the other side; its result stays a handle
(`mixed`) and cannot become a number again.
"""

import operator

from jaxtrain.environments.sandbox.peer import NOTHING

SLOTS = ("_remote_peer", "_remote_number", "_remote_kind", "_remote_plain")
SLOTS += ("_remote_mixed", "_remote_place")


class RemoteHandle:
    """Handle; `_remote_plain` is the plain content of a subclass of a plain type (named tuples)."""

    __slots__ = SLOTS

    def __init__(self, peer, number: int, kind: str = "", plain=NOTHING):
        for name, value in zip(SLOTS, (peer, number, kind, plain, False, None), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *arguments, **named):
        return ask(self, "call", arguments, named)

    def __getattr__(self, name: str):
        if name.startswith("_remote"):
            raise AttributeError(name)
        return ask(self, "get", name)

    def __setattr__(self, name: str, value):
        if name in SLOTS:
            object.__setattr__(self, name, value)
        else:
            ask(self, "set", name, value)

    def __delattr__(self, name: str):
        ask(self, "delete", name)

    def __eq__(self, operand):
        return same(self, operand)

    def __ne__(self, operand):
        return not same(self, operand)

    def __hash__(self):
        plain = self._remote_plain
        return hash(plain) if plain is not NOTHING else ask(self, "apply", "hash")

    def __bool__(self):
        plain = self._remote_plain
        return bool(plain) if plain is not NOTHING else alone(self, "bool")

    def __contains__(self, item):
        plain = self._remote_plain
        if plain is not NOTHING:
            return item in plain
        if isinstance(item, RemoteHandle):
            return ask(self, "apply", "contains", item)
        return any(item is member or item == member for member in self)

    def __iter__(self):
        plain = self._remote_plain
        return iter(plain) if plain is not NOTHING else ask(self, "apply", "iter")

    def __next__(self):
        return ask(self, "apply", "next")

    def __len__(self):
        return alone(self, "len")

    def __getitem__(self, key):
        return ask(self, "apply", "getitem", key)

    def __setitem__(self, key, value):
        ask(self, "apply", "setitem", key, value)

    def __delitem__(self, key):
        ask(self, "apply", "delitem", key)

    def __enter__(self):
        return ask(self, "apply", "enter")

    def __exit__(self, kind, error, trace):
        return ask(self, "apply", "exit", None if kind is None else str(error))

    def __instancecheck__(self, instance):
        return (
            isinstance(instance, RemoteHandle)
            and ask(self, "apply", "isinstance", instance) is True
        )

    def __repr__(self):
        return alone(self, "repr")

    def __str__(self):
        return alone(self, "str")

    def __format__(self, spec: str):
        return alone(self, "format", spec)

    def __round__(self, digits=None):
        return alone(self, "round", digits)


def ask(remote: RemoteHandle, verb: str, *arguments):
    """Send a request about the handle to the other side."""
    return remote._remote_peer.use(verb, remote, *arguments)


def alone(remote: RemoteHandle, name: str, *arguments):
    """Return a plain value computed from the object alone."""
    if remote._remote_mixed:
        raise TypeError("the program's object has been combined with a value of the test")
    if remote._remote_plain is not NOTHING:
        return OPERATIONS[name](remote._remote_plain, *arguments)
    return ask(remote, "apply", name, *arguments)


def same(handle: RemoteHandle, operand) -> bool:
    """Compare for equality as the module's docstring describes."""
    plain = handle._remote_plain
    operand_plain = operand._remote_plain if isinstance(operand, RemoteHandle) else operand
    if plain is not NOTHING:
        return operand_plain is not NOTHING and bool(plain == operand_plain)
    if not isinstance(operand, RemoteHandle) or operand_plain is not NOTHING:
        return False
    return handle is operand or ask(handle, "apply", "eq", operand) is True


def by_order(name: str):
    """Build <, <=, > or >=, which compare plain contents, or handles by their common class."""

    def compare(self, operand):
        operand_plain = operand._remote_plain if isinstance(operand, RemoteHandle) else operand
        if self._remote_plain is not NOTHING and operand_plain is not NOTHING:
            return OPERATIONS[name](self._remote_plain, operand_plain)
        if not isinstance(operand, RemoteHandle):
            return NotImplemented
        return ask(self, "apply", name, operand)

    return compare


def by_arithmetic(name: str, turned: bool):
    """Build a binary operation."""

    def combine(self, operand):
        function = OPERATIONS[name]
        operand_plain = operand._remote_plain if isinstance(operand, RemoteHandle) else operand
        if self._remote_plain is not NOTHING and operand_plain is not NOTHING:
            pair = (
                (operand_plain, self._remote_plain)
                if turned
                else (self._remote_plain, operand_plain)
            )
            return function(*pair)
        pair = (operand, self) if turned else (self, operand)
        combined = self._remote_peer.use("apply", pair[0], name, pair[1])
        mixed = self._remote_mixed or not isinstance(operand, RemoteHandle) or operand._remote_mixed
        if mixed and not isinstance(combined, RemoteHandle):
            raise TypeError("the program's object would turn a value of the test into a plain one")
        if mixed:
            combined._remote_mixed, combined._remote_plain = True, NOTHING
        return combined

    return combine


def enter(thing):
    return type(thing).__enter__(thing)


def leave(thing, error):
    kinds = (None, None) if error is None else (Exception, Exception(error))
    return type(thing).__exit__(thing, *kinds, None)


ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
ORDER = ["lt", "le", "gt", "ge"]
ALONE = ["neg", "pos", "abs", "invert", "index", "int", "float", "complex", "trunc"]
OPERATIONS = {name: getattr(operator, name) for name in [*ARITHMETIC, *ORDER, "eq", "contains"]}
OPERATIONS |= {name: getattr(operator, name) for name in ("neg", "pos", "invert", "index")}
OPERATIONS |= {name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")}
OPERATIONS |= {f.__name__: f for f in (abs, int, float, complex, round, bool, len, str, repr)}
OPERATIONS |= {f.__name__: f for f in (format, hash, iter, next, isinstance, divmod)}
OPERATIONS |= {"trunc": __import__("math").trunc, "enter": enter, "exit": leave}
OPERATIONS["isinstance"] = lambda kind, thing: isinstance(thing, kind)

for _name in ORDER:
    setattr(RemoteHandle, f"__{_name}__", by_order(_name))
for _name in ARITHMETIC:
    setattr(RemoteHandle, f"__{_name.rstrip('_')}__", by_arithmetic(_name, False))
    setattr(RemoteHandle, f"__r{_name.rstrip('_')}__", by_arithmetic(_name, True))
for _name in ALONE:
    setattr(RemoteHandle, f"__{_name}__", lambda self, _name=_name: alone(self, _name))
