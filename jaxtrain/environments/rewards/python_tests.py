"""Built-in reward `python_tests`: the share of a row's tests that the written program passes.

Program and test run in processes of their own: the test's calls cross to the program as plain
values and come back as such, so the program sees neither what is expected nor the verdict. Which
limits hold on which machine, and what this is not: docs/sandbox.md.
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
"""Answers of a group that are judged side by side: loops without end wait together."""


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
    has processes of its own, the program run anew for it, and `seconds` of processor and as much
    clock time.
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
    """The tests of a row; UserError where they are no texts."""
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
    """The share of the tests that pass; all or none of it with `all_or_nothing`."""
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
    """The last fenced block of the answer; None where there is none."""
    blocks = FENCE.findall(without_thinking(text))
    return blocks[-1] if blocks else None
