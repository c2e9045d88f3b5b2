"""Compiled programs of accelerators, kept on disk between runs."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MOST_BYTES = 20 * 2**30
"""Beyond it the least recently used programs go."""


def default_folder() -> Path:
    """Where compiled programs lie unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "jaxtrain" / "compiled"


def keep_compiled() -> Path | None:
    """Let jax keep what it compiles from now on in `default_folder`, and look there first.

    Changes nothing, and returns None, where somebody has named a folder already, on CPUs (whose
    programs another CPU of the same home directory may not run), and where the folder cannot be
    written to: that costs the time to compile, not the run.
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
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    compilation_cache.set_cache_dir(str(folder))
    compilation_cache.reset_cache()  # what was compiled before settled that there is none
    return folder
