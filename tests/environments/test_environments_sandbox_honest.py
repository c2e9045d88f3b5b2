"""Honest programs and usual tests pass; wrong ones do not."""

from textwrap import dedent

import pytest

from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.sandbox import Sandbox

LIMITS = ResourceLimits(seconds=5.0, memory_mib=1024)


@pytest.fixture(scope="module")
def box():
    with Sandbox() as box:
        yield box


HONEST = {
    "function": ("def add(a, b):\n    return a + b", "assert add(1, 2) == 3"),
    "shadows a builtin": ("def sum(a):\n    return a[0] + a[1]", "assert sum([1, 2]) == 3"),
    "values": (
        """
        from collections import Counter, OrderedDict, deque
        from decimal import Decimal
        from fractions import Fraction
        import datetime
        def same(x):
            return x
        """,
        """
        import datetime
        from decimal import Decimal
        for value in [None, True, 2**200, -1.5, 3j, "é\\ud800", b"x", bytearray(b"y"), (1, [2]),
                      {1, 2}, frozenset([3]), {"a": {1: (2,)}}, range(3), slice(1, 2), ...,
                      Decimal("1.50"), datetime.date(2020, 1, 2), datetime.timedelta(1, 2, 3)]:
            assert same(value) == value and type(same(value)) is type(value), value
        assert same(float("inf")) == float("inf") and same(float("nan")) != same(float("nan"))
        assert same(Counter("aab")) == Counter("aab") and same(Fraction(1, 3)) == Fraction(1, 3)
        """,
    ),
    "humaneval": (
        "from typing import List\ndef close(xs: List[float], t: float) -> bool:\n"
        "    return any(abs(a - b) < t for i, a in enumerate(xs) for b in xs[:i])",
        """
        METADATA = {'author': 'jt'}
        def check(candidate):
            assert candidate([1.0, 2.0, 3.9], 0.3) == False
            assert candidate([1.0, 2.8, 3.0], 0.3) == True
        check(close)
        """,
    ),
    "helpers that the program imports": (
        "import math\nfrom math import isclose\ndef area(r):\n    return math.pi * r**2",
        "assert isclose(area(1), 3.14159265, rel_tol=1e-6) and math.isclose(area(2), 4 * math.pi)",
    ),
    "class": (
        """
        class Stack:
            size = 0
            def __init__(self, items=()):
                self.items = list(items)
            def push(self, item):
                self.items.append(item)
                return self
            def pop(self):
                return self.items.pop()
            def __len__(self):
                return len(self.items)
            def __eq__(self, other):
                return self.items == other.items
            def __contains__(self, item):
                return item in self.items
            def __iter__(self):
                return iter(self.items)
            def __repr__(self):
                return f"Stack({self.items})"
        """,
        """
        s = Stack()
        s.push(1).push([2])
        assert len(s) == 2 and s.items == [1, [2]] and 1 in s and list(s) == [1, [2]]
        assert s == Stack([1, [2]]) and s != Stack() and isinstance(s, Stack)
        s.size = 7
        assert s.size == 7 and Stack.size == 0 and hasattr(s, "push") and not hasattr(s, "peek")
        assert str(s) == repr(s) == "Stack([1, [2]])" and f"{s}" == str(s)
        assert s.pop() == [2] and s.pop() == 1 and not s
        try:
            s.pop()
            assert False, "must raise"
        except IndexError as error:
            assert "empty" in str(error)
        """,
    ),
    "operators": (
        """
        class V:
            def __init__(self, x):
                self.x = x
            def __add__(self, other):
                return V(self.x + other.x)
            def __mul__(self, k):
                return V(self.x * k)
            __rmul__ = __mul__
            def __eq__(self, other):
                return self.x == other.x
            def __lt__(self, other):
                return self.x < other.x
            def __hash__(self):
                return hash(self.x)
            def __getitem__(self, i):
                return self.x
        """,
        """
        assert V(1) + V(2) == V(3) and (V(2) * 3).x == 6 and 3 * V(2) == V(6) and V(1) < V(2)
        assert sorted([V(3), V(1)])[0].x == 1 and V(5)[0] == 5 and len({V(1), V(1)}) == 1
        """,
    ),
    "named tuples and enums": (
        """
        from collections import namedtuple
        from enum import IntEnum
        P = namedtuple("P", "x y")
        class C(IntEnum):
            RED = 1
        def p():
            return P(1, 2)
        """,
        "assert p() == (1, 2) and p().x == 1 and P(1, 2) == p() and C.RED == 1 and C.RED + 1 == 2",
    ),
    "arguments changed in place": (
        "def clear(xs, d, k=None):\n    xs.sort()\n    d['a'] = 1\n    k.add(3)",
        "x, d, k = [3, 1], {}, {1}\nclear(x, d, k=k)\nassert x == [1, 3] and d == {'a': 1}\n"
        "assert k == {1, 3}",
    ),
    "callbacks": (
        "def apply(f, xs):\n    return [f(x) for x in xs]\n"
        "def top(f):\n    return lambda x: f(x) + 1",
        "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, [1]) == ['1']\n"
        "assert top(lambda x: -x)(3) == -2",
    ),
    "objects of the test": (
        "def total(node):\n    return node.value + (total(node.next) if node.next else 0)\n"
        "def last(node):\n    return last(node.next) if node.next else node",
        """
        class Node:
            def __init__(self, value, next=None):
                self.value, self.next = value, next
        end = Node(2)
        assert total(Node(1, end)) == 3 and last(Node(1, end)) is end
        """,
    ),
    "own exceptions": (
        """
        class Base(Exception):
            pass
        class Poor(Base):
            def __init__(self, missing):
                super().__init__(f"{missing} missing")
                self.missing = missing
        def pay(n):
            raise Poor(n)
        def check(n):
            raise ValueError("bad", n)
        """,
        """
        for kind in (Poor, Base, Exception):
            try:
                pay(3)
                raise AssertionError
            except kind as error:
                assert str(error) == "3 missing" and error.missing == 3
        try:
            check(1)
            raise AssertionError
        except ValueError as error:
            assert error.args == ("bad", 1)
        """,
    ),
    "generators and globals": (
        "n = 0\ndef bump():\n    global n\n    n += 1\ndef gen(k):\n    yield from range(k)",
        "bump()\nbump()\nassert n == 2 and list(gen(3)) == [0, 1, 2] and next(gen(1)) == 0",
    ),
    "coroutines": (
        "import asyncio\nasync def slow(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nassert asyncio.run(slow(1)) == 2",
    ),
    "printing": (
        "def hello():\n    print('hi')",
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n"
        "    hello()\nassert out.getvalue() == 'hi\\n'",
    ),
    "files, threads, processes of its own": (
        """
        import os, subprocess, tempfile, threading
        def work():
            with tempfile.NamedTemporaryFile("w") as f, open("a.txt", "w") as g:
                f.write("x"), g.write("y")
            found = []
            t = threading.Thread(target=lambda: found.append(open("a.txt").read()))
            t.start(); t.join()
            return found + [subprocess.run(["/bin/echo", "z"], capture_output=True).stdout]
        if __name__ == "__main__":
            ready = True
        """,
        "assert work() == ['y', b'z\\n'] and ready",
    ),
    "main guard and deep recursion": (
        "import sys\nsys.setrecursionlimit(10000)\n"
        "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)",
        "assert f(5000) == 5000",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(box, name):
    program, test = HONEST[name]
    assert box.passes(dedent(program), dedent(test), LIMITS) is True


@pytest.mark.parametrize(
    "program, test",
    [
        ("def add(a, b):\n    return a - b", "assert add(1, 2) == 3"),
        ("def add(a, b):\n    raise ValueError", "assert add(1, 2) == 3"),
        ("def other():\n    pass", "assert add(1, 2) == 3"),
        ("def add(a, b:", "assert True"),
        ("x = 1", "assert ("),
        ("x = 1", "raise SystemExit(0)"),
        ("raise SystemExit(0)", "assert True"),
        ("x = '\0'", "assert True"),
    ],
)
def test_wrong_programs_and_broken_tests_do_not(box, program, test):
    assert box.passes(program, test, LIMITS) is False
