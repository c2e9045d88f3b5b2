"""Built-in reward `python_tests`: the share of a row's tests that the written program passes.

Program and test run in separate processes. Calls of the test reach the program as plain values and
return as such, so that the program sees neither expected values nor the verdict. docs/sandbox.md
lists the limits per machine and what the sandbox does not protect against.
"""

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxtrain.environments.rewards.texts import FENCE, Completion, column, text_of, without_thinking
from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.sandbox import Sandbox
from jaxtrain.errors import UserError

AT_ONCE = 4
"""Answers of a group that are judged concurrently, so that endless loops time out together."""


def python_tests(
    completions: Sequence[Completion],
    column_name: str = "tests",
    seconds: float = 4.0,
    memory_mib: int = 1024,
    all_or_nothing: bool = True,
    **columns: Sequence[Any],
) -> list[float]:
    """Score 1 if the last fenced code block passes the tests, else 0 (or the share that passes).

    The column contains a list of statements such as "assert add(1, 2) == 3", or a text. Each test
    has fresh processes in which the program runs again, with `seconds` of CPU time and of wall
    time.
    """
    if not (0 < seconds <= 3600) or not (64 <= memory_mib <= 2**20):
        raise UserError(
            f"reward 'python_tests': options.seconds {seconds} must be above 0 (at most 3600) and"
            f" options.memory_mib {memory_mib} at least 64 (at most {2**20})"
        )
    if sys.platform != "linux":
        raise UserError("reward 'python_tests' runs on Linux alone: its sandbox is made of Linux")
    test_lists = [read_tests(tests) for tests in column(columns, column_name, "python_tests")]
    limits = ResourceLimits(seconds, memory_mib)
    programs = [find_program(text_of(completion)) for completion in completions]
    with Sandbox() as box, ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        judge = partial(share, box, limits=limits, all_or_nothing=all_or_nothing)
        return list(pool.map(judge, programs, test_lists))


def read_tests(value: Any) -> list[str]:
    """Return the tests of a row; UserError if they are not texts."""
    tests = [value] if isinstance(value, str) else value
    if not isinstance(tests, Sequence) or not all(isinstance(test, str) for test in tests):
        raise UserError(
            "reward 'python_tests': a row's tests must be a text or a list of texts with Python"
            f" statements, not {value!r:.80}"
        )
    return list(tests)


def share(
    box: Sandbox,
    program: str | None,
    tests: list[str],
    limits: ResourceLimits,
    all_or_nothing: bool,
) -> float:
    """Return the share of tests that pass; with `all_or_nothing`, 1 or 0."""
    if program is None or not tests:
        return 0.0
    passed = 0
    for test in tests:
        right = box.passes(program, test, limits)
        if all_or_nothing and not right:
            return 0.0
        passed += right
    return passed / len(tests)


def find_program(text: str) -> str | None:
    """Return the last fenced block of the answer; None if there is none."""
    blocks = FENCE.findall(without_thinking(text))
    return blocks[-1] if blocks else None
