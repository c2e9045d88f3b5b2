"""Cell of the program: runs it, then serves requests of the test's cell.

It receives the program and the arguments of calls, but never the expected values.
"""

import asyncio
import io
import linecache
import sys
import traceback
import types
from collections import deque

from jaxtrain.environments.sandbox.peer import SandboxPeer, find_stdlib
from jaxtrain.environments.sandbox.remote_handle import OPERATIONS, RemoteHandle

PRINTED = 2**20
"""Limit of characters of output returned per call."""


class ProgramPeer(SandboxPeer):
    """Peer that resolves objects of the standard library to the program's own copies."""

    def unpack_import(self, rest: list):
        return find_stdlib(*rest[:2])


class Program:
    """Module of the program, and handlers of requests about it."""

    def __init__(self, source: str):
        self.source = source
        self.module = types.ModuleType("__main__")
        self.output = io.StringIO()

    def serve(self, connection) -> None:
        """Answer requests until the test's cell has ended."""
        sys.modules["__main__"] = self.module
        sys.argv = ["program.py"]
        sys.stdout = self.output
        self.peer = ProgramPeer(connection, self.answer, RemoteHandle)
        self.peer.serve()

    def answer(self, verb: str, arguments: list):
        """Handle a request: (value, output, [(index of an argument, its new content)])."""
        self.output.seek(0)
        self.output.truncate()
        value, changes = getattr(self, f"do_{verb}")(*arguments)
        return value, self.output.getvalue()[:PRINTED], changes

    def do_run(self):
        code = compile(self.source, "program.py", "exec", dont_inherit=True)
        exec(code, self.module.__dict__)
        return None, []

    def do_name(self, name: str):
        if name not in self.module.__dict__:
            return (False, None), []
        return (True, self.module.__dict__[name]), []

    def do_call(self, function, arguments: tuple, named: dict):
        values = [*arguments, *named.values()]
        before = [self.peer.pack(value) if is_mutable(value) else None for value in values]
        value = function(*arguments, **named)
        if isinstance(value, RemoteHandle):
            return value, []
        changes = [
            (index, item)
            for index, (item, old) in enumerate(zip(values, before, strict=True))
            if is_mutable(item) and self.peer.pack(item) != old
        ]
        return value, changes

    def do_get(self, thing, name: str):
        return getattr(thing, name), []

    def do_set(self, thing, name: str, value):
        setattr(thing, name, value)
        return None, []

    def do_delete(self, thing, name: str):
        delattr(thing, name)
        return None, []

    def do_apply(self, thing, name: str, *operands):
        return OPERATIONS[name](thing, *operands), []

    def do_classes(self, thing):
        """Return the bases of an exception class for `SandboxPeer.error_class`; None for others."""
        if not (isinstance(thing, type) and issubclass(thing, BaseException)):
            return None, []
        return self.peer.classes_of(thing), []

    def do_await(self, coroutine):
        return asyncio.run(coroutine), []


def show(source: str) -> None:
    """Run a program, with its output and the traceback of its exception on descriptor 1."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, ["program.py"]
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    linecache.cache["program.py"] = (len(source), None, source.splitlines(True), "program.py")
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        pass
    except BaseException as error:
        frames = error.__traceback__
        traceback.print_exception(type(error), error, frames and frames.tb_next)
    finally:
        sys.stdout.flush()


def is_mutable(value) -> bool:
    """Return True for a type whose values a call may change."""
    return type(value) in (list, dict, set, bytearray, deque)
