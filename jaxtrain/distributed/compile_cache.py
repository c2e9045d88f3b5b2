"""On-disk cache of compiled programs.

jax keys a program by its text, compile options and versions, not by the machine. Programs for CPUs
hold instructions of the one that compiled them, so they lie in a folder of that kind of CPU.
"""

import hashlib
import os
import platform
import threading
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 20 * 2**30
"""Size beyond which the least recently used programs are deleted."""


TRACED = "/jax/core/compile/jaxpr_trace_duration"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Context that counts what jax compiles in it."""

    def __init__(self) -> None:
        self.programs, self.cached = 0, 0
        self.seconds = dict.fromkeys(("tracing", "lowering", "XLA"), 0.0)
        """Tracing, lowering and XLA of all programs, whichever thread compiled them."""
        self.ahead: set[int] = set()
        """Threads that compile beside the work, which does not wait for them."""
        self.blocked = 0.0
        """Seconds of all other threads."""
        self._traced: dict[int, float] = {}
        """Seconds of each thread's last trace: those of the functions within are part of it."""
        self._current: dict[int, str] = {}
        self._lock = threading.Lock()
        """Several threads compile at the same time, and their sums are not atomic."""

    @property
    def current(self) -> str:
        """Name of a program that XLA compiles now, or "". A jitted function's name."""
        return next(iter(list(self._current.values())), "")

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._add_seconds)
        jax.monitoring.register_event_listener(self._add_hit)
        return self

    def __exit__(self, *exc_info: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add_seconds)
        jax.monitoring.unregister_event_listener(self._add_hit)

    def describe(self) -> str:
        """Return a line: programs, those read from the cache on disk, and seconds."""
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items()]
        return (
            f"programs: {self.programs}, {self.cached} of them from the cache on disk;"
            f" {', '.join(parts)}"
        )

    def _add_seconds(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        with self._lock:
            self._add(event, duration_secs, **kwargs)

    def _add(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        thread, seconds = threading.get_ident(), duration_secs
        if event == TRACED:
            self._traced[thread] = seconds
            return
        if event == LOWERED:
            self.seconds["tracing"] += (traced := self._traced.pop(thread, 0.0))
            self.seconds["lowering"] += seconds
            seconds += traced
            self._current[thread] = read_name(kwargs.get("fun_name"))
        elif event == COMPILED:
            self.programs += 1
            self.seconds["XLA"] += seconds
            self._current.pop(thread, None)
        else:
            return
        if thread not in self.ahead:
            self.blocked += seconds

    def _add_hit(self, event: str, **values: Any) -> None:
        with self._lock:
            self.cached += event == "/jax/compilation_cache/cache_hits"


def read_name(name: object) -> str:
    """Return a function's name from jax's "jit(name)"."""
    return str(name or "a program").removeprefix("jit(").removesuffix(")")


def default_folder() -> Path:
    """Return the cache's folder unless JAX_COMPILATION_CACHE_DIR overrides it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jaxtrain" / "compiled"


def describe_cpu() -> str:
    """Return a name of this machine's kind of CPU: equal names have equal instructions."""
    lines = set()
    try:
        with open("/proc/cpuinfo") as file:
            kinds = ("model name", "flags", "Features", "CPU part")
            lines = {line.strip() for line in file if line.startswith(kinds)}
    except OSError:
        pass
    text = "\n".join([platform.machine(), platform.processor(), *sorted(lines)])
    return "cpu-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_compiled() -> Path | None:
    """Have jax cache what it compiles from now on in `default_folder`, however short it compiles: a
    run has many small programs.

    Does nothing, and returns None, if a folder is configured already, and if the folder is not
    writable: that costs compile time, not the run.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return None
    folder = default_folder()
    if jax.default_backend() == "cpu":
        folder /= describe_cpu()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    compilation_cache.set_cache_dir(str(folder))
    compilation_cache.reset_cache()  # what was compiled before settled that there is none
    return folder
