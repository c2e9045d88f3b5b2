"""Cell of the test: plain Python whose undefined names resolve to objects in the program's cell.

It alone sends the verdict, over a connection that the program's cell does not have.
"""

import ast
import builtins
import importlib
import io
import sys
from collections import deque
from typing import Any

from jaxtrain.environments.sandbox.peer import ConnectionClosed, SandboxPeer, find_stdlib
from jaxtrain.environments.sandbox.remote_handle import OPERATIONS, RemoteHandle

READY, PASSED = b"R", b"P"
ENDED = b"E"
"""Sent to a case's guard: the output was read. Sent by it: the program ended by itself."""
OWN_WORDS = {
    *("isinstance", "issubclass", "type", "callable", "hasattr", "getattr", "bool", "object"),
    *("id", "repr", "super", "exec", "eval", "compile"),
}
"""Builtins that a program can never replace, even if a test uses no other names."""
PLAIN_MODULES = {
    *("math", "cmath", "typing", "collections", "itertools", "functools", "operator", "string"),
    *("re", "datetime", "decimal", "fractions", "random", "statistics", "copy", "heapq", "bisect"),
    *(
        "json",
        "builtins",
        "_operator",
        "_functools",
        "_bisect",
        "_heapq",
        "_random",
        "_collections",
    ),
}
"""Modules whose functions a test may take from the program's imports, under their own names."""


class TestPeer(SandboxPeer):
    """Peer for calls of the program: replays its output and its changes of arguments."""

    __test__ = False
    stdlib_by_name = True

    def __init__(self, connection):
        super().__init__(connection, self.answer_program, RemoteHandle)

    def use(self, verb: str, *arguments) -> Any:
        try:
            reply = self.ask(verb, *arguments)
        except (StopIteration, StopAsyncIteration) as error:
            if verb == "apply" and arguments[1] == "next":
                raise
            # Like in a generator (PEP 479): `all(map(f, xs))` would take it for its own end.
            raise RuntimeError("the program raised StopIteration") from error
        value, printed, changes = read_reply(reply)
        sys.stdout.write(printed)
        if verb == "call":
            values = [*arguments[1], *arguments[2].values()]
            for index, content in changes:
                change(values[index], content)
        if isinstance(value, RemoteHandle) and value._remote_kind == "coroutine":
            return self.wait(value)
        return value

    async def wait(self, coroutine: RemoteHandle):
        return self.use("await", coroutine)

    def answer_program(self, verb: str, arguments: list):
        """Handle a program's request about an object that the test passed to it: calls, and
        operators and public attributes of instances of the test's own classes.

        Only objects that were passed count. Anything else that a message can name, such as the
        builtin `type`, would be the program's tool in this process: `type("X", (int,), {"__eq__":
        ...})` makes a value that equals whatever the test expects.
        """
        thing, *rest = arguments
        passed = id(thing) in self.numbers
        if verb == "call" and passed and callable(thing):
            positional, named = rest
            return thing(*positional, **named)
        name, *value = rest
        is_test_class = passed and type(thing).__module__ == "test"
        if is_test_class and type(name) is str and not name.startswith("_"):
            if verb == "apply":
                return OPERATIONS[name](thing, *value)
            if verb == "get":
                return getattr(thing, name)
            if verb == "set" and not is_method(type(thing), name):
                return setattr(thing, name, *value)
        raise TypeError(f"a program may not {verb} this")


def read_reply(reply) -> tuple[Any, str, list]:
    """Validate a reply: (value, output, changed arguments)."""
    if not (isinstance(reply, tuple) and len(reply) == 3 and isinstance(reply[1], str)):
        raise ConnectionClosed("not a reply")
    return reply


def change(old, new) -> None:
    """Assign the content of a mutable value to another of the same type."""
    if type(old) is not type(new):
        return
    if type(old) in (list, bytearray):
        old[:] = new
    elif type(old) in (dict, set, deque):
        old.clear()
        old.extend(new) if type(old) is deque else old.update(new)


def is_method(kind: type, name: str) -> bool:
    """Return True if an instance's own attribute would hide a method or computed attribute."""
    attribute = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return hasattr(type(attribute), "__get__") and not hasattr(type(attribute), "__set__")


class TestScope(dict):
    """Globals of a test; names that it does not define are the program's."""

    def __init__(self, tree: ast.Module, peer: TestPeer):
        super().__init__(__name__="test", __builtins__=builtins)
        self.peer = peer
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        assigned = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)} - assigned
        bases = {
            id(node.value): node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        alone = {node.id for node in names if id(node) not in bases}
        self.modules = (set(bases.values()) - alone - assigned) & sys.stdlib_module_names
        program_names = used - self.modules - set(dir(builtins))
        self.may_shadow = not program_names

    def __missing__(self, name: str):
        if name in self.modules:
            return importlib.import_module(name)
        if hasattr(builtins, name) and (not self.may_shadow or name in OWN_WORDS):
            raise KeyError(name)
        exists, value = self.peer.use("name", name)
        if exists is not True:
            raise KeyError(name)
        if isinstance(value, RemoteHandle) and value._remote_place is not None:
            module, stdlib_name = value._remote_place
            if stdlib_name == name and module in PLAIN_MODULES:
                return find_stdlib(module, stdlib_name)
        if isinstance(value, RemoteHandle):
            return self.as_error(value)
        return value

    def as_error(self, value: RemoteHandle):
        """Convert a handle of an exception class to a class for `except`; return others
        unchanged."""
        classes = self.peer.use("classes", value)
        return self.peer.error_class(list(classes)) if isinstance(classes, list) else value


def judge(test: str, program, verdict) -> None:
    """Run the test against the program's cell; sends PASSED if it reaches its end."""
    sys.stdout = io.StringIO()
    sys.argv = ["test.py"]
    peer = TestPeer(program)
    peer.use("run")
    tree = ast.parse(test)
    exec(compile(tree, "test.py", "exec", dont_inherit=True), TestScope(tree, peer))
    if not peer.ended:
        verdict.sendall(PASSED)
