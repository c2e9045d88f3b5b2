"""Box: a keeper process and the cases that it runs for this one."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain.sandbox.confine import Limits
from jaxtrain.sandbox.tester import PASSED, READY

START_SECONDS = 30.0
"""A cell that has not started after so long never will; an honest one takes some milliseconds."""
PYTHON = [sys.executable, "-I", "-S", "-c"]
ROOT = str(Path(__file__).parents[2])
START = "import sys; sys.path.insert(0, sys.argv[1]); from jaxtrain.sandbox.keeper import main; "
START += "main(int(sys.argv[2]), sys.argv[3])"


class SandboxFailed(RuntimeError):
    """The sandbox itself did not work: no verdict about any program."""


class Box:
    """A context manager; `passes` runs one test against one program, in fresh processes."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *PYTHON,
                    START,
                    ROOT,
                    str(theirs.fileno()),
                    os.path.realpath(tempfile.gettempdir()),
                ],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.control.settimeout(START_SECONDS)
        self.namespaces = self.hear() == b"namespaces"
        """Whether cells have namespaces of their own here."""

    def hear(self) -> bytes:
        try:
            return self.control.recv(64)
        except OSError as error:
            self.close()
            raise SandboxFailed(f"its first process does not start: {error}") from None

    def passes(self, program: str, test: str, limits: Limits) -> bool:
        """Whether the test runs to its end without an exception.

        Raises SandboxFailed where no cell could be started, never for what a program does.
        """
        life, their_life = socket.socketpair()
        verdict, their_verdict = socket.socketpair()
        source, their_source = socket.socketpair()
        with life, verdict, source:
            with their_life, their_verdict, their_source:
                theirs = [one.fileno() for one in (their_life, their_verdict, their_source)]
                try:
                    socket.send_fds(self.control, [limits.to_json()], theirs)
                except OSError as error:
                    raise SandboxFailed(f"its first process is gone: {error}") from None
            try:
                return self.wait_for_verdict(verdict, source, program, test, limits)
            finally:
                self.end(life)

    def wait_for_verdict(self, verdict, source, program: str, test: str, limits: Limits) -> bool:
        for connection, text in ((verdict, test), (source, program)):
            connection.settimeout(START_SECONDS)
            try:
                connection.sendall(text.encode("utf-8", "replace"))
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise SandboxFailed(f"a cell does not start: {error}") from None
        try:
            first = verdict.recv(1)
        except OSError as error:
            raise SandboxFailed(f"a cell does not start: {error}") from None
        if first != READY:
            raise SandboxFailed("a cell ended before it ran anything: the machine refuses it")
        deadline = time.monotonic() + limits.seconds + 1
        verdict.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            return verdict.recv(1) == PASSED
        except OSError:
            return False

    def end(self, life: socket.socket) -> None:
        """Have everything of a case killed, and wait until it is."""
        life.settimeout(START_SECONDS)
        try:
            life.shutdown(socket.SHUT_WR)
            life.recv(1)
        except OSError as error:
            raise SandboxFailed(f"a case does not end: {error}") from None

    def close(self) -> None:
        """End the keeper, and with it whatever still runs."""
        self.control.close()
        try:
            self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "Box":
        return self

    def __exit__(self, *_) -> None:
        self.close()
