"""Sandbox: a supervisor process, and the cases that it runs for this process."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.tester import ENDED, PASSED, READY

START_SECONDS = 30.0
"""Time limit for the start of a cell, which normally takes a few milliseconds."""
PYTHON = [sys.executable, "-I", "-S", "-c"]
ROOT = str(Path(__file__).parents[3])
START = "import sys; sys.path.insert(0, sys.argv[1]); "
START += "from jaxtrain.environments.sandbox.supervisor import main; "
START += "main(int(sys.argv[2]), sys.argv[3])"


class SandboxResult(NamedTuple):
    """Result of a program."""

    output: str
    """Output, with the traceback of an exception."""
    finished: bool
    """True if it ended by itself; False: out of time or memory, killed, or too much output."""


class SandboxFailed(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


class Sandbox:
    """Context manager whose calls each have fresh processes. Thread-safe."""

    def __init__(self) -> None:
        self.control, supervisor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with supervisor_end:
            self.process = subprocess.Popen(
                [
                    *PYTHON,
                    START,
                    ROOT,
                    str(supervisor_end.fileno()),
                    os.path.realpath(tempfile.gettempdir()),
                ],
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[supervisor_end.fileno()],
                start_new_session=True,
            )
        self.control.settimeout(START_SECONDS)
        self.namespaces = self._receive() == b"namespaces"
        """True if cells have their own namespaces on this machine."""

    def _receive(self) -> bytes:
        try:
            return self.control.recv(64)
        except OSError as error:
            self.close()
            raise SandboxFailed(f"its first process does not start: {error}") from None

    def passes(self, program: str, test: str, limits: ResourceLimits) -> bool:
        """Return True if the test runs to its end without an exception.

        Raises SandboxFailed if no cell could be started, never for actions of a program.
        """
        life, their_life = socket.socketpair()
        verdict, their_verdict = socket.socketpair()
        source, their_source = socket.socketpair()
        with life, verdict, source:
            self.begin(limits, their_life, their_verdict, their_source)
            try:
                return self.wait_for_verdict(verdict, source, program, test, limits)
            finally:
                self.end(life)

    def run(self, program: str, limits: ResourceLimits, longest: int = 10_000) -> SandboxResult:
        """Run a program without input and return its output, up to `longest` bytes.

        Raises SandboxFailed if no cell could be started, never for actions of a program.
        """
        life, their_life = socket.socketpair()
        output, their_output = socket.socketpair()
        with life, output:
            self.begin(limits, their_life, their_output)
            try:
                self.send([(output, program)])
                text, read = self.read_output(output, limits, longest)
                if read:
                    with suppress(OSError):
                        life.send(ENDED)
            finally:
                ended = self.end(life)
        return SandboxResult(text.decode("utf-8", "replace"), ended == ENDED)

    def begin(self, limits: ResourceLimits, *case_ends: socket.socket) -> None:
        """Start a case in the supervisor, with these connections."""
        try:
            socket.send_fds(
                self.control, [limits.to_json()], [connection.fileno() for connection in case_ends]
            )
        except OSError as error:
            raise SandboxFailed(f"its first process is gone: {error}") from None
        finally:
            for connection in case_ends:
                connection.close()

    def send(self, texts: Iterable[tuple[socket.socket, str]]) -> None:
        """Send the texts that cells read first."""
        for connection, text in texts:
            connection.settimeout(START_SECONDS)
            try:
                connection.sendall(text.encode("utf-8", "replace"))
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise SandboxFailed(f"a cell does not start: {error}") from None

    def wait_until_ready(self, connection: socket.socket, limits: ResourceLimits) -> float:
        """Wait until a cell has started; return its deadline."""
        try:
            first = connection.recv(1)
        except OSError as error:
            raise SandboxFailed(f"a cell does not start: {error}") from None
        if first != READY:
            raise SandboxFailed("a cell ended before it ran anything: the machine refuses it")
        return time.monotonic() + limits.seconds + 1

    def wait_for_verdict(
        self, verdict, source, program: str, test: str, limits: ResourceLimits
    ) -> bool:
        self.send([(verdict, test), (source, program)])
        deadline = self.wait_until_ready(verdict, limits)
        verdict.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            return verdict.recv(1) == PASSED
        except OSError:
            return False

    def read_output(self, output, limits: ResourceLimits, longest: int) -> tuple[bytes, bool]:
        """Return (output, True if it is complete)."""
        deadline, received = self.wait_until_ready(output, limits), b""
        try:
            while len(received) <= longest:
                output.settimeout(max(0.01, deadline - time.monotonic()))
                part = output.recv(1 << 16)
                if not part:
                    return received, True
                received += part
        except OSError:
            pass
        return received[:longest], False

    def end(self, life: socket.socket) -> bytes:
        """Kill all processes of a case and wait until they have ended; return its guard's
        message."""
        life.settimeout(START_SECONDS)
        message = b""
        try:
            life.shutdown(socket.SHUT_WR)
            while part := life.recv(64):
                message += part
            return message
        except ConnectionError:  # the guard had already ended the case
            return message
        except OSError as error:
            raise SandboxFailed(f"a case does not end: {error}") from None

    def close(self) -> None:
        """End the supervisor, and with it all running cases."""
        self.control.close()
        try:
            self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()
