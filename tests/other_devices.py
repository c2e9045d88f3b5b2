"""Programs compiled for devices that need not be there, each in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest


def need_hopper_compiler(ptxas: Path | None = None) -> None:
    """Skip unless this Python can compile for sm_90a."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt")
    if ptxas is not None and not ptxas.exists():
        pytest.skip(f"needs {ptxas}")
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"kernels and plugin are for jax 0.11, found {jax.__version__}")


def set_cpus(count: int) -> dict[str, str]:
    """Set a process up with so many fake CPU devices and the compilation of the tests."""
    flag = "--xla_force_host_platform_device_count="
    retained = [word for word in os.environ["XLA_FLAGS"].split() if not word.startswith(flag)]
    return {"XLA_FLAGS": " ".join([*retained, f"{flag}{count}"])}


def run_script(script: Path, *words: str, **variables: str) -> str:
    """Return the output of a script, with jax's defaults: no platform chosen, no cache."""
    chosen = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    chosen += ("JAX_DISABLE_MOST_OPTIMIZATIONS",)
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
