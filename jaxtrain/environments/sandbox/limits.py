"""Confinement of a process by the kernel: rlimits, namespaces, files, system calls.

All calls go through ctypes in a single-threaded process that was forked to be confined. If the
kernel or the container refuses a layer, the others still apply; docs/sandbox.md has the table.
"""

import ctypes
import functools
import json
import os
import platform
import resource
import stat
import sys
import sysconfig
from typing import NamedTuple

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = 0x7E020000
PDEATHSIG, DUMPABLE, KEEPCAPS, SECCOMP, CAPBSET_DROP, SUBREAPER, NO_NEW_PRIVS = (
    1, 4, 8, 22, 24, 36, 38,
)  # fmt: skip
DAC_READ_SEARCH = 2
LANDLOCK = 444
"""create_ruleset; add_rule and restrict_self follow. The same number on every architecture."""
FIRST_ID = 0x70000000
"""First numeric user of confined processes; such ids are unused."""
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


class ResourceLimits(NamedTuple):
    """Resources of a cell."""

    seconds: float
    """CPU time of each process."""
    memory_mib: int
    """Address space of each process."""
    processes: int = 32
    file_mib: int = 16
    """Size of a file."""
    disk_mib: int = 64
    """Size of its folder, if that can be a separate memory file system."""
    namespaces: bool = True
    """False: behave as if the kernel allowed no namespaces."""
    together_mib: int | None = None
    """Memory of all processes of a case together, checked 20 times a second; None: twice memory_mib
    plus 512."""

    def to_json(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ResourceLimits":
        return cls(*json.loads(data))


def call(name: str, *arguments) -> None:
    """Call a function of libc; OSError if it fails."""
    if getattr(libc, name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def prctl(option: int, value: int = 1) -> None:
    call("prctl", option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def enter_namespaces(folder: bool) -> None:
    """Give the next child its own process, network, IPC (and mount) namespaces; OSError if that is
    not allowed."""
    flags = NEWPID | NEWNET | NEWIPC | (NEWNS if folder else 0)
    user, group = os.geteuid(), os.getegid()
    call("unshare", flags if user == 0 else flags | NEWUSER)
    if user:
        for name, text in [
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ]:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if folder:
        private = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE: mounts here are invisible outside
        call("mount", b"none", b"/", None, ctypes.c_ulong(private), None)


def mount_folder(path: str, size_mib: int) -> None:
    """Mount a memory file system of bounded size on `path`, nosuid and nodev."""
    options = f"size={size_mib}m,mode=777".encode()
    call("mount", b"none", path.encode(), b"tmpfs", ctypes.c_ulong(6), options)


def limit(limits: ResourceLimits, processes: int) -> None:
    """Set rlimits; `processes` bounds all processes of the user together."""
    for kind, most in [
        (resource.RLIMIT_CPU, max(1, round(limits.seconds))),
        (resource.RLIMIT_AS, limits.memory_mib * 2**20),
        (resource.RLIMIT_FSIZE, limits.file_mib * 2**20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]:
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))


def drop_user(number: int) -> bool:
    """Switch from root to an unused user without capabilities; return True on success.

    If only root may read the standard library, this user keeps the capability to read all files, as
    far as Landlock permits, but cannot write files of root.
    """
    if os.geteuid() != 0:
        return False
    reachable = all(map(is_public, readable_folders()))
    for user in (FIRST_ID + number, NOBODY):
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            prctl(KEEPCAPS)
            os.setresuid(user, user, user)
            set_capabilities(0 if reachable else 1 << DAC_READ_SEARCH)
            return True
        except OSError:
            continue
    return False


def set_capabilities(mask: int) -> None:
    """Set the capabilities of this process; all others are dropped permanently."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    call("capset", header, data)


def is_public(path: str) -> bool:
    """Return True if all users can reach the contents of a folder."""
    while True:
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


@functools.cache
def readable_folders() -> list[str]:
    """Return the folders of the interpreter's library that a program needs."""
    names = ["stdlib", "platstdlib"]
    paths = [os.path.realpath(sysconfig.get_path(name)) for name in names]
    paths += [os.path.realpath(os.path.join(sys.base_prefix, "lib"))]
    return sorted({path for path in paths if os.path.isdir(path)})


@functools.cache
def interpreter() -> str:
    """Return the Python interpreter that a program may start."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def machine() -> str:
    return platform.machine()


READABLE = (
    ["/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/bin", "/usr/share/zoneinfo"]
    + ["/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime"]
    + ["/dev/urandom", "/dev/random"]
)


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""
    return max(0, libc.syscall(LANDLOCK, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict_files(folder: str | None) -> int:
    """Restrict this process by Landlock: it can read the interpreter and system libraries and write
    `folder`, nothing else, and cannot signal or trace other processes.

    Returns the kernel's Landlock version; 0 if the restriction failed.
    """
    version = landlock_version()
    if version == 0:
        return 0
    of_files = 1 | 2 | 4 | (1 << 14 if version >= 3 else 0) | (1 << 15 if version >= 5 else 0)
    everything = 0x1FFF | of_files | (1 << 13 if version >= 2 else 0)
    rights = [everything, 3 if version >= 4 else 0, 3 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = ctypes.c_uint64 * 3
    ruleset = libc.syscall(LANDLOCK, rules(*rights), ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        return 0
    allowed = [(path, 1 | 4 | 8) for path in [*READABLE, *readable_folders(), interpreter()]]
    allowed += [("/dev/null", 4 | 2)] + ([(folder, everything)] if folder else [])
    for path, right in allowed:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            right &= of_files
        rule = int(right).to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        failed = libc.syscall(LANDLOCK + 1, ruleset, 1, ctypes.c_char_p(rule), ctypes.c_uint32(0))
        os.close(opened)
        if failed:
            return 0
    prctl(NO_NEW_PRIVS)
    done = libc.syscall(LANDLOCK + 2, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    return version if done == 0 else 0


CALLS = {
    # name: (x86_64, aarch64)
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "mount": (165, 40),
    "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268), "pivot_root": (155, 41),
    "chroot": (161, 51), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "open_by_handle_at": (304, 265), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip
"""Denied calls, which no program needs: network, other processes, the kernel, memory that belongs
to no process."""
CLONE, CLONE3, PRLIMIT, KILL, TGKILL = (56, 220), (435, 435), (302, 261), (62, 129), (234, 131)
MMAP, FCNTL, IOCTL = (9, 222), (72, 25), (16, 29)
SHARED_ANONYMOUS = 0x21
"""Flags of mmap. Pages of such a map outlast madvise(MADV_DONTNEED), after which no process's
resident memory has them."""
SIGNAL_OWNERS = {FCNTL: (8, 15), IOCTL: (0x8901, 0x8902)}
"""F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: they send another process signals, SIGKILL too."""
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def restrict_calls(signals: bool) -> bool:
    """Restrict this process by seccomp: the calls above fail with EPERM; return True on success.

    signals: True allows signals to other processes, which must be unreachable by other means.
    """
    if machine() not in ARCHITECTURES or sys.maxsize < 2**32:
        return False
    token, column = ARCHITECTURES[machine()]
    load, equal, least, any_bit, give, mask = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
    allow, denied, missing = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38
    code = [(load, 0, 0, 4), (equal, 1, 0, token), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    code += [(least, 0, 1, 0x40000000), (give, 0, 0, denied)]  # x32
    for numbers in CALLS.values():
        code += [(equal, 0, 1, numbers[column]), (give, 0, 0, denied)]
    code += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, missing)]  # glibc falls back to clone

    def by_argument(numbers, test, value, when_true, when_false):
        return [
            (equal, 0, 4, numbers[column]),
            (load, 0, 0, 16),
            (test, 0, 1, value),
            (give, 0, 0, when_true),
            (give, 0, 0, when_false),
        ]

    code += by_argument(CLONE, any_bit, ANY_NAMESPACE, denied, allow)
    code += by_argument(PRLIMIT, equal, 0, allow, denied)
    if not signals:
        code += by_argument(KILL, equal, os.getpid(), allow, denied)
        code += by_argument(TGKILL, equal, os.getpid(), allow, denied)
    code += [(equal, 0, 5, MMAP[column]), (load, 0, 0, 40), (mask, 0, 0, SHARED_ANONYMOUS)]
    code += [(equal, 0, 1, SHARED_ANONYMOUS), (give, 0, 0, denied), (give, 0, 0, allow)]
    for numbers, commands in SIGNAL_OWNERS.items():
        code += [(equal, 0, 6, numbers[column]), (load, 0, 0, 24)]
        for command in commands:
            code += [(equal, 0, 1, command), (give, 0, 0, denied)]
        code.append((give, 0, 0, allow))
    code.append((give, 0, 0, allow))
    packed = b"".join(
        number.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")
        for number, yes, no, value in code
    )

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    program = Program(len(code), packed)
    try:
        prctl(NO_NEW_PRIVS)
        call("prctl", SECCOMP, ctypes.c_ulong(2), ctypes.byref(program), 0, 0)
    except OSError:
        return False
    return True


def processes_of_user() -> int:
    """Count the threads of this user, for limits that count all of them."""
    user, count = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count
