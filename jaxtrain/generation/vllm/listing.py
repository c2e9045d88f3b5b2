"""servers.json in the run's folder: which servers answer for the run, for who looks at it.

[{"url", "state", "version", "in_flight", "why", "since"}]: states of pool.py, unix seconds.
Replaced whenever something of it is another, once a second at most. No jax.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config.secrets import redact_text
from jaxtrain.generation.vllm.pool import VllmServer
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.text_safety import escape_control_chars, shorten

SECONDS = 1.0
"""Between two looks."""


class Listing:
    """Context: keeps the file. A full disk or a lost folder costs the file, never the run."""

    def __init__(self, path: Path, servers: Callable[[], Sequence[VllmServer]]):
        self.path, self.servers = path, servers
        self._written = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="listing", daemon=True)

    def __enter__(self) -> "Listing":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._write()

    def _watch(self) -> None:
        self._write()
        while not self._stop.wait(SECONDS):
            self._write()

    def _write(self) -> None:
        text = json.dumps([describe(server) for server in self.servers()], indent=1)
        if text != self._written and self.path.parent.is_dir():
            with contextlib.suppress(OSError):
                write_atomically(self.path, text, durable=False)
                self._written = text


def describe(server: VllmServer) -> dict[str, Any]:
    """A server as people see it, without the password of its URL."""
    why = "" if server.state == "up" else server.why
    if server.keeps:
        why = f"keeps version {server.kept} for an evaluation"
    return {
        "url": redact_text(server.url),
        "state": server.state,
        "version": server.version if server.version >= 0 else None,
        "in_flight": server.in_flight,
        "why": shorten(redact_text(escape_control_chars(why)), 300),
        "since": round(server.since, 3),
    }
