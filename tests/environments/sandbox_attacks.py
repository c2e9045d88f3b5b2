"""Every known way of a program to a verdict that it did not earn, for the test beside it.

The test of each is `assert add(1, 2) == 3` and the like.
"""

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
    "class made in the test's process": """
        import gc
        def add(a, b):
            peer = next(x for x in gc.get_objects() if type(x).__name__ == "ProgramPeer")
            body = {"__module__": "test", "__eq__": lambda other: True, "__hash__": None}
            body |= {"__sub__": lambda other: 0, "__abs__": lambda: 0}
            made = peer.ask("call", type, ("int", (int,), body), {})
            return peer.ask("call", made, (7,), {})
        """,
    "exec in the test's process": """
        import gc
        def add(a, b):
            peer = next(x for x in gc.get_objects() if type(x).__name__ == "ProgramPeer")
            for name in ("exec", "eval", "getattr", "object", "super", "property"):
                thing = getattr(__import__("builtins"), name)
                try:
                    peer.ask("call", thing, ("raise SystemExit",), {})
                except TypeError:
                    continue
            return 0
        """,
    "error class in the place of a handle": """
        import gc
        def add(a, b):
            peer = next(x for x in gc.get_objects() if type(x).__name__ == "ProgramPeer")
            handle = peer.give(add)
            for number in (-1 - handle[1], "x", 1.5, [2], True, -7):
                peer.connection.sendall(
                    __import__("json").dumps(["error", [[["E", number], "ValueError"],
                    ["tuple", []], "", ["mine", number, ""]]]).encode() + b"\\n")
            return 0
        """,
    "async end": "def add(a, b):\n    raise StopAsyncIteration",
    "calls the tester's own code": """
        import gc
        def add(a, b):
            peer = next(x for x in gc.get_objects() if type(x).__name__ == "ProgramPeer")
            for verb in ("use", "judge", "call", "get", "set", "apply", "_run", "value"):
                for thing in (int, None, 3, [1], {"a": 1}, ["yours", 0], add):
                    try:
                        peer.ask(verb, thing, "__class__", 3)
                    except Exception:
                        continue
            return 0
        """,
}
