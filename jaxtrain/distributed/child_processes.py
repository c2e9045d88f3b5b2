"""Server processes of a run: started with it, ended with it, whatever ends it.

    this process ── pipe ──> run_supervised.py ── a session ──> the command and all its children

Linux's parent-death signal would not do: it is sent when the thread that started the child ends.
If `run_supervised.py` itself is killed, its session is ended here; if both are, `orphans.py` finds
the remaining processes by a note that the next run reads.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxtrain.distributed.orphans import list_session, write_note
from jaxtrain.errors import UserError

SUPERVISOR = Path(__file__).with_name("run_supervised.py")
KILL_SECONDS = 5.0
"""Time for processes to disappear after SIGKILL."""
POLL_SECONDS = 0.02


class ServerProcess:
    """A command with a log. Started, polled and stopped from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        log: Path,
        port: int,
        cwd: Path | None = None,
        note: Path | None = None,
    ):
        """env: its whole environment; None: this process's. log: receives its output, appended.
        port: the one it listens on, for callers. note: file that identifies it as long as it runs,
        for `orphans.end_orphans`."""
        self.command, self.env, self.log, self.port = list(command), env, log, port
        self.cwd, self.note = cwd, note
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Start it; UserError if the command or its folder does not exist."""
        assert self._process is None, "a server process is started once"
        if self.cwd is not None and not self.cwd.is_dir():
            raise UserError(f"no such folder: {self.cwd}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.env,
                cwd=self.cwd,
                start_new_session=True,
            )
        if self.note is not None:
            write_note(self.note, self._process.pid)

    def poll(self) -> int | None:
        """Return its exit status, 128 + N after signal N; None while it runs."""
        assert self._process is not None, "start() comes first"
        self._end_group()
        return self._end(self._process.poll())

    def stop(self, seconds: float = 10.0) -> int:
        """End it and everything that it started: SIGTERM, and after so many seconds SIGKILL.

        Returns its exit status; may be called again.
        """
        assert self._process is not None, "start() comes first"
        pipe = self._process.stdin
        assert pipe is not None
        try:
            if not pipe.closed:
                os.write(pipe.fileno(), f"{seconds}\n".encode())
            pipe.close()
        except BrokenPipeError:  # it has ended by itself
            pass
        end = time.monotonic() + seconds + KILL_SECONDS
        while not self._end_group() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if not self._end_group():
            self._process.kill()
            while not self._end_group():
                time.sleep(POLL_SECONDS)
        status = self._end(self._process.wait())
        assert status is not None
        return status

    def _end(self, status: int | None) -> int | None:
        """Convert an exit status, and remove the note once it has ended."""
        if status is None:
            return None
        if self.note is not None:
            self.note.unlink(missing_ok=True)
        return status if status >= 0 else 128 - status

    def _end_group(self) -> bool:
        """Return True if run_supervised.py has ended. If it was killed, its whole session is, too,
        before its process id is released and may be reused."""
        assert self._process is not None
        try:
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            exit_info = os.waitid(os.P_PID, self._process.pid, options)
        except ChildProcessError:  # it was seen to end before
            return True
        if exit_info is not None and exit_info.si_code != os.CLD_EXITED:
            for pid in list_session(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return exit_info is not None
