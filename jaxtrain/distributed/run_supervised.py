"""Runs a command, and ends all of its processes when the process that started it is gone.

    python run_supervised.py COMMAND ...      standard input: a pipe that the owner holds open

    owner ── this process ── a fork of it, the supervisor ── COMMAND and all its processes

The command is ended when the pipe closes (on purpose, or because its owner is gone, for whatever
reason), or when the owner ends while a fork of it keeps the pipe open: SIGTERM first; once the
command has ended, or after the seconds last written into the pipe, SIGKILL to everything that
remains, daemons included: orphans become children of the supervisor. There are two processes since
some owners die together with their children (Ray kills those of an actor that ends): each of the
two ends everything when the other is killed.
Runs as a file by itself: it imports nothing of jaxtrain.
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
POLL_SECONDS = 0.2


def prctl(option: int, value: int) -> None:
    """Call prctl(2); does nothing on systems without it."""
    try:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def list_children(pid: int) -> list[int]:
    """Return the descendants of a process."""
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    except OSError:
        return children
    return children + [descendant for child in children for descendant in list_children(child)]


def send(pids: list[int], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def reap() -> dict[int, int]:
    """Return {pid: status} of children that have ended."""
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
    """Run the command; return its status, or 128 + N if signal N ended it."""
    owner, outer = os.getppid(), os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe decides when to end
    prctl(SUBREAPER, 1)
    supervisor = os.fork()
    if supervisor == 0:
        prctl(SUBREAPER, 1)  # not inherited
        os._exit(supervise(command, outer))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    status = None
    while status is None:
        if os.getppid() != owner:
            return 0  # the supervisor sees that this process is gone, and ends the command
        signal.sigtimedwait([signal.SIGCHLD], POLL_SECONDS)
        status = reap().get(supervisor)
    end_all()
    return status if status >= 0 else 128 - status


def end_all() -> None:
    """Kill every descendant that remains."""
    while survivors := list_children(os.getpid()):
        send(survivors, signal.SIGKILL)
        time.sleep(0.02)
        reap()


def supervise(command: list[str], owner: int) -> int:
    """Run the command until it ends, the pipe closes or `owner` is not the parent any more; return
    as `main`."""

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        prctl(PDEATHSIG, signal.SIGKILL)

    # The object must stay referenced, or Python itself would reap a command that has ended.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=restore)
    child = process.pid
    grace, end, status = GRACE_SECONDS, None, None
    while status is None:
        if end is None:
            over = os.getppid() != owner
            if not over and select.select([0], [], [], POLL_SECONDS)[0]:
                text = os.read(0, 4096).decode("ascii", "replace").strip()
                grace = float(text.split()[-1]) if text else grace
                over = not text
            if over:
                end = time.monotonic() + grace
                send([child], signal.SIGTERM)
        else:
            time.sleep(POLL_SECONDS)
            if time.monotonic() > end:
                send(list_children(os.getpid()), signal.SIGKILL)
        status = reap().get(child)
    end_all()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
