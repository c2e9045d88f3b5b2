"""Server processes: nothing of them outlives the run, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.distributed.orphans import end_orphans, read_stat
from jaxtrain.errors import UserError

# A server with a child that has daemonised and does not hear SIGTERM.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(600)
"""
TRAINER = """
import sys, time
from pathlib import Path
from jaxtrain.distributed.child_processes import ServerProcess
log = Path(sys.argv[2])
one = ServerProcess([sys.executable, "-c", sys.argv[1]], None, log, 0, note=log.with_name("note"))
one.start()
time.sleep(600)
"""


def wait_for(label, seconds=10.0):
    end = time.monotonic() + seconds
    while not (actual := label()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return actual


def pids(log):
    words = log.read_text().split() if log.exists() else []
    return [int(word) for word in words] if len(words) == 2 else []


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stopped_with_all_that_it_started(tmp_path):
    log = tmp_path / "logs" / "one.log"
    server_process = ServerProcess([sys.executable, "-c", STUBBORN], None, log, 0)
    server_process.start()
    pair = wait_for(lambda: pids(log))
    assert server_process.poll() is None
    assert server_process.stop(0.2) == 128 + signal.SIGKILL == server_process.stop()
    assert not any(map(alive, pair))


def test_a_killed_run_leaves_nothing(tmp_path):
    log = tmp_path / "one.log"
    server = STUBBORN.replace("SIG_IGN", "SIG_DFL")
    run = subprocess.Popen([sys.executable, "-c", TRAINER, server, str(log)])
    pair = wait_for(lambda: pids(log))
    assert all(map(alive, pair))
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(alive, pair)))


def test_what_ends_by_itself_says_how(tmp_path):
    server_process = ServerProcess(
        [sys.executable, "-c", "exit(7)"], None, tmp_path / "log", 0, tmp_path
    )
    server_process.start()
    assert wait_for(server_process.poll) == 7 == server_process.stop()
    quick = ServerProcess(["/bin/false"], None, tmp_path / "log", 0)
    quick.start()
    assert wait_for(quick.poll) == 1
    with pytest.raises(UserError, match="no such folder"):
        ServerProcess(["true"], None, tmp_path / "log", 0, tmp_path / "none").start()


# A server with a child of its own session, which a lost parent does not end.
PAIR = """
import os, time
os.fork()
os.write(1, f"{os.getpid()} ".encode())
time.sleep(600)
"""


def find_keeper(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[3])  # its session


def find_supervisor(keeper):
    with open(f"/proc/{keeper}/task/{keeper}/children") as file:
        return int(file.read().split()[0])


def test_a_killed_keeper_takes_the_rest_along(tmp_path):
    log, note = tmp_path / "log", tmp_path / "note"
    server_process = ServerProcess([sys.executable, "-c", PAIR], None, log, 0, note=note)
    server_process.start()
    pair = wait_for(lambda: pids(log))
    assert end_orphans(note) == 0 and note.exists()  # its run is there
    os.kill(find_keeper(pair[0]), signal.SIGKILL)
    assert wait_for(server_process.poll) == 128 + signal.SIGKILL
    wait_for(lambda: not any(map(alive, pair)))
    assert server_process.stop() == 128 + signal.SIGKILL and not note.exists()


def test_what_a_run_killed_with_its_keeper_left_is_ended_by_the_next(tmp_path):
    log, note = tmp_path / "log", tmp_path / "note"
    run = subprocess.Popen([sys.executable, "-c", TRAINER, PAIR, str(log)])
    pair = wait_for(lambda: pids(log))
    wait_for(note.exists)
    # Whoever could still act is stopped before the first of them is killed: the run, the leader of
    # the session and the leader's fork that supervises the server.
    keepers = [find_keeper(pair[0]), find_supervisor(find_keeper(pair[0]))]
    assert not set(keepers) & set(pair)
    for pid in (run.pid, *keepers):
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda pid=pid: read_stat(pid)[0] == "T")
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    run.kill()
    run.wait()
    remaining = [pid for pid in pair if alive(pid)]
    assert remaining, "a child of the server has nobody who would end it"
    assert end_orphans(note) >= 1
    assert not any(map(alive, pair)) and not note.exists()
    note.write_text("no note")
    assert end_orphans(note) == 0 and not note.exists()
