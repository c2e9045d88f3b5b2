"""Server processes of a run: started with it, ended with it, whatever ends it.

    this process ── pipe ──> hold.py ── its own session ──> the command and all that it starts

Not the death signal that Linux offers children: it is sent when the thread that started them ends.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtrain.errors import UserError

HOLD = Path(__file__).with_name("hold.py")
MORE_SECONDS = 5.0
"""For what is left after SIGKILL to be gone."""


class ServerProcess:
    """One command with a log. Started, polled and stopped from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        log: Path,
        port: int,
        cwd: Path | None = None,
    ):
        """env: all of its environment; None: this process's. log: gets its output, appended. port:
        the one it is told to listen on, for whoever asks it."""
        self.command, self.env, self.log, self.port = list(command), env, log, port
        self.cwd = cwd
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """UserError where the command or its folder is not there."""
        assert self._process is None, "a server process is started once"
        if self.cwd is not None and not self.cwd.is_dir():
            raise UserError(f"no such folder: {self.cwd}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HOLD), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Its exit status, 128 + N after signal N; None while it runs."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def stop(self, seconds: float = 10.0) -> int:
        """End it and all that it started: SIGTERM, and after so many seconds SIGKILL. Its exit
        status; again: the same."""
        assert self._process is not None, "start() comes first"
        pipe = self._process.stdin
        assert pipe is not None
        try:
            if not pipe.closed:
                os.write(pipe.fileno(), f"{seconds}\n".encode())
            pipe.close()
        except BrokenPipeError:  # it has ended by itself
            pass
        try:
            return self._process.wait(seconds + MORE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
