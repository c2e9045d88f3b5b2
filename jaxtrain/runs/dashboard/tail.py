"""Incremental reader of a file that another process is writing."""

import os
from pathlib import Path

MAX_READ = 8 * 2**20
"""Most bytes of one reading."""
MAX_LINE = 64 * 2**20
"""Longest line; longer ones are dropped."""
SEAM = 64
"""Bytes before the offset by which the file is recognized."""


class Tail:
    """Reader that returns the new complete lines of a file at each call.

    A file that became shorter, was replaced (as the metrics of a resumed run are) or has other
    content is read from its start again: `restarted` is incremented, and the new lines replace all
    earlier ones.
    """

    def __init__(self, path: Path):
        self.path = path
        self.restarted = 0
        self.behind = False
        """True if the file has more to read now."""
        self._forget()

    def read(self) -> list[bytes]:
        """Return the complete lines added since the last call, without line ends; at most MAX_READ
        bytes of them. A missing file has none."""
        try:
            with open(self.path, "rb", opener=_open_regular) as file:
                stat = os.fstat(file.fileno())
                if self._inode is not None and not self._goes_on(file, stat):
                    self.restarted += 1
                    self._forget()
                self._inode = stat.st_ino
                file.seek(self._offset)
                new = file.read(MAX_READ)
        except OSError:
            if self._inode is not None and not os.path.lexists(self.path):
                self.restarted += 1
                self._forget()
            self.behind = False
            return []
        self.behind = len(new) == MAX_READ
        self._offset += len(new)
        self._seam = (self._seam + new)[-SEAM:]
        *lines, self._rest = (self._rest + new).split(b"\n")
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        if len(self._rest) > MAX_LINE:
            self._rest, self._skipping = b"", True
        return lines

    def _goes_on(self, file, stat: os.stat_result) -> bool:
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._seam))
        return file.read(len(self._seam)) == self._seam

    def _forget(self) -> None:
        self._offset, self._inode = 0, None
        self._rest, self._seam = b"", b""
        self._skipping = False


def _open_regular(path: str, flags: int) -> int:
    """Not to wait for a writer, should it be a pipe."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not os.path.isfile(path):
        os.close(descriptor)
        raise OSError("no regular file")
    return descriptor
