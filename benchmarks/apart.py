"""One side of a benchmark in a process of its own, so that no memory and no compiler is shared."""

import os
import signal
import subprocess
import sys


def run_apart(script: str, arguments: list[str], seconds: float) -> str | None:
    """Run this script again with `arguments` behind its own; why it ended early, if it did."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, script, *sys.argv[1:], *arguments],
        start_new_session=True,
        env=environment,
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"cut off after {seconds:.0f} s"
    return f"exit {code}; see above" if code else None
