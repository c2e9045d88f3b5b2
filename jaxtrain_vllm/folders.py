"""Folders of a server that do not pile up, whatever ends its process."""

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

LOCK = ".lock"
_locks: list[int] = []
"""Descriptors of locks: each is held until this process ends."""


def find_stable_folder(name: str, content: str) -> Path:
    """Return this user's folder for files that are a function of `content`, in $XDG_CACHE_HOME or
    ~/.cache: all servers share it. A temporary one where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "jaxtrain" / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix=f"jaxtrain-{name}-"))


def make_temporary_folder(prefix: str) -> Path:
    """Return a new folder of this user alone, which is removed with the process. One that a killed
    process has left is removed by the next call."""
    for other in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        remove_abandoned(other)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another server that starts now may have taken the file for one that nobody locks.
        if (folder / LOCK).exists():
            break
        os.close(lock)
    _locks.append(lock)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_abandoned(folder: Path) -> None:
    """Remove a folder whose lock no living process holds; processes of other containers count."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except OSError:  # another user's, or just being made
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)
