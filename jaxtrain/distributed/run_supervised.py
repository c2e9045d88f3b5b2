"""Runs one command and sees that nothing of it outlives the process that wanted it.

    python hold.py COMMAND ...      its standard input is a pipe that the wanting process holds open

The pipe's end (closed on purpose, or because that process is gone, however it went) ends the
command, and so does that process's end where a fork of it still holds the pipe: SIGTERM to it,
then, once it has ended or after the seconds that were last written into the pipe, SIGKILL to all
that is left, what has daemonised included: orphans become this process's children.
Run as a file, by itself: it imports nothing of jaxtrain.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PDEATHSIG, SUBREAPER = 1, 36
GRACE_SECONDS = 10.0
LOOK_SECONDS = 0.2


def prctl(option: int, value: int) -> None:
    """As the system call; nothing where there is none."""
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def list_children(pid: int) -> list[int]:
    """Its children and theirs."""
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    except OSError:
        return children
    return children + [descendant for child in children for descendant in list_children(child)]


def send(pids: list[int], number: int) -> None:
    """A signal to those of them that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def reap() -> dict[int, int]:
    """{pid: status} of children that have ended."""
    statuses = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses
        if pid == 0:
            return statuses
        statuses[pid] = os.waitstatus_to_exitcode(status)


def main(command: list[str]) -> int:
    """Status of the command; 128 + N where signal N ended it."""
    owner = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe alone says when it is over
    prctl(SUBREAPER, 1)

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        prctl(PDEATHSIG, signal.SIGKILL)

    # Kept: without it Python would take the status of a command that has ended already.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=restore)
    child = process.pid
    grace, end, status = GRACE_SECONDS, None, None
    while status is None:
        if end is None:
            over = os.getppid() != owner
            if not over and select.select([0], [], [], LOOK_SECONDS)[0]:
                text = os.read(0, 4096).decode("ascii", "replace").strip()
                grace = float(text.split()[-1]) if text else grace
                over = not text
            if over:
                end = time.monotonic() + grace
                send([child], signal.SIGTERM)
        else:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > end:
                send(list_children(os.getpid()), signal.SIGKILL)
        status = reap().get(child)
    while survivors := list_children(os.getpid()):
        send(survivors, signal.SIGKILL)
        time.sleep(0.02)
        reap()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
