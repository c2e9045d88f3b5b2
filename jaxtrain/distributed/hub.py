"""Coordination hub of a run: who has joined, who is lost, and after which step to stop.

Process 0 starts it as a separate program, so that it outlives any of them:

    process 0 ──┐  hello, beat, barrier, stop, at, end, bye   one JSON object per line, over TCP
    process 1 ──┼────────────────────────────────────────> hub    also hosts jax's coordination
    process 2 ──┘  <── start, say, open, halt, stop_at, quit      service

jax's own service cannot replace it: it notices a killed process only when heartbeats run out, then
aborts every other process with a C++ stack trace, and it accepts anybody who reaches its port.

Connections are read only after the handshake with the run's token (`jaxtrain_vllm/listener.py`);
malformed lines are ignored. An error is printed once: the lowest process that is still connected
gets the line to print, the others only an exit code. The hub ends with its last connection.
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
"""Characters of a cause that is sent to all processes."""
GATHER_SECONDS = 1.5
"""Delay between the first failure and the verdict: one cause often reaches several processes, and
the one that names it best may not report first."""


class Failure(NamedTuple):
    """Reason why a process ended, or was given up."""

    rank: int
    """0: the process is lost. 1: it reported its own error. 2: it failed at something that may be
    a consequence of another process's end, such as a collective."""
    code: int
    text: str


class CoordinationHub:
    """State of one run; every method runs in the event loop."""

    def __init__(self, size: int, start_timeout: float, meet_timeout: float, peer_timeout: float):
        self.size, self.start_timeout = size, start_timeout
        self.meet_timeout, self.peer_timeout = meet_timeout, peer_timeout
        self.service_port = self.relay_port = 0
        self.writers: dict[int, asyncio.StreamWriter] = {}
        """Connected processes."""
        self.hosts: dict[int, str] = {}
        """Machine of every process that has ever connected."""
        self.done: set[int] = set()
        self.failures: dict[int, Failure] = {}
        self.verdict: asyncio.Task | None = None
        self.barriers: dict[str, set[int]] = {}
        self.steps: dict[int, int] = {}
        self.stop_name = ""
        self.empty = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one process, from its hello to its end."""
        process = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), HELLO_SECONDS))
            match hello:
                case {"process": int(number), "of": int(size), "host": str(host)}:
                    host = host[:200]
                case _:
                    return
            if refusal := self.find_refusal(number, size, host):
                send(writer, {"quit": 2, "tell": refusal})
                return
            process = number
            self.writers[process], self.hosts[process] = writer, host
            if process == 0:
                self.relay_port = hello.get("relay", 0)
            if len(self.writers) == self.size:
                self.send_all({"start": self.service_port, "relay": self.relay_port})
            cause = "ended without a word (killed, out of memory, or its machine is gone)"
            while line := await asyncio.wait_for(reader.readline(), self.peer_timeout):
                self.handle(process, json.loads(line))
        except TimeoutError:
            cause = f"gave no sign of life for {self.peer_timeout:g} s"
        except (OSError, ValueError, RecursionError):  # the connection broke, perhaps mid-line
            pass
        finally:
            writer.close()
            if process is not None:
                del self.writers[process]
                if process not in self.done:
                    self.fail(process, Failure(0, 1, cause))
                if not self.writers:
                    self.empty.set()

    def find_refusal(self, process: int, size: int, host: str) -> str:
        """Return why a process may not join; "" if it may."""
        if size != self.size:
            return f"process {process} was told of {size} processes, process 0 of {self.size}"
        if not 0 <= process < size:
            return f"process {process} is none of the {size} processes, which are counted from 0"
        if process in self.hosts:
            return (
                f"process {process} is here twice (on {self.hosts[process]} and {host});"
                " give each its own parallel.process_id, or RANK"
            )
        return self.describe_cause() if self.failures else ""

    def handle(self, process: int, message: Any) -> None:
        """Handle one message of a process."""
        match message:
            case {"end": int(code), "text": str(text), "rank": int(rank)}:
                self.done.add(process)
                self.fail(process, Failure(rank, code, text))
            case {"bye": _}:
                self.done.add(process)
            case {"barrier": str(name)}:
                arrived = self.barriers.setdefault(name, set())
                if not arrived:
                    self.start_task(self.watch_barrier(name))
                arrived.add(process)
                if len(arrived) == self.size:
                    self.send_all({"open": name})
            case {"stop": str(name)}:
                if not self.stop_name:
                    self.stop_name = name
                    self.send_all({"halt": name})
            case {"at": int(step)}:
                self.steps[process] = step
                if len(self.steps) == self.size:
                    self.send_all({"stop_at": max(self.steps.values()), "name": self.stop_name})

    def fail(self, process: int, failure: Failure) -> None:
        """Record a failure; the first one starts the countdown to the verdict."""
        self.failures.setdefault(process, failure)
        if self.verdict is None:
            self.verdict = self.start_task(self.end_run())

    async def end_run(self) -> None:
        """Send every process the order to quit, and one of them the line to print."""
        await asyncio.sleep(GATHER_SECONDS)
        speaker, line = min(self.writers, default=-1), self.describe_cause()
        # If every failure looks like a consequence, the lowest process shows its own traceback.
        secondary = all(failure.rank == 2 for failure in self.failures.values())
        blamed = min(self.failures) if secondary else -1
        for process, writer in self.writers.items():
            code = self.failures[process].code if process in self.failures else 1
            text = line if process == speaker else ""
            send(writer, {"quit": code, "tell": text, "blamed": process == blamed})

    def describe_cause(self) -> str:
        """Return the cause in one line: the failures of the lowest rank."""
        rank = min(failure.rank for failure in self.failures.values())
        causes = {i: f for i, f in sorted(self.failures.items()) if f.rank == rank}
        texts = {failure.text for failure in causes.values()}
        if len(texts) == 1 and 0 in causes and rank:
            return causes[0].text[:MAX_TEXT]
        lines = (f"process {i} on {self.hosts[i]}: {f.text}" for i, f in causes.items())
        return "; ".join(lines)[:MAX_TEXT]

    async def watch_start(self) -> None:
        """Log which processes are missing at the start; give up after start_timeout."""
        waited = 0.0
        while len(self.hosts) < self.size:
            pause = min(15.0, self.start_timeout - waited)
            if pause <= 0:
                self.give_up(f"did not come within {self.start_timeout:g} s", set(self.hosts))
                return
            await asyncio.sleep(pause)
            waited += pause
            missing = [i for i in range(self.size) if i not in self.hosts]
            if missing and self.writers and waited < self.start_timeout:
                names = format_processes(missing)
                text = f"waiting for {names} of {self.size}, {waited:.0f} s so far"
                send(self.writers[min(self.writers)], {"say": text})

    async def watch_barrier(self, name: str) -> None:
        """Give up the processes that do not reach a barrier within meet_timeout."""
        await asyncio.sleep(self.meet_timeout)
        if len(self.barriers[name]) < self.size and not self.failures:
            text = f'did not come to "{name}" within {self.meet_timeout:g} s of the first'
            self.give_up(text, self.barriers[name])

    def give_up(self, text: str, arrived: set[int]) -> None:
        """Count all processes but those that arrived as lost."""
        for process in set(range(self.size)) - arrived:
            self.hosts.setdefault(process, "an unknown machine")
            self.fail(process, Failure(0, 1, text))

    def start_task(self, work: Any) -> asyncio.Task:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)  # the event loop keeps weak references only
        task.add_done_callback(self.tasks.discard)
        return task

    def send_all(self, message: dict[str, Any]) -> None:
        """Send a message to every connected process."""
        for writer in self.writers.values():
            send(writer, message)


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Write one line; the connection's reader notices if it is gone."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def format_processes(numbers: list[int]) -> str:
    """Return "process 3" or "processes 1, 2"; long lists are cut."""
    shown = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"{'process' if len(numbers) == 1 else 'processes'} {shown}"


async def run(port: int, size: int, hosts: list[str], token: bytes, *timeouts: float) -> None:
    """Serve one run; prints "ready", or what is wrong with the port, on standard output.

    hosts: addresses of this machine to listen on, "" for all of them. Falls back to all where the
    machine has none of these addresses, as behind address translation.
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
    service = start_service(hub.service_port, size, local=set(hosts) <= set(LOOPBACK))

    async def serve(connection: socket.socket) -> None:
        await hub.serve(*await asyncio.open_connection(sock=connection, limit=MAX_LINE))

    def admit(connection: socket.socket) -> None:
        loop.call_soon_threadsafe(lambda: hub.start_task(serve(connection)))

    listener = AuthenticatedListener("the run's meeting point", listeners, token, admit)
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    await hub.watch_start()
    await hub.empty.wait()
    listener.close()
    await asyncio.sleep(0.5)
    del service  # kept alive until here by this name
    os._exit(0)  # the service's own shutdown would wait for processes that are gone


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def start_service(port: int, size: int, *, local: bool) -> Any:
    """Start jax's coordination service, which jax.distributed would run inside process 0.

    It has no authentication; local: bind it to the loopback address. Its heartbeat timeout is long
    because the hub's own detection must win: the service aborts processes without explanation.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # no public name

    address = f"{'localhost' if local else '[::]'}:{port}"
    return _jax.get_distributed_runtime_service(address, size, heartbeat_timeout=600)


if __name__ == "__main__":
    os.setpgid(0, 0)  # Ctrl-C in the terminal is meant for the processes, not for the hub
    secret = bytes.fromhex(sys.stdin.read())
    port, size, hosts, *timeouts = sys.argv[1:]
    asyncio.run(run(int(port), int(size), json.loads(hosts), secret, *map(float, timeouts)))
