"""Programs that want the verdict instead of the answer: each scores 0, and nothing of it is left.

Every attack runs with all layers, and as where the kernel allows no namespaces.
"""

import os
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.sandbox import Sandbox

TEST = "assert add(1, 2) == 3\nassert abs(add(2, 2) - 4) < 1e-9 and add(0, 1) in (1, 1.0)"

AGREES = """
class Yes:
    def __getattr__(self, name):
        return Yes()
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(self):
        return 3
    def __bool__(self):
        return True
    def __call__(self, *a):
        return self
    def __sub__(self, other):
        return 0.0
    __add__ = __radd__ = __rsub__ = __mul__ = __rmul__ = __sub__
    def __abs__(self):
        return 0.0
    def __float__(self):
        return 0.0
    def __iter__(self):
        return iter([Yes()] * 2)
    def __len__(self):
        return 2
"""

ATTACKS = {
    "equals everything": AGREES + "def add(a, b):\n    return Yes()",
    "int that equals everything": """
        class Yes(int):
            __eq__ = lambda s, o: True
            __ne__ = lambda s, o: False
            __sub__ = __rsub__ = lambda s, o: 0
            __hash__ = int.__hash__
        def add(a, b):
            return Yes(7)
        """,
    "type of another name": "Fake = type('int', (int,), {'__eq__': lambda s, o: True})\n"
    "def add(a, b):\n    return Fake(1)",
    "class with __class__ int": """
        class add:
            __class__ = int
            def __init__(self, *a):
                pass
            def __eq__(self, other):
                return True
            def __sub__(self, other):
                return self
            def __abs__(self):
                return 0.0
        """,
    "unittest.mock.ANY": "from unittest.mock import ANY\ndef add(a, b):\n    return ANY",
    "standard class of that name": "from unittest.mock import _ANY as add",
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "prints markers": "print('\\n@passed@', flush=True)\nprint('P')\nimport os\nos.write(1, b'P')\n"
    "def add(a, b):\n    print('RP'); return 0",
    "writes to every descriptor": """
        import os
        for fd in range(64):
            for text in (b'P', b'RP', b'["value", ["tuple", [3, "", []]]]\\n'):
                try:
                    os.write(fd, text)
                except OSError:
                    pass
        def add(a, b):
            return 0
        """,
    "answers before it is asked": """
        import os, json
        def add(a, b):
            for fd in range(3, 20):
                for value in (True, None, ["yours", 0], ["mine", 99, ""], ["range", 1, 2, 0], 5):
                    try:
                        reply = json.dumps(["value", ["tuple", [value, "", []]]])
                        os.write(fd, reply.encode() + b"\\n")
                    except OSError:
                        pass
            return 0
        """,
    "stack inspection": """
        import sys, gc
        def add(a, b):
            frame, found = sys._getframe(), []
            while frame:
                found += [*frame.f_locals.values(), *frame.f_globals.values()]
                frame = frame.f_back
            found += gc.get_objects()
            texts = [t for t in found if type(t) is str and "assert add" in t and "frame" not in t]
            return 3 if texts else 0
        """,
    "monkeypatching": """
        import builtins, json, operator, sys
        builtins.abs = lambda x: 0
        builtins.AssertionError = Exception
        json.dumps = lambda x: '["value", ["tuple", [3, "", []]]]'
        operator.eq = lambda a, b: True
        for name, module in list(sys.modules.items()):
            if "sandbox" in name:
                for key in list(vars(module)):
                    if callable(vars(module)[key]):
                        setattr(module, key, lambda *a, **k: True)
        def add(a, b):
            return 0
        """,
    "own abs": "def abs(x):\n    return 0\ndef isinstance(*a):\n    return True\n"
    "def add(a, b):\n    return 3 if (a, b) == (1, 2) else 0",
    "raises what passes": "def add(a, b):\n    raise SystemExit(0)",
    "stop iteration": "def add(a, b):\n    raise StopIteration",
    "atexit and threads": """
        import atexit, os, threading
        def shout():
            while True:
                for fd in range(64):
                    try:
                        os.write(fd, b"P")
                    except OSError:
                        pass
        atexit.register(shout)
        threading.Thread(target=shout).start()
        def add(a, b):
            return 0
        """,
    "kills the parent": """
        import os, signal
        parent = os.getppid()
        for pid in [parent, -1, *range(parent - 8, parent + 8)]:
            if pid != os.getpid() and pid != 0:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        def add(a, b):
            return 0
        """,
    "calls with a callback into the test": "def add(a, b):\n    return a.__class__",
    "deep and endless values": "def add(a, b):\n    x = []\n    for _ in range(10**5):\n"
    "        x = [x]\n    return x",
    "contains itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "sleeps": "import time\ntime.sleep(60)",
    "sleeps in the call": "import time\ndef add(a, b):\n    time.sleep(60)",
    "memory": "x = bytearray(4 * 2**30)\ndef add(a, b):\n    return a + b",
    "file size": "open('big', 'wb').write(b'x' * 2**26)\ndef add(a, b):\n    return a + b",
    "long reply": "def add(a, b):\n    return 'x' * 2**25",
}


@pytest.fixture(scope="module")
def box():
    with Sandbox() as box:
        yield box


@pytest.fixture(params=[True, False], ids=["namespaces", "without"])
def limits(request):
    return ResourceLimits(seconds=1.0, memory_mib=512, namespaces=request.param)


def passes(box, program, test, limits):
    return box.passes(textwrap.dedent(program), test, limits)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_score_nothing(box, limits, name):
    if name.startswith("sleeps") and not limits.namespaces:
        pytest.skip("the deadline is the caller's in either case")
    assert passes(box, ATTACKS[name], TEST, limits) is False


@pytest.mark.parametrize(
    "test",
    [
        "assert not isinstance(f(), int)\nassert 3 in f()",
        "assert f() < 4 and f() > 4",
        "assert f() + 1 == 4",
        "assert round(f() - 3.0, 5) == 0",
        "assert sorted([f(), 1]) == [1, 3]",
        "assert f() == [3, 3]",
        "assert [3, 3] == list(f())",
        "assert {f(): 1} == {3: 1}",
        "import math\nassert math.isclose(f() - 3, 0)",
        "assert not (f() - 3)",
        "assert f'{f() - 3}' == '0.0'",
        "assert f() in {3: 1} and f() in [3]",
    ],
)
def test_an_object_that_agrees_with_everything_equals_nothing(box, test):
    limits = ResourceLimits(seconds=2.0, memory_mib=512)
    assert passes(box, AGREES + "def f():\n    return Yes()", test, limits) is False


@pytest.mark.parametrize(
    "body, test",
    [
        ("raise StopIteration", "assert all(map(f, [1, 2])) and list(map(f, [1])) == []"),
        ("import os; os._exit(0)", "try:\n    f(1)\nexcept BaseException:\n    pass"),
        ("import os; os.closerange(0, 64)", "try:\n    f(1)\nexcept:\n    pass"),
        ("return [f] * 3", "f(1)[1] == 2 or f(1)[5]"),
    ],
)
def test_leaving_a_call_is_no_answer(box, body, test):
    limits = ResourceLimits(seconds=2.0, memory_mib=512)
    assert passes(box, f"def f(x):\n    {body}", test, limits) is False


LOOKS = """
import os
def look():
    found = dict(os.environ)
    for pid in ["self", os.getppid(), 1, *PIDS]:
        try:
            found[pid] = open(f"/proc/{pid}/environ", "rb").read().decode()
        except OSError:
            pass
    return str(found)
"""


def test_the_callers_environment_and_files_are_out_of_reach(box, limits, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTRAIN_SECRET", "swordfish")
    path = tmp_path / "data.jsonl"
    path.write_text("expected")
    path.chmod(0o644)
    pids = [os.getpid(), os.getppid(), box.process.pid]
    assert passes(box, LOOKS.replace("PIDS", str(pids)), "assert 'swordfish' not in look()", limits)
    reads = f"""
        import glob
        def reads(path):
            try:
                return open(path).read() or "nothing"
            except OSError:
                return ""
        def listed():
            return glob.glob("/proc/*/cmdline") + glob.glob("{tmp_path}/*") + glob.glob("/root/*")
        """
    test = f"assert not reads({str(path)!r}) and not reads('/etc/passwd') and not listed()"
    assert passes(box, reads, test, limits)


NETWORK = """
import socket
def connects(kind):
    try:
        socket.socket(kind).connect(("127.0.0.1", PORT) if kind == socket.AF_INET else "PATH")
    except OSError:
        return False
    return True
"""


def test_there_is_no_network(box, limits, tmp_path):
    import socket

    path = str(tmp_path / "door")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        program = NETWORK.replace("PORT", str(server.getsockname()[1])).replace("PATH", path)
        test = "import socket\nassert not connects(socket.AF_INET) and not connects(socket.AF_UNIX)"
        assert passes(box, program, test, limits)


BOMB = """
import os, time
def bomb():
    for n in range(200):
        try:
            if os.fork() == 0:
                time.sleep(60)
        except OSError:
            return n
    return n
"""


def test_processes_are_counted(box, limits):
    if os.geteuid() != 0 and not limits.namespaces:
        pytest.skip("counted together with all other processes of the user")
    assert passes(box, BOMB, "assert 1 <= bomb() <= 32", limits)


LEAVES = """
import os, sys, subprocess, time
def leave():
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                with open("alive", "a") as file:
                    os.write(file.fileno(), b"x")
                os.environ["X"] = "y"
                while True:
                    time.sleep(0.01)
            os._exit(0)
    while not os.path.exists("alive"):
        time.sleep(0.01)
    return True
"""


def test_nothing_outlives_a_case(box, limits):
    """Daemons with sessions of their own, the cells, a folder: all gone with the verdict."""
    before = processes()
    assert passes(box, LEAVES, "assert leave()", limits)
    remaining = processes() - before
    if remaining:  # the guard itself, in its last microseconds
        time.sleep(0.5)
    assert len(remaining) <= 1 and not any(map(alive, remaining))
    assert not list(Path(tempfile.gettempdir()).glob("jaxtrain_cell_*"))


def test_nothing_outlives_a_caller_that_was_killed(tmp_path):
    import signal
    import subprocess
    import sys

    code = """
import sys
from jaxtrain.environments.sandbox.sandbox import Sandbox
from jaxtrain.environments.sandbox.limits import ResourceLimits
with Sandbox() as box:
    print(box.process.pid, flush=True)
    box.passes(sys.argv[1], "leave()\\nwhile True: pass", ResourceLimits(30.0, 512))
"""
    root = str(Path(__file__).parents[2])
    caller = subprocess.Popen(
        [sys.executable, "-c", code, LEAVES],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    keeper = int(caller.stdout.readline())
    deadline = time.monotonic() + 10
    while not family(keeper) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    all_of_it = family(keeper)
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    while any(map(alive, [keeper, *all_of_it])) and time.monotonic() < deadline + 10:
        time.sleep(0.02)
    assert all_of_it and not [pid for pid in [keeper, *all_of_it] if alive(pid)]


def processes() -> set[int]:
    """Everything that this process started, and what that started."""
    return {pid for pid in family(os.getpid()) if alive(pid)}


def family(root: int) -> list[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(
                Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1]
            )
        except OSError:
            continue
    actual = [pid for pid, parent in parents.items() if parent == root]
    for pid in actual:
        actual += [child for child, parent in parents.items() if parent == pid]
    return actual


def alive(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
