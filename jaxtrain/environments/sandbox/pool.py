"""Runs programs of the model for environments and tools, without blocking the event loop.

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
    """Sandbox shared by the whole process, opened on demand, with threads that wait for it."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(os.cpu_count() or 1, "sandbox")
        self.lock = threading.Lock()
        self.box: Sandbox | None = None

    def run(self, program: str, limits: ResourceLimits, longest: int) -> SandboxResult:
        """Run a program (see Sandbox.run). A failed sandbox is replaced with the next call."""
        with self.lock:
            box = self.box = self.box or Sandbox()
        try:
            return box.run(program, limits, longest)
        except SandboxFailed:
            with self.lock:
                if self.box is box:
                    self.box = None
            raise


POOL = SandboxPool()


async def run_python(
    program: str, *, seconds: float = 4.0, memory_mib: int = 512, longest: int = 10_000
) -> SandboxResult:
    """Run a Python program and return its output: standard library only, no network, no files but
    its own folder; see docs/sandbox.md.

    seconds: limit of CPU time, and of wall time plus 1. memory_mib: limit of each of its processes.
    longest: limit of output bytes. As many programs run concurrently as there are cores. Raises
    SandboxFailed if nothing can be run, UserError on other systems than Linux.
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
    return await loop.run_in_executor(POOL.threads, POOL.run, program, limits, longest)
