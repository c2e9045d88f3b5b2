"""Process between a caller and the cells: starts cells and makes sure that nothing outlives them.

    caller --control--> supervisor          one for many cases; sees neither programs nor tests
                          '- guard          one per case; adopts orphans of the cells
                               |- cell of the program    own user, limits, namespaces, no files
                               '- cell of the test       the same, with the verdict's connection

A case without a test (`run_alone`) has only the program's cell, whose output the caller reads.
The guard ends all processes when the caller closes the case's `life`, and closes its own end only
when all of them are gone. A cell in a process namespace ends as a whole with its first process;
without namespaces, the guard adopts orphans and kills until none are left.
"""

import gc
import os
import re
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time

from jaxtrain.environments.sandbox import limits as confine
from jaxtrain.environments.sandbox.limits import ResourceLimits
from jaxtrain.environments.sandbox.program import Program, show
from jaxtrain.environments.sandbox.tester import ENDED, READY, judge

FAILED_TO_CONFINE = 97
RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
LOOK_SECONDS = 0.05
"""Interval between checks of the memory that the processes of a case use together."""


def main(descriptor: int, folders: str) -> None:
    """Serve a caller: each message has the limits of a case and the descriptors of `guard`.

    folders: parent of the folders of cells.
    """
    control = socket.socket(fileno=descriptor)
    tempfile.tempdir = folders
    sys.path.pop(0)  # modules of the caller must not be importable in a cell
    for cached in (confine.readable_folders, confine.machine, confine.interpreter):
        cached()  # computed once for all cells
    gc.freeze()  # collections in a cell leave these pages shared
    with_namespaces = try_namespaces()
    control.send(b"namespaces" if with_namespaces else b"")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 4096, 4)
        if not data:
            break
        if os.fork() == 0:
            control.close()
            guard(ResourceLimits.from_json(data), with_namespaces, *descriptors)
        for number in descriptors:
            os.close(number)
        reap(block=False)
    reap(block=True)


def try_namespaces() -> bool:
    """Return True if cells can have their own namespaces on this machine."""
    child = os.fork()
    if child == 0:
        try:
            confine.enter_namespaces(folder=True)
            if os.fork() == 0:
                confine.mount_folder(tempfile.gettempdir(), 1)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def reap(block: bool) -> bool:
    """Reap ended children; return True if there may be more."""
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def guard(limits: ResourceLimits, namespaces: bool, life: int, *descriptors: int) -> None:
    """Run a case until the caller closes `life`, or its processes use too much memory; never
    returns.

    descriptors: connections of test and program, or of a program alone.
    """
    folder = user = None
    try:
        os.setsid()
        confine.prctl(confine.SUBREAPER)
        confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
        folder = tempfile.mkdtemp(prefix="jaxtrain_cell_")
        os.chmod(folder, 0o700)
        namespaces = namespaces and limits.namespaces
        cell = start_cells(limits, namespaces, folder, *descriptors)
        if os.geteuid() == 0 and not namespaces:
            user = confine.FIRST_ID + cell
        for descriptor in descriptors:
            os.close(descriptor)
        most = limits.together_mib or 2 * limits.memory_mib + 512
        while not select.select([life], [], [], LOOK_SECONDS)[0]:
            if used_mib() > most:
                break
        else:
            if os.read(life, 1) == ENDED and wait_for_end(cell):
                os.write(life, ENDED)
    finally:
        if user is not None:
            kill_user(user)
        kill_all()
        if folder is not None:
            remove(folder)
        os._exit(0)


def start_cells(
    limits: ResourceLimits, namespaces: bool, folder: str, first: int, program: int | None = None
) -> int:
    """Start the cells of test and program, or of a program alone; return the program's pid."""
    if program is None:
        return start_cell(limits, namespaces, folder, [first], lambda: run_alone(first))
    of_test, of_program = socket.socketpair()
    with of_test, of_program:
        held = [first, of_test.fileno()]
        start_cell(limits, namespaces, None, held, lambda: run_test(first, of_test))
        held = [program, of_program.fileno()]
        return start_cell(
            limits, namespaces, folder, held, lambda: Program(read_text(program)).serve(of_program)
        )


def run_alone(descriptor: int) -> None:
    """Run a program without a test in its cell, with its output sent to the caller."""
    text = read_text(descriptor)
    os.write(descriptor, READY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    show(text)
    os._exit(0)


def run_test(test: int, program: socket.socket) -> None:
    """Run the test in its cell."""
    verdict = socket.socket(fileno=test)
    text = read_text(test)
    verdict.sendall(READY)
    judge(text, program, verdict)


def read_text(descriptor: int) -> str:
    """Read a text until the end of the connection."""
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


def start_cell(
    limits: ResourceLimits, namespaces: bool, folder, descriptors: list[int], work
) -> int:
    """Fork a confined process that runs `work` with only these descriptors; return its pid."""
    if child := os.fork():
        return child
    try:
        confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
        number = os.getpid()
        keep_only(descriptors)
        if namespaces:
            confine.enter_namespaces(folder is not None)
            wait_for_child()  # the child is the namespace's first process, which ends all others
            confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
            if folder:
                confine.mount_folder(folder, limits.disk_mib)
            wait_for_child()
            confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
        confine_here(limits, namespaces, folder, number)
    except BaseException:
        os._exit(FAILED_TO_CONFINE)
    try:
        work()
    finally:
        os._exit(1)


def wait_for_child() -> None:
    """Return in a forked child. The parent exits with it: 0 if the child's status is 0, else 1."""
    child = os.fork()
    if child:
        confine.prctl(confine.DUMPABLE, 0)
        keep_only([])
        os._exit(os.waitpid(child, 0)[1] != 0)


def wait_for_end(pid: int) -> bool:
    """Return True if a child ends by itself within a second, with code 0."""
    for _ in range(1000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    return False


def confine_here(limits: ResourceLimits, namespaces: bool, folder, number: int) -> None:
    """Confine this process: limits, user, files and system calls."""
    processes = limits.processes
    if os.geteuid() and not namespaces:
        processes += confine.processes_of_user()
    if folder:
        os.chdir(folder)
        if os.geteuid() == 0:
            os.chmod(folder, 0o777)
    else:
        os.chdir("/")
    os.umask(0o077)
    reset_signals()
    confine.limit(limits, processes)
    signals_confined = namespaces or confine.landlock_version() >= 6
    if not confine.drop_user(number):
        confine.set_capabilities(0)
    confine.prctl(confine.NO_NEW_PRIVS)
    confine.restrict_files(folder)
    confine.restrict_calls(signals_confined)
    if not folder:
        confine.prctl(confine.DUMPABLE, 0)  # processes of the same user cannot read a test's memory
    os.environ.clear()
    if folder:
        os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin:/bin")
        tempfile.tempdir = folder
        sys.executable = confine.interpreter()


def reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def keep_only(descriptors: list[int]) -> None:
    """Close all other descriptors, and redirect the standard ones to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    first = 3
    for number in sorted({*descriptors}):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 16)


def kill_user(user: int) -> None:
    """Kill all processes of a cell's own user in one call, however fast they replace each other."""
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(user, user, user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def kill_all() -> None:
    """Kill this process's children, and their children once adopted, until none are left."""
    while True:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if not reap(block=False):
            return
        time.sleep(0.001)


def used_mib() -> float:
    """Return the memory of all descendants but files': private pages, and those of shared maps and
    memory files. What several of them map counts for each."""
    kibibytes, below = 0, children()
    for pid in below:
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                kibibytes += sum(map(int, RESIDENT.findall(file.read())))
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    below += map(int, file.read().split())
        except OSError:  # the process has ended
            continue
    return kibibytes / 2**10


def children() -> list[int]:
    """Return the children of this single-threaded process."""
    parent = os.getpid()
    try:
        with open(f"/proc/self/task/{parent}/children", "rb") as file:
            return list(map(int, file.read().split()))
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if parent_of(pid) == parent
        ]


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def remove(folder: str) -> None:
    """Remove a folder with all contents, whatever their modes."""

    def open_up(function, path, _):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
        function(path)

    try:
        shutil.rmtree(folder, onerror=open_up)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


assert threading.active_count() == 1, "namespaces and forks need a single-threaded process"
