"""How a server leaves: it says so, ends what it has begun, and then ends itself.

    SIGTERM ─> draining: /health and new requests are answered 503 "draining: ... 57 s"
                  │  who asks goes elsewhere; requests under way go on
                  └─ none is left, the seconds are over, or a second SIGTERM ─> SIGINT: vLLM ends

vLLM's own handler of SIGTERM, which gives up all requests at once, is replaced; that of SIGINT is
not. The signal is for the server's first process: its engine, told as well, would end at once.
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
    """What a server knows of its own end. Used by its event loop."""

    def __init__(self, seconds: float, end: Callable[[], None] = end_process):
        """seconds: for requests that are under way; 0: SIGTERM is left to vLLM."""
        self.seconds, self.end = seconds, end
        self.running = 0
        """Requests under way."""
        self._until: float | None = None
        self._task: asyncio.Task | None = None

    @property
    def draining(self) -> bool:
        """Whether it is about to leave."""
        return self._until is not None

    def install_handler(self) -> None:
        """Hear SIGTERM from now on, in the running event loop."""
        if self.seconds > 0:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.begin)

    def begin(self) -> None:
        """Drain; at once where that was asked before."""
        if self.draining:
            self._until = time.monotonic()
            return
        self._until = time.monotonic() + self.seconds
        print(f"{self.describe()}, {self.running} requests under way", flush=True)
        self._task = asyncio.get_running_loop().create_task(self._wait())

    def describe(self) -> str:
        """What whoever asks is told."""
        seconds = max(0.0, (self._until or 0.0) - time.monotonic())
        return f"draining: this server ends within {seconds:.0f} s"

    async def _wait(self) -> None:
        while self.running and time.monotonic() < (self._until or 0.0):
            await asyncio.sleep(POLL_SECONDS)
        self.end()
