"""Memory shared by processes of one host: tensors are written once, and read in place.

    owner                                   others, which receive its description in a message
    create: an anonymous file in memory     attach: open /proc/PID/fd/N, compare the nonce, map it
    begin: mark it as being written
    write `room`
    seal: it holds (version, checksum)      state, before and after reading: not written meanwhile

Only processes of the same user may open it (Linux requires the right to trace the owner). If that
fails - another host, container, user or system - bytes travel over the link instead.
"""

import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from typing import Any

import numpy as np

HEAD = struct.Struct("<16sqQ")
"""Nonce, version (-1: being written), checksum."""
PAGE = 4096
PLACE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")


class SharedMemorySegment:
    """Shared memory; `room` is a flat array of its bytes, read-only where attached."""

    def __init__(self, memory: Any, described: dict[str, Any] | None, nonce: bytes):
        self.described, self._nonce = described, nonce
        self._memory = memory
        memory_bytes = np.frombuffer(memory, np.uint8)
        self.room = memory_bytes[PAGE:]

    @classmethod
    def create(cls, size: int) -> "SharedMemorySegment":
        """Create room for `size` bytes. `described` lets others attach it; None if this system
        cannot."""
        nonce = secrets.token_bytes(16)
        if not hasattr(os, "memfd_create"):
            return cls(np.empty(PAGE + size, np.uint8), None, nonce)
        handle = os.memfd_create("jaxtrain-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(handle, PAGE + size)
        # Its size is final, so that no reader can be sent behind its end.
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = f"/proc/{os.getpid()}/fd/{handle}"
        described = {"path": path, "nonce": nonce.hex(), "bytes": size}
        segment = cls(mmap.mmap(handle, PAGE + size), described, nonce)
        segment.begin()
        return segment

    @classmethod
    def attach(cls, described: Any) -> "SharedMemorySegment":
        """Map another process's segment for reading; OSError or ValueError if there is none."""
        if not isinstance(described, dict):
            raise ValueError(f"a segment is described by a table, not {described!r:.80}")
        path, nonce, size = (described.get(key) for key in ("path", "nonce", "bytes"))
        if not isinstance(path, str) or not PLACE.fullmatch(path) or type(size) is not int:
            raise ValueError(f"no segment is at {path!r:.80}")
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_size != PAGE + size:
                raise ValueError(f"{path} is another file here")
            if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError(f"{path} may shrink")
            segment = cls(
                mmap.mmap(handle, PAGE + size, access=mmap.ACCESS_READ),
                described,
                bytes.fromhex(str(nonce)),
            )
        finally:
            os.close(handle)
        if segment._head()[0] != segment._nonce:
            raise ValueError(f"{path} is another process's here")
        return segment

    def begin(self) -> None:
        """Mark it as being written: it holds no version."""
        self._write(-1, 0)

    def seal(self, version: int, checksum: int) -> None:
        """Mark it as complete."""
        self._write(version, checksum)

    def state(self) -> tuple[int, int]:
        """Return (version, checksum) of its contents; (-1, 0) while it is being written."""
        _, version, checksum = self._head()
        return version, checksum

    def _head(self) -> tuple[bytes, int, int]:
        return HEAD.unpack_from(self._memory)

    def _write(self, version: int, checksum: int) -> None:
        HEAD.pack_into(self._memory, 0, self._nonce, version, checksum)
