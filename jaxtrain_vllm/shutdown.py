"""Graceful shutdown of a server: it announces the end, finishes its requests, then ends.

    SIGTERM ─> draining: /health and new requests are answered 503 "draining: ... 57 s"
                  │  clients go elsewhere; requests in flight continue
                  └─ none left, the seconds are over, or a second SIGTERM ─> SIGINT: vLLM ends

This replaces vLLM's own handler of SIGTERM, which aborts all requests at once; that of SIGINT
stays. The signal must go to the server's first process alone: its engine would end immediately.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable

VARIABLE = "JAXTRAIN_DRAIN_SECONDS"
POLL_SECONDS = 0.1


def end_process() -> None:
    """Have vLLM shut down."""
    os.kill(os.getpid(), signal.SIGINT)


class ShutdownState:
    """State of a server's shutdown. Used by its event loop."""

    def __init__(self, seconds: float, end: Callable[[], None] = end_process):
        """seconds: for requests in flight; 0: SIGTERM is left to vLLM."""
        self.seconds, self.end = seconds, end
        self.running = 0
        """Requests in flight."""
        self._until: float | None = None
        self._task: asyncio.Task | None = None

    @property
    def draining(self) -> bool:
        """Return True once the shutdown has begun."""
        return self._until is not None

    def install_handler(self) -> None:
        """Handle SIGTERM from now on, in the running event loop."""
        if self.seconds > 0:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.begin)

    def begin(self) -> None:
        """Start draining; end at once if it was started before."""
        if self.draining:
            self._until = time.monotonic()
            return
        self._until = time.monotonic() + self.seconds
        print(f"{self.describe()}, {self.running} requests under way", flush=True)
        self._task = asyncio.get_running_loop().create_task(self._wait())

    def describe(self) -> str:
        """Return the message for clients."""
        seconds = max(0.0, (self._until or 0.0) - time.monotonic())
        return f"draining: this server ends within {seconds:.0f} s"

    async def _wait(self) -> None:
        while self.running and time.monotonic() < (self._until or 0.0):
            await asyncio.sleep(POLL_SECONDS)
        self.end()
