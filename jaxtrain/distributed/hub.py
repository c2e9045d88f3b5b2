"""The meeting point of a run's processes: who is there, who is lost, at which step to stop.

A small program of its own, started by process 0 beside it, so that it outlives any of them:

    process 0 ──┐  hello, beat, barrier, note, stop, end  a JSON object a line, over TCP
    process 1 ──┼──────────────────────────────────> hub    hosts jax's coordination service, too
    process 2 ──┘  <── start, say, open, note, halt, stop_at, quit

Only who knows the run's token is heard (`jaxtrain_vllm/listener.py`). A line that makes no
sense changes nothing.

Nothing here computes. What goes wrong is told once: the lowest process that is still there gets the
line to print, the others only an exit code. The hub ends when the last connection has closed.
"""

import asyncio
import json
import os
import socket
import sys
from typing import Any, NamedTuple

from jaxtrain_vllm.listener import LOOPBACK, AuthenticatedListener, is_absent, open_listeners

HELLO_SECONDS = 10.0
MAX_LINE = 2**16
"""Bytes; a longer line ends its connection."""
MAX_TEXT = 2000
"""Characters of a cause that is told to all."""
GATHER = 1.5
"""Seconds from the first bad news to the verdict: one cause often reaches several processes."""


class ConnectedProcess(NamedTuple):
    """A connected process."""

    process: int
    host: str
    writer: asyncio.StreamWriter


class Failure(NamedTuple):
    """Why a process ended, or was given up."""

    rank: int
    """0: the process is lost. 1: it says itself what is wrong. 2: it stumbled over something that
    may well be another's end, such as a collective that failed."""
    code: int
    text: str


class CoordinationHub:
    """State of one run; every method runs in the event loop."""

    def __init__(self, size: int, start_timeout: float, meet_timeout: float, peer_timeout: float):
        self.size, self.start_timeout = size, start_timeout
        self.meet_timeout, self.peer_timeout = meet_timeout, peer_timeout
        self.service_port = 0
        self.peers: dict[int, ConnectedProcess] = {}
        self.hosts: dict[int, str] = {}
        self.done: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.verdict: asyncio.Task | None = None
        self.barriers: dict[str, set[int]] = {}
        self.steps: dict[int, int] = {}
        self.stopping = ""
        self.empty = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process, from its hello to its end."""
        peer = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), HELLO_SECONDS))
            match hello:
                case {"process": int(process), "of": int(size), "host": str(host)}:
                    host = host[:200]
                case _:
                    return
            if refusal := self.find_refusal(process, size, host):
                send(writer, {"quit": 2, "tell": refusal})
                return
            peer = ConnectedProcess(process, host, writer)
            self.peers[peer.process], self.hosts[peer.process] = peer, peer.host
            if len(self.peers) == self.size:
                self.tell_all({"start": self.service_port})
            why = "ended without a word (killed, out of memory, or its machine is gone)"
            while line := await asyncio.wait_for(reader.readline(), self.peer_timeout):
                self.hear(peer, json.loads(line))
        except TimeoutError:
            why = f"gave no sign of life for {self.peer_timeout:g} s"
        except (OSError, ValueError, RecursionError):  # it broke, in the middle of a line at worst
            pass
        finally:
            writer.close()
            if peer is not None:
                del self.peers[peer.process]
                if peer.process not in self.done:
                    self.fail(peer.process, Failure(0, 1, why))
                if not self.peers:
                    self.empty.set()

    def find_refusal(self, process: int, size: int, host: str) -> str:
        """Why a process may not join; empty if it may."""
        if size != self.size:
            return f"process {process} was told of {size} processes, process 0 of {self.size}"
        if not 0 <= process < size:
            return f"process {process} is none of the {size} processes, which are counted from 0"
        if process in self.hosts:
            return (
                f"process {process} is here twice (on {self.hosts[process]} and {host});"
                " give each its own parallel.process_id, or RANK"
            )
        return self.describe() if self.failures else ""

    def hear(self, peer: ConnectedProcess, message: Any) -> None:
        """What a process says."""
        match message:
            case {"end": int(code), "text": str(text), "rank": int(rank)}:
                self.done.add(peer.process)
                self.fail(peer.process, Failure(rank, code, text))
            case {"bye": _}:
                self.done.add(peer.process)
            case {"barrier": str(name)}:
                came = self.barriers.setdefault(name, set())
                if not came:
                    self.later(self.watch_barrier(name))
                came.add(peer.process)
                if len(came) == self.size:
                    self.tell_all({"open": name})
            case {"note": str(name), "text": str(text)}:
                self.tell_all({"note": name, "text": text})
            case {"stop": str(name)}:
                if not self.stopping:
                    self.stopping = name
                    self.tell_all({"halt": name})
            case {"at": int(step)}:
                self.steps[peer.process] = step
                if len(self.steps) == self.size:
                    self.tell_all({"stop_at": max(self.steps.values()), "name": self.stopping})

    def fail(self, process: int, failure: Failure) -> None:
        """Bad news of a process; the first of them opens a short while for the others'."""
        self.failures.setdefault(process, failure)
        if self.verdict is None:
            self.verdict = self.later(self.judge())

    async def judge(self) -> None:
        """Tell everybody to end."""
        await asyncio.sleep(GATHER)
        speaker, line = min(self.peers, default=-1), self.describe()
        stumbled = min(self.failures) if all(f.rank == 2 for f in self.failures.values()) else -1
        for process, peer in self.peers.items():
            code = self.failures[process].code if process in self.failures else 1
            told = line if process == speaker else ""
            send(peer.writer, {"quit": code, "tell": told, "blamed": process == stumbled})

    def describe(self) -> str:
        """The cause in one line: of all failures those of the lowest rank."""
        rank = min(failure.rank for failure in self.failures.values())
        first = {i: f for i, f in sorted(self.failures.items()) if f.rank == rank}
        texts = list(dict.fromkeys(f.text for f in first.values()))
        if len(texts) == 1 and 0 in first and rank:
            return texts[0][:MAX_TEXT]
        named = "; ".join(f"process {i} on {self.hosts[i]}: {f.text}" for i, f in first.items())
        return named[:MAX_TEXT]

    async def watch_start(self) -> None:
        """Name those who are not there yet; give up after start_timeout."""
        waited = 0.0
        while len(self.hosts) < self.size:
            pause = min(15.0, self.start_timeout - waited)
            if pause <= 0:
                self.give_up(f"did not come within {self.start_timeout:g} s", set(self.hosts))
                return
            await asyncio.sleep(pause)
            waited += pause
            missing = [i for i in range(self.size) if i not in self.hosts]
            if missing and self.peers and waited < self.start_timeout:
                text = (
                    f"waiting for {name_processes(missing)} of {self.size}, {waited:.0f} s so far"
                )
                send(self.peers[min(self.peers)].writer, {"say": text})

    async def watch_barrier(self, name: str) -> None:
        """Give up those who have not come to a meeting point within meet_timeout."""
        await asyncio.sleep(self.meet_timeout)
        if len(self.barriers[name]) < self.size and not self.failures:
            text = f'did not come to "{name}" within {self.meet_timeout:g} s of the first'
            self.give_up(text, self.barriers[name])

    def give_up(self, text: str, came: set[int]) -> None:
        for process in set(range(self.size)) - came:
            self.hosts.setdefault(process, "an unknown machine")
            self.fail(process, Failure(0, 1, text))

    def later(self, work: Any) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self.tasks.discard)
        return task

    def tell_all(self, message: dict[str, Any]) -> None:
        for peer in self.peers.values():
            send(peer.writer, message)


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """One line; a connection that is gone is noticed by its reader."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def name_processes(numbers: list[int]) -> str:
    """ "process 3", "processes 1, 2"; long lists end in a count."""
    shown = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"{'process' if len(numbers) == 1 else 'processes'} {shown}"


async def run(port: int, size: int, hosts: list[str], token: bytes, *timeouts: float) -> None:
    """Serve one run; prints "ready" or what is wrong with the port on standard output.

    hosts: the addresses of this machine to listen at; "" is all of them, which are taken as well
    where it has none of the others (behind a translation of addresses).
    """
    hub = CoordinationHub(size, *timeouts)
    loop = asyncio.get_running_loop()
    try:
        try:
            listeners = open_listeners(hosts, port)
        except OSError as error:
            if not is_absent(error):
                raise
            listeners = open_listeners([""], port)
    except OSError as error:
        print(error.strerror or error, flush=True)
        return
    hub.service_port = free_port()
    # Kept alive by this name. Its own watch over the processes is slower than the hub's on purpose.
    service = start_service(hub.service_port, size, local=set(hosts) <= set(LOOPBACK))

    async def serve(connection: socket.socket) -> None:
        await hub.serve(*await asyncio.open_connection(sock=connection, limit=MAX_LINE))

    def admit(connection: socket.socket) -> None:
        loop.call_soon_threadsafe(lambda: hub.later(serve(connection)))

    gate = AuthenticatedListener("the run's meeting point", listeners, token, admit)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    await hub.watch_start()
    await hub.empty.wait()
    gate.close()
    await asyncio.sleep(0.5)
    del service
    os._exit(0)  # the service would wait for processes that are gone


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start_service(port: int, size: int, *, local: bool) -> Any:
    """jax's coordination service, which jax.distributed would otherwise run inside process 0.

    It knows no token. local: nobody on another machine is to reach it.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # no public name

    return _jax.get_distributed_runtime_service(
        f"{'localhost' if local else '[::]'}:{port}", size, heartbeat_timeout=600
    )


if __name__ == "__main__":
    os.setpgid(0, 0)  # a Ctrl-C on the terminal is for the processes
    secret = bytes.fromhex(sys.stdin.read())
    asyncio.run(
        run(
            int(sys.argv[1]),
            int(sys.argv[2]),
            json.loads(sys.argv[3]),
            secret,
            *map(float, sys.argv[4:]),
        )
    )
