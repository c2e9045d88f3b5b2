"""Probe of jax in a separate process: a driver or a TPU that hangs, or a jax that cannot be
imported, ends that process and nothing else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from typing import Any

PROGRAM = r"""
import json, sys, time, warnings
def report(**facts):
    print("\n@" + json.dumps(facts), flush=True)
warnings.simplefilter("always")
start = time.monotonic()
report(stage="import jax")
import jax
report(stage="find devices", jax=jax.__version__)
devices = jax.local_devices()
report(backend=jax.default_backend(), devices=[
    {"platform": d.platform, "kind": d.device_kind,
     "capability": getattr(d, "compute_capability", None),
     "memory": (d.memory_stats() or {}).get("bytes_limit") if d.platform != "cpu" else None}
    for d in devices], stage="multiply matrices")
import numpy
x = jax.device_put(numpy.ones((64, 64), numpy.float32), devices[0])
y = float(jax.jit(lambda x: (x @ x).sum())(x))
assert y == 64.0**3, f"the sum of a product of matrices is {y}, not {64.0**3}"
report(stage="done", seconds=round(time.monotonic() - start, 1))
"""


def probe_jax(seconds: float, program: str = PROGRAM) -> dict[str, Any]:
    """{"state": "ok" | "failed" | "timeout", "stage", "message": the last line that it wrote,
    "warnings", "backend", "devices": [{"platform", "kind", "capability", "memory"}], "seconds"}."""
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONFAULTHANDLER": "0"}
    state, code, stdout, stderr = run([sys.executable, "-c", program], seconds, **environ)
    facts: dict[str, Any] = {"state": state, "backend": None, "devices": [], "code": code}
    for line in stdout.splitlines():
        if line.startswith("@{"):
            facts |= json.loads(line[1:])
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    warned = [line.partition("Warning: ")[2] for line in lines if "Warning: " in line]
    return facts | {"message": lines[-1][:600] if lines else "", "warnings": warned[:5]}


def run_quietly(command: list[str], seconds: float) -> tuple[str, str]:
    """("ok" | "missing" | "failed" | "timeout", what a command printed)."""
    try:
        state, _, stdout, stderr = run(command, seconds)
    except OSError as error:
        return "missing", error.strerror or str(error)
    return state, f"no answer in {seconds:g} s" if state == "timeout" else stdout + stderr


def run(command: list[str], seconds: float, **environ: str) -> tuple[str, int | None, str, str]:
    """Return state ("ok", "failed" or "timeout"), exit code, stdout and stderr of a command."""
    # Files rather than pipes: nobody waits for a process that cannot be killed.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | environ,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
            state = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, state = None, "timeout"
        finally:
            if process.poll() is None:
                kill(process)
        for file in (out, err):
            file.seek(0)
        stdout, stderr = (file.read(200_000).decode(errors="replace") for file in (out, err))
        return state, code, stdout, stderr


def kill(process: subprocess.Popen) -> None:
    """End a process with all that it started; one that hangs in the kernel is left to it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(2.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
