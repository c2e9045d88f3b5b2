"""Finds and ends servers that outlived both their run and the process that supervised them.

A note is a small JSON file with the session of a server, the process that started it, and the start
times of both. A process id alone is not enough: ids are reused.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
END_SECONDS = 10.0
POLL_SECONDS = 0.05


def read_stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state, session, ticks from boot to its start) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[3]), int(fields[19])


def read_boot() -> str:
    """Return the unique id of this machine's current boot."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def list_session(session: int) -> list[int]:
    """Return this user's running processes in a session."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat = read_stat(int(name))
        if stat is not None and stat[1] == session and stat[0] != "Z":
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    pids.append(int(name))
    return pids


def write_note(path: Path, session: int) -> None:
    """Record a session that this process has just started; OSError."""
    pids = {"session": session, "run": os.getpid()}
    starts = {name: (read_stat(pid) or ("", 0, 0))[2] for name, pid in pids.items()}
    path.write_text(json.dumps({"boot": read_boot(), "pids": pids, "starts": starts}))


def end_orphans(path: Path, seconds: float = END_SECONDS) -> int:
    """End the processes of a noted session whose run is gone, SIGTERM first, and remove the note.

    Returns the number of processes ended; 0 also if the run still exists, which keeps its servers.
    """
    try:
        note = json.loads(path.read_text())
        pids, starts = dict(note["pids"]), dict(note["starts"])
        session, run = int(pids["session"]), int(pids["run"])
        began = int(starts["session"])
    except (OSError, ValueError, KeyError, TypeError):
        path.unlink(missing_ok=True)
        return 0
    alive = read_stat(run)
    if note.get("boot") != read_boot():
        path.unlink(missing_ok=True)
        return 0
    if alive is not None and alive[0] != "Z" and alive[2] == starts["run"]:
        return 0
    leader = read_stat(session)
    # A leader with another start time only reuses the process id.
    is_same_session = leader is None or leader[2] == began
    leftovers = list_session(session) if is_same_session else []
    count = len(leftovers)
    end = time.monotonic() + seconds
    number = signal.SIGTERM
    while leftovers:
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        number = signal.SIGKILL if time.monotonic() > end else 0
        time.sleep(POLL_SECONDS)
        leftovers = list_session(session)
    path.unlink(missing_ok=True)
    return count
