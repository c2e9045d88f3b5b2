"""The secret that the processes of one run share, so that no stranger can join them.

    JAXTRAIN_TOKEN      from the launcher, the same text for every process; else
    a file, mode 0600   written by process 0 beside run.output_dir and in the user's cache folder,
                        read by the others, removed as soon as all have come

Only files that belong to this user and that nobody else may read are believed.
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
    """Where the token of the run at `address` (host:port of process 0) is found.

    folder: run.output_dir where it is known. Raises UserError for a variable that is too short to
    be a secret.
    """

    def __init__(self, address: str, folder: Path | None, environ: Mapping[str, str]):
        self.given = environ.get(VARIABLE)
        if self.given is not None and len(self.given) < MIN_LENGTH:
            raise UserError(
                f"{VARIABLE} has {len(self.given)} characters; it is to keep strangers out: export"
                f" at least {MIN_LENGTH} random ones, the same for every process, such as"
                " $(openssl rand -hex 32)"
            )
        host, _, port = address.rpartition(":")
        if host.strip("[]") in LOCAL:  # of this machine alone, while a cache folder may be shared
            host = platform.node()
        cache = Path(environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{host}-{port}")
        self.files = [cache / "jaxtrain" / f"{name}.token"]
        if folder is not None:
            whole = folder.absolute()
            self.files.insert(0, whole.with_name(f".{whole.name}-{port}.token"))

    def make(self) -> bytes:
        """On process 0: the token, to be found by the others until `remove`."""
        if self.given is not None:
            return os.fsencode(self.given)
        token = secrets.token_hex(32)
        problems = [problem for file in self.files if (problem := _write(file, token))]
        if len(problems) == len(self.files):
            raise UserError(
                f"process 0 can write the run's token nowhere: {'; '.join(problems)}; export"
                f" {VARIABLE}, the same random text for every process"
            )
        return token.encode()

    def find(self) -> list[bytes]:
        """On the others: what may be the token by now; an older run may have left one, too."""
        if self.given is not None:
            return [os.fsencode(self.given)]
        return [token for file in self.files if (token := _read(file))]

    def remove(self) -> None:
        """On process 0: everybody has come."""
        for file in self.files if self.given is None else ():
            with contextlib.suppress(OSError):
                file.unlink()

    def advise(self) -> str:
        """For the error of a process that found none, or not the right one."""
        if self.given is not None:
            return f"{VARIABLE} must be the same text for every process"
        return (
            f"it is in none of {', '.join(map(str, self.files))}, of which the processes must share"
            f" one; or export {VARIABLE}, the same random text for every process"
        )


def _write(file: Path, token: str) -> str:
    """What went wrong; empty if it is there, whole, and readable by this user alone."""
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
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as stream:
        found = os.fstat(handle)
        private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not (stat.S_ISREG(found.st_mode) and private):
            return None
        token = stream.read(MAX_FILE_BYTES)
    return token if len(token) >= MIN_LENGTH else None
