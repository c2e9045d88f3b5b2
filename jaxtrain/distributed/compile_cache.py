"""On-disk cache of compiled programs.

jax keys a program by its text, compile options and versions, not by the machine. Programs for CPUs
hold instructions of the one that compiled them, so they lie in a folder of that kind of CPU.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 20 * 2**30
"""Size beyond which the least recently used programs are deleted."""


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
