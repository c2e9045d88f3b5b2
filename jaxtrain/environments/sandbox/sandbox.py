"""Box: a keeper process and the cases that it runs for this one."""

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
"""A cell that has not started after so long never will; an honest one takes some milliseconds."""
PYTHON = [sys.executable, "-I", "-S", "-c"]
ROOT = str(Path(__file__).parents[3])
START = "import sys; sys.path.insert(0, sys.argv[1]); from jaxtrain.environments.sandbox.supervisor import main; "
START += "main(int(sys.argv[2]), sys.argv[3])"


class SandboxResult(NamedTuple):
    """What became of a program."""

    output: str
    """What it printed, and the traceback of what it raised."""
    finished: bool
    """Whether it came to its end; False: out of time or memory, killed, or too much was printed."""


class SandboxFailed(RuntimeError):
    """The sandbox itself did not work: no verdict about any program."""


class Sandbox:
    """A context manager; each call has fresh processes. Threads may call side by side."""

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
        self.namespaces = self.hear() == b"namespaces"
        """Whether cells have namespaces of their own here."""

    def hear(self) -> bytes:
        try:
            return self.control.recv(64)
        except OSError as error:
            self.close()
            raise SandboxFailed(f"its first process does not start: {error}") from None

    def passes(self, program: str, test: str, limits: ResourceLimits) -> bool:
        """Whether the test runs to its end without an exception.

        Raises SandboxFailed where no cell could be started, never for what a program does.
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
        """What a program prints, up to `longest` bytes; it may read nothing.

        Raises SandboxFailed where no cell could be started, never for what a program does.
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
        """Have the keeper start a case, with these connections."""
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
        """What cells read before they do anything."""
        for connection, text in texts:
            connection.settimeout(START_SECONDS)
            try:
                connection.sendall(text.encode("utf-8", "replace"))
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise SandboxFailed(f"a cell does not start: {error}") from None

    def wait_until_ready(self, connection: socket.socket, limits: ResourceLimits) -> float:
        """When a cell has begun: the time by which it has to end."""
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
        """(what comes, whether all of it came)."""
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
        """Have everything of a case killed, and wait until it is; what its guard said."""
        life.settimeout(START_SECONDS)
        message = b""
        try:
            life.shutdown(socket.SHUT_WR)
            while part := life.recv(64):
                message += part
            return message
        except ConnectionError:  # the guard had ended all of it before
            return message
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

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_) -> None:
        self.close()
