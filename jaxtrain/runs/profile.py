"""A jax.profiler trace over a window of steps, and profiles of the devices' memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class ProfileWindow:
    """Context: traces the steps start ... start + steps - 1 into `folder`; None: no trace."""

    def __init__(
        self,
        folder: str | Path,
        start: int | None,
        steps: int,
        log: Callable[[str], object] = print,
    ):
        self.folder, self.start, self.steps = Path(folder), start, steps
        self.log = log
        self.tracing = False

    def before(self, step: int, state: Any) -> None:
        """Call before step `step` (counted from 1) is dispatched, with the state it starts from."""
        if self.start is None:
            return
        if self.tracing and step >= self.start + self.steps:
            self._finish(state)
        elif self.start == step:
            # Steps dispatched earlier do not belong to the window.
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.folder))
            self.tracing = True

    def close(self, state: Any = None) -> None:
        """Write a trace that is still open when training ends."""
        if self.tracing:
            self._finish(state)

    def __enter__(self) -> "ProfileWindow":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _finish(self, state: Any) -> None:
        jax.block_until_ready(state)
        jax.profiler.stop_trace()
        self.tracing = False
        self.log(save_memory(self.folder))


def save_memory(folder: Path) -> str:
    """Write `folder`/memory-N.prof of process N, in pprof's format: which lines of Python hold how
    much of the devices' memory. Returns a line for the log; never raises, because it also runs
    after errors."""
    path = folder / f"memory-{jax.process_index()}.prof"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.save_device_memory_profile(str(path))
    except (OSError, RuntimeError) as error:  # the device or the disk may be what failed
        return f"warning: no memory profile was written: {str(error).partition(chr(10))[0][:200]}"
    return f"{path}: what holds the devices' memory (to look at: go tool pprof -top {path.name})"
