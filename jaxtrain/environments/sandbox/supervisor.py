"""The process between a caller and the cells: it starts them, and sees that nothing outlives them.

    caller --control--> keeper              one for many cases; knows neither programs nor tests
                          '- guard          one a case; adopts what the cells leave behind
                               |- cell of the program    own user, limits, namespaces, no files
                               '- cell of the test       the same, and the verdict's connection

A case without a test (`run_alone`) has the program's cell alone, whose output the caller reads.
The guard ends everything when the caller closes the case's `life`, and closes its own end only when
all processes are gone. A cell in a process namespace dies as a whole with its first process; where
there is none, the guard adopts orphans and kills until there are none left.
"""

import gc
import os
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
LOOK_SECONDS = 0.05
"""Between two looks at what the processes of a case use together."""


def main(descriptor: int, folders: str) -> None:
    """Serve one caller: a message is the case's limits, with the three descriptors of `guard`.

    folders: where the folders of cells are made.
    """
    control = socket.socket(fileno=descriptor)
    tempfile.tempdir = folders
    sys.path.pop(0)  # nothing of the caller is importable in a cell
    for remembered in (confine.readable_folders, confine.machine, confine.interpreter):
        remembered()  # once for all cells
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
    """Whether a cell can have namespaces of its own here."""
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
    """Take ended children off the books; whether there may be more."""
    while True:
        try:
            pid, _ = os.waitpid(-1, 0 if block else os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def guard(limits: ResourceLimits, namespaces: bool, life: int, *descriptors: int) -> None:
    """Run one case until `life` is closed by the caller, or its processes use too much memory
    together; never returns. given: descriptors of test and program, or of a program alone."""
    folder = None
    try:
        os.setsid()
        confine.prctl(confine.SUBREAPER)
        confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
        folder = tempfile.mkdtemp(prefix="jaxtrain_cell_")
        os.chmod(folder, 0o700)
        namespaces = namespaces and limits.namespaces
        cell = start_cells(limits, namespaces, folder, *descriptors)
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
        kill_all()
        if folder is not None:
            remove(folder)
        os._exit(0)


def start_cells(
    limits: ResourceLimits, namespaces: bool, folder: str, first: int, program: int | None = None
) -> int:
    """The cells of test and program, or that of a program alone; the pid of the program's."""
    if program is None:
        return start_cell(limits, namespaces, folder, [first], lambda: run_alone(first))
    of_test, of_program = socket.socketpair()
    with of_test, of_program:
        held = [first, of_test.fileno()]
        start_cell(limits, namespaces, None, held, lambda: run_test(first, of_test))
        held = [program, of_program.fileno()]
        return start_cell(
            limits,
            namespaces,
            folder,
            held,
            lambda: Program(read_text(program)).serve(of_program),
        )


def run_alone(descriptor: int) -> None:
    """What the cell of a program without a test does: run it; its output goes to the caller."""
    text = read_text(descriptor)
    os.write(descriptor, READY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    show(text)
    os._exit(0)


def run_test(test: int, program: socket.socket) -> None:
    """What the cell of the test does."""
    verdict = socket.socket(fileno=test)
    text = read_text(test)
    verdict.sendall(READY)
    judge(text, program, verdict)


def read_text(descriptor: int) -> str:
    """All that comes before its end."""
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts).decode("utf-8", "replace")


def start_cell(
    limits: ResourceLimits, namespaces: bool, folder, descriptors: list[int], work
) -> int:
    """Fork a process that does `work` confined, with these descriptors alone; its pid."""
    if child := os.fork():
        return child
    try:
        confine.prctl(confine.PDEATHSIG, signal.SIGKILL)
        number = os.getpid()
        keep_only(descriptors)
        if namespaces:
            confine.enter_namespaces(folder is not None)
            wait_for_child()  # the child is the namespace's first process: all ends with it
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
    """Return in a forked child; the parent ends with it, and as it: 0, or not."""
    child = os.fork()
    if child:
        confine.prctl(confine.DUMPABLE, 0)
        keep_only([])
        os._exit(os.waitpid(child, 0)[1] != 0)


def wait_for_end(pid: int) -> bool:
    """Whether a child ends by itself within a second, with code 0."""
    for _ in range(1000):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    return False


def confine_here(limits: ResourceLimits, namespaces: bool, folder, number: int) -> None:
    """Limits, user, files and calls of this process, from now on."""
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
    signals_held = namespaces or confine.landlock_version() >= 6
    if not confine.drop_user(number):
        confine.set_capabilities(0)
    confine.prctl(confine.NO_NEW_PRIVS)
    confine.hold_files(folder)
    confine.hold_calls(signals_held)
    if not folder:
        confine.prctl(confine.DUMPABLE, 0)  # no process of the same user looks into a test
    os.environ.clear()
    if folder:
        os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin:/bin")
        tempfile.tempdir = folder
        sys.executable = confine.interpreter()


def reset_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def keep_only(descriptors: list[int]) -> None:
    """Close all others; the standard ones lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    first = 3
    for number in sorted({*descriptors}):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 16)


def kill_all() -> None:
    """Kill this process's children, and theirs as they are adopted, until there are none."""
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
    """Memory of its own that everything below this process holds; what processes share since a
    fork counts for each."""
    pages, below = 0, children()
    for pid in below:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                _, resident, shared, *_ = map(int, file.read().split())
            pages += resident - shared
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    below += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children() -> list[int]:
    """Processes whose parent is this one (which has one thread)."""
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
    """Its parent; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def remove(folder: str) -> None:
    """The folder with all that is in it, whatever its modes."""

    def open_up(function, path, _):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
        function(path)

    try:
        shutil.rmtree(folder, onerror=open_up)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


assert threading.active_count() == 1, "namespaces and forks want a process of one thread"
