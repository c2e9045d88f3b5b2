"""For environments and tools: run a program that the model wrote, beside the event loop.

ran = await run_python(answer_code)
chat.say(ran.output or "(it printed nothing)")
"""

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.sandbox import Sandbox, SandboxFailed, SandboxResult
from jaxtrain.errors import UserError


class SandboxPool:
    """One Box for the whole process, made when it is first needed, and threads to wait for it."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, "sandbox")
        self.lock = threading.Lock()
        self.box: Sandbox | None = None

    def run(self, program: str, limits: ResourceLimits, longest: int) -> SandboxResult:
        """See Box.run. A box that failed is replaced with the next call."""
        with self.lock:
            box = self.box = self.box or Sandbox()
        try:
            return box.run(program, limits, longest)
        except SandboxFailed:
            with self.lock:
                if self.box is box:
                    self.box = None
            raise


BOXES = SandboxPool()


async def run_python(
    program: str, *, seconds: float = 4.0, memory_mib: int = 512, longest: int = 10_000
) -> SandboxResult:
    """What a Python program prints: standard library, no network, no files but its own folder; see
    docs/sandbox.md.

    seconds: of processor, and as much clock time and 1. memory_mib: of each of its processes.
    longest: bytes that it may print. As many run side by side as there are cores; others wait.
    Raises SandboxFailed where nothing can be run, UserError elsewhere than on Linux.
    """
    if sys.platform != "linux":
        raise UserError("run_python works on Linux alone: its sandbox is made of Linux")
    if not (0 < seconds <= 3600) or not (64 <= memory_mib <= 2**20) or longest < 1:
        raise UserError(
            f"run_python: seconds {seconds} must be above 0 (at most 3600), memory_mib {memory_mib}"
            f" at least 64 (at most {2**20}), and longest {longest} at least 1"
        )
    limits = ResourceLimits(seconds, memory_mib)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(BOXES.threads, BOXES.run, program, limits, longest)
