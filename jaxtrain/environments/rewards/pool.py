"""Worker processes with hard timeouts: a call that hangs costs its process, never the run."""

import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

START_SECONDS = 60.0
"""Additional time of a worker's first call, which imports the modules of its functions."""


LONGEST_REPLY = 2**26
"""Limit of bytes; a worker that sends more is replaced."""
ANSWERED = ("ok", "user", "not_finite", "error")
"""Kinds of replies that a worker sends; the others are the pool's."""


class WorkerReply(NamedTuple):
    """Result of a call. It is sent as JSON: code that a reward runs must not reach the trainer,
    which unpickling would let it."""

    kind: str
    """ok, user (a mistake of the user), not_finite, error, timeout, crash."""
    value: Any
    """The numbers, or a text."""
    trace: str = ""
    """End of the traceback of an error."""

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "WorkerReply":
        """Decode a reply; ValueError for anything else."""
        match json.loads(data):
            case ["ok", None, ""]:
                return cls("ok", None)
            case ["ok", list(values), ""] if all(map(is_score, values)):
                return cls("ok", values)
            case [str(kind), str(text), str(trace)] if kind in ANSWERED[1:]:
                return cls(kind, text, trace)
        raise ValueError("no reply")


class Worker:
    """Process with a pipe to it."""

    def __init__(self) -> None:
        parent_end, worker_end = socket.socketpair()
        with worker_end:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jaxtrain.environments.rewards.worker",
                    str(worker_end.fileno()),
                ],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths())},
                start_new_session=True,
            )
        self.pipe = Connection(parent_end.detach())
        self.used = False

    def call(self, name: str, arguments: dict[str, Any] | None, timeout: float) -> WorkerReply:
        """Run a function; the worker is dead after a timeout or a crash."""
        seconds = timeout if self.used else timeout + START_SECONDS
        self.used = True
        try:
            self.pipe.send((name, arguments))
            if not self.pipe.poll(seconds):
                return WorkerReply("timeout", f"took more than {timeout:g} seconds")
            data = self.pipe.recv_bytes(LONGEST_REPLY)
        except (EOFError, OSError):
            code = self.process.poll()
            return WorkerReply("crash", f"its process ended (exit code {code})")
        try:
            return WorkerReply.from_bytes(data)
        except (ValueError, RecursionError):
            return WorkerReply("crash", "its process sent something else than a reply")

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self.pipe.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class WorkerPool:
    """Pool of `size` workers, started on demand; `call` may be used from many threads."""

    def __init__(self, size: int):
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        self.size = size
        for _ in range(size):
            self.idle.put(None)

    def call(self, name: str, arguments: dict[str, Any] | None, timeout: float) -> WorkerReply:
        """Run a function in the next idle worker; waits for one."""
        worker = self.idle.get()
        try:
            if worker is None:
                worker = Worker()
            reply = worker.call(name, arguments, timeout)
            if reply.kind in ("timeout", "crash"):
                worker.kill()
                worker = None
            return reply
        except BaseException:
            if worker is not None:
                worker.kill()
                worker = None
            raise
        finally:
            self.idle.put(worker)

    def close(self, seconds: float = 5.0) -> None:
        """Kill all workers. Those still busy after `seconds` end by themselves when their parent
        does."""
        deadline = time.monotonic() + seconds
        for _ in range(self.size):
            try:
                worker = self.idle.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            if worker is not None:
                worker.kill()


def is_score(value: Any) -> bool:
    """Return True for a finite number or None."""
    return value is None or type(value) in (int, float) and math.isfinite(value)


def _paths() -> list[str]:
    """Return the import path of a worker: this package and the parent's path."""
    package_root = str(Path(__file__).parents[3])
    return list(dict.fromkeys([package_root, *[path for path in sys.path if path]]))


def _has_fileno(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
