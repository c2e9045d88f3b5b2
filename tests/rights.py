"""Folders that may not be written, for tests that root runs, too."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = 0x20080522
"""Of Linux's capabilities: two words of 32 bits for each set."""
OVERRIDES = 0b110
"""Bits of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root ignores modes of files."""


class CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class CapWord(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable"))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder and all in it read-only, also for root in this thread and those that it
    starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = CapHeader(VERSION, 0), (CapWord * 2)()
    assert libc.capget(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
    before, words[0].effective = words[0].effective, words[0].effective & ~OVERRIDES
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert libc.capset(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        words[0].effective = before
        assert libc.capset(ctypes.byref(header), words) == 0, os.strerror(ctypes.get_errno())
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
