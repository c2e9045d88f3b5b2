"""Programs run for their output: what they print, and each limit against one that tests it."""

import asyncio
import os
import socket
import tempfile
import textwrap
import time

import pytest

from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.pool import run_python
from jaxtrain.environments.sandbox.sandbox import Sandbox
from jaxtrain.errors import UserError


@pytest.fixture(scope="module")
def box():
    with Sandbox() as box:
        yield box


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def limits(request):
    return ResourceLimits(seconds=15.0, memory_mib=256, namespaces=request.param, together_mib=400)


def run(box, program, limits, longest=10_000):
    return box.run(textwrap.dedent(program), limits, longest)


def test_a_program_is_run_for_what_it_prints(box, limits):
    program = """
        import os, subprocess, sys
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: int
        print(__name__, Point(3), "é", "\\ud800")
        print("to stderr", file=sys.stderr)
        open("note", "w").write("kept")
        print(open("note").read(), len(os.environ) < 10, flush=True)
        subprocess.run([sys.executable, "-c", "print('child')"])
        """
    ran = run(box, program, limits)
    assert ran.finished
    assert ran.output == "__main__ Point(x=3) é ?\nto stderr\nkept True\nchild\n"
    assert run(box, "", limits) == ("", True)
    assert run(box, "import sys\nprint(1)\nsys.exit('no')", limits) == ("1\n", True)


def test_what_a_program_raises_is_output_without_a_line_of_ours(box, limits):
    ran = run(box, "def f():\n    return 1 / 0\nprint('a')\nf()", limits)
    assert ran.finished and ran.output == (
        'a\nTraceback (most recent call last):\n  File "program.py", line 4, in <module>\n    f()\n'
        '  File "program.py", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )
    broken = run(box, "def f(:\n", limits).output
    assert "SyntaxError" in broken and "jaxtrain" not in broken
    assert "RecursionError" in run(box, "def f():\n    f()\nf()", limits).output


TOGETHER = """
import os, time
print("begun", flush=True)
for n in range(16):
    if os.fork() == 0:
        held = bytearray(os.urandom(1)) * (100 * 2**20)
        time.sleep(30)
        os._exit(0)
time.sleep(30)
"""


def test_memory_is_limited_for_each_process_and_for_all_together(box, limits):
    ran = run(box, "x = bytearray(2**30)", limits)
    assert ran.finished and "MemoryError" in ran.output
    began = time.monotonic()
    assert run(box, TOGETHER, limits) == ("begun\n", False)
    assert time.monotonic() - began < 10  # not by its time


@pytest.mark.parametrize(
    "program",
    ["while True: pass", pytest.param("import time\ntime.sleep(60)", marks=pytest.mark.slow)],
)
def test_time_is_limited(box, limits, program):
    if not limits.namespaces:
        pytest.skip("the deadline is the caller's in either case")
    began = time.monotonic()
    short = limits._replace(seconds=1.0)
    assert run(box, f"print('a', flush=True)\n{program}", short) == ("a\n", False)
    assert time.monotonic() - began < 10


def test_output_is_limited(box, limits):
    ran = run(box, "while True: print('x' * 1000)", limits, longest=5000)
    assert len(ran.output) == 5000 and not ran.finished


def test_its_folder_is_limited(box, limits):
    if not (limits.namespaces and box.namespaces):
        pytest.skip("files are limited one by one")
    program = """
        for n in range(10):
            try:
                open(str(n), "wb").write(b"x" * 15 * 2**20)
            except OSError as error:
                print(n, error.strerror)
                break
        """
    ran = run(box, program, limits)
    assert ran == ("4 No space left on device\n", True)


def test_there_is_no_network_and_nobody_elses_file(box, limits, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    monkeypatch.setenv("JAXTRAIN_SECRET", "swordfish")
    program = """
        import os, socket
        for attempt in (
            lambda: socket.create_connection(("127.0.0.1", PORT), 2),
            lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            lambda: open(SECRET).read(),
            lambda: open("/etc/passwd").read(),
            lambda: open("/proc/PARENT/environ").read(),
            lambda: open(LEFT, "w"),
            lambda: os.kill(PARENT, 9),
        ):
            try:
                print("REACHED", attempt())
            except OSError as error:
                print(type(error).__name__)
        """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        filled = program.replace("PORT", port).replace("SECRET", repr(str(secret)))
        # A folder that everybody may write to.
        filled = filled.replace("LEFT", repr(os.path.join(tempfile.gettempdir(), "jaxtrain_left")))
        ran = run(box, filled.replace("PARENT", str(os.getpid())), limits)
    assert ran.finished and len(ran.output.splitlines()) == 7 and "REACHED" not in ran.output


def test_processes_are_counted_and_none_is_left(box, limits):
    if os.geteuid() != 0 and not limits.namespaces:
        pytest.skip("counted together with all other processes of the user")
    program = """
        import os, time
        for n in range(200):
            try:
                if os.fork() == 0:
                    os.setsid()
                    os.close(1)
                    os.close(2)
                    time.sleep(60)
            except OSError:
                print(n)
                break
        """
    ran = run(box, program, limits._replace(together_mib=None))
    assert ran.finished and 1 <= int(ran.output) <= 32
    deadline = time.monotonic() + 2  # the guard itself, in its last microseconds
    while remaining := [pid for pid in filter(str.isdigit, os.listdir("/proc")) if lives(pid, box)]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.02)


def lives(pid, box):
    """Return whether a process descends from the sandbox's supervisor."""
    try:
        while int(pid) > 1:
            with open(f"/proc/{pid}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
            if parent == str(box.process.pid):
                return state != "Z"
            pid = parent
    except OSError:
        pass
    return False


def test_an_environment_awaits_programs_side_by_side():
    async def go():
        programs = [f"import time\ntime.sleep(0.2)\nprint({n})" for n in range(3)]
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.02)
                ticks += 1

        beside = asyncio.ensure_future(tick())
        actual = await asyncio.gather(*map(run_python, programs))
        beside.cancel()
        return [ran.output for ran in actual], ticks

    outputs, ticks = asyncio.run(go())
    assert outputs == ["0\n", "1\n", "2\n"] and ticks > 5
    with pytest.raises(UserError, match="memory_mib 1 "):
        asyncio.run(run_python("", memory_mib=1))
