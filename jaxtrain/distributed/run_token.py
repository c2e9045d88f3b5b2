"""The secret that the processes of one run share, so that no other program can join them.

    JAXTRAIN_TOKEN      set by the launcher, the same text for every process; otherwise
    a file, mode 0600   written by process 0 beside run.output_dir and in the user's cache folder,
                        read by the others, removed once all have joined

Only files that belong to this user, and that nobody else may read, are trusted.
"""

import contextlib
import os
import platform
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxtrain.errors import UserError

VARIABLE = "JAXTRAIN_TOKEN"
MIN_LENGTH = 16
MAX_FILE_BYTES = 4096
LOCAL = ("localhost", "127.0.0.1", "::1")


class RunToken:
    """Location of the token of the run at `address` (host:port of process 0)."""

    def __init__(self, address: str, folder: Path | None, environ: Mapping[str, str]):
        """folder: run.output_dir if it is known. Raises UserError for a variable that is too short
        to be a secret."""
        self.variable = environ.get(VARIABLE)
        if self.variable is not None and len(self.variable) < MIN_LENGTH:
            raise UserError(
                f"{VARIABLE} has {len(self.variable)} characters; it is to keep strangers out:"
                f" export at least {MIN_LENGTH} random ones, the same for every process, such as"
                " $(openssl rand -hex 32)"
            )
        host, _, port = address.rpartition(":")
        if host.strip("[]") in LOCAL:  # a cache folder on a shared disk needs the machine's name
            host = platform.node()
        cache = Path(environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{host}-{port}")
        self.files = [cache / "jaxtrain" / f"{name}.token"]
        if folder is not None:
            folder = folder.absolute()
            self.files.insert(0, folder.with_name(f".{folder.name}-{port}.token"))

    def create(self) -> bytes:
        """On process 0: return the token, which the others can read until `remove`."""
        if self.variable is not None:
            return os.fsencode(self.variable)
        token = secrets.token_hex(32)
        problems = [problem for file in self.files if (problem := _write(file, token))]
        if len(problems) == len(self.files):
            raise UserError(
                f"process 0 can write the run's token nowhere: {'; '.join(problems)}; export"
                f" {VARIABLE}, the same random text for every process"
            )
        return token.encode()

    def read(self) -> list[bytes]:
        """On the other processes: return all candidates; an older run may have left a file, too."""
        if self.variable is not None:
            return [os.fsencode(self.variable)]
        return [token for file in self.files if (token := _read(file))]

    def remove(self) -> None:
        """On process 0: remove the files, once all have joined."""
        for file in self.files if self.variable is None else ():
            with contextlib.suppress(OSError):
                file.unlink()

    def advise(self) -> str:
        """Return advice for the error of a process that found no token, or a wrong one."""
        if self.variable is not None:
            return f"{VARIABLE} must be the same text for every process"
        return (
            f"it is in none of {', '.join(map(str, self.files))}, of which the processes must share"
            f" one; or export {VARIABLE}, the same random text for every process"
        )


def _write(file: Path, token: str) -> str:
    """Write the file atomically, readable by this user alone; return the problem, or ""."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)  # mode 0600
        with os.fdopen(handle, "w") as stream:
            stream.write(token)
        try:
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        return f"{file.parent}: {error.strerror or error}"
    return ""


def _read(file: Path) -> bytes | None:
    try:
        # Neither a symbolic link nor a pipe that another user may have put there.
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not (stat.S_ISREG(status.st_mode) and private):
            return None
        token = stream.read(MAX_FILE_BYTES)
    return token if len(token) >= MIN_LENGTH else None
