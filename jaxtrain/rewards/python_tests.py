"""Built-in reward `python_tests`: the share of a row's tests that the written program passes.

Each completion runs in a process of its own: isolated interpreter, empty environment, a temporary
folder, limits on time, memory, files and processes. That stops accidents, not attackers: train on
code that models write inside a container without network and without secrets.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.rewards.texts import FENCE, Completion, column, text_of, without_thinking

PASSED = 'print("\\n@passed@", flush=True)'


def python_tests(
    completions: Sequence[Completion],
    column_name: str = "tests",
    seconds: float = 4.0,
    memory_mib: int = 1024,
    all_or_nothing: bool = True,
    **columns: Sequence[Any],
) -> list[float]:
    """1 where the last fenced code block passes the tests, else 0 (or the share that passes).

    The column holds a list of statements such as "assert add(1, 2) == 3", or one text. Each test
    runs in an own process, after the program, for `seconds` of processor and as much clock time.
    """
    if seconds <= 0 or memory_mib < 64:
        raise UserError(
            f"reward 'python_tests': options.seconds {seconds} must be above 0 and"
            f" options.memory_mib {memory_mib} at least 64"
        )
    tests = column(columns, column_name, "python_tests")
    found = []
    for completion, given in zip(completions, tests, strict=True):
        wanted = [given] if isinstance(given, str) else list(given)
        program = find_program(text_of(completion))
        if program is None or not wanted:
            found.append(0.0)
            continue
        passed = 0
        for test in wanted:
            right = run_program(f"{program}\n\n{test}\n{PASSED}\n", seconds, memory_mib)
            passed += right
            if all_or_nothing and not right:
                passed = 0
                break
        found.append(passed / len(wanted))
    return found


def find_program(text: str) -> str | None:
    """The last fenced block of the answer; None where there is none."""
    blocks = FENCE.findall(without_thinking(text))
    return blocks[-1] if blocks else None


def run_program(program: str, seconds: float, memory_mib: int) -> bool:
    """Whether a program runs to its end, where it prints the mark, within its limits."""
    with tempfile.TemporaryDirectory(prefix="jaxtrain_tests_") as folder:
        path = os.path.join(folder, "program.py")
        with open(path, "w") as file:
            file.write(program)
        said = os.path.join(folder, "said")
        with open(said, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", path],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: limit_process(seconds, memory_mib),
            )
        try:
            process.wait(timeout=seconds + 1)
        except subprocess.TimeoutExpired:
            return False
        finally:
            kill_session(process)
        with open(said, "rb") as output:
            return process.returncode == 0 and output.read().endswith(b"\n@passed@\n")


def limit_process(seconds: float, memory_mib: int) -> None:
    """Limits of the process that is about to become the program."""
    processor = max(1, round(seconds))
    size = memory_mib * 2**20
    for kind, limit in [
        (resource.RLIMIT_CPU, processor),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 2**24),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ]:
        resource.setrlimit(kind, (limit, limit))


def kill_session(process: subprocess.Popen) -> None:
    """End the program and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
