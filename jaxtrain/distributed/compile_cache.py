"""On-disk cache of compiled programs for accelerators."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 20 * 2**30
"""Size beyond which the least recently used programs are deleted."""


def default_folder() -> Path:
    """Return the cache's folder unless JAX_COMPILATION_CACHE_DIR overrides it."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jaxtrain" / "compiled"


def keep_compiled() -> Path | None:
    """Have jax cache what it compiles from now on in `default_folder`.

    Does nothing, and returns None, if a folder is configured already, on CPUs (another CPU that
    shares the home directory may not run their programs), and if the folder is not writable: that
    costs compile time, not the run.
    """
    named = getattr(jax.config, "jax_compilation_cache_dir", None)
    if named or jax.default_backend() == "cpu":
        return None
    folder = default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    compilation_cache.set_cache_dir(str(folder))
    compilation_cache.reset_cache()  # what was compiled before settled that there is none
    return folder
