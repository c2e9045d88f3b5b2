"""Connection of a process to the hub: heartbeats, barriers, the common last step, exit messages.

    listener thread   reads the hub's messages; on "quit" prints its line and ends the process
    heartbeat thread  one line per second, so that a vanished machine is noticed
    loop thread       meet(name), stops_before(step), end(...)

To stop, all processes must leave the loop after the same step, or the first collective of those
that continue would wait forever. The process that receives a signal reports it to the hub, which
sends "halt"; each process answers with the step it has begun, and begins no further one before it
knows the largest of them. Without a stop request no process is queried.
"""

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from jaxtrain.config.run import ParallelConfig
from jaxtrain.distributed.hub import MAX_LINE, MAX_TEXT
from jaxtrain.distributed.launch import Launch
from jaxtrain.distributed.relay import Receiver, Sender, relay_token
from jaxtrain.distributed.run_token import RunToken
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars
from jaxtrain_vllm.handshake import HandshakeRefused, introduce


class Peers:
    """The connection to the hub; one per process, open until the process ends."""

    def __init__(
        self, launch: Launch, timeouts: ParallelConfig, token: RunToken, sender: Sender | None
    ):
        """Connects and waits until all processes have joined.

        sender: on process 0, its end of the relay. Raises UserError if the hub cannot be reached
        in time, or does not know the run's token. If another process is missing, the hub ends this
        one.
        """
        self.launch, self.start_timeout = launch, timeouts.start_timeout
        self.log: Callable[[str], None] = lambda text: print(
            escape_control_chars(text), file=sys.stderr, flush=True
        )
        self.stop_name = ""
        self.service_port = self.relay_port = 0
        self._sender, self._receiver = sender, None
        self._started_step, self._halted, self._stop_at = 0, False, None
        self._open: set[str] = set()
        self._meetings: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._blamed = threading.Event()
        self._socket, self._token = self._connect(token)
        self._lock = threading.Lock()
        hello = {"process": launch.process, "of": launch.size, "host": platform.node()}
        self._send({**hello, "relay": 0 if sender is None else sender.port})
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        pause = min(1.0, timeouts.peer_timeout / 4)
        threading.Thread(target=self._beat, args=(pause,), name="beats", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.service_port)

    def send_value(self, name: str, value: Any) -> None:
        """Send a value from process 0 to all other processes."""
        assert self._sender is not None, "process 0 sends"
        self._sender.send(name, value)

    def receive_value(self, name: str) -> Any:
        """Wait for the next value of process 0, which must be called `name`."""
        if self._receiver is None:
            host = self.launch.address.rpartition(":")[0].strip("[]")
            token = relay_token(self._token)
            self._receiver = Receiver(host, self.relay_port, token, self.start_timeout)
        return self._receiver.receive(name)

    def meet(self, name: str) -> None:
        """Wait until every process has called this; the hub names those that do not."""
        self._meetings[name] += 1
        if self._meetings[name] > 1:
            name = f"{name} ({self._meetings[name]})"
        self._send({"barrier": name})
        with self._changed:
            self._changed.wait_for(lambda: name in self._open)

    def request_stop(self, name: str) -> None:
        """Report that a signal of that name arrived here: all stop after one common step."""
        self._send({"stop": name})

    def stops_before(self, step: int) -> bool:
        """Return True if the loop must not begin this step, counted from 1. Called before each."""
        with self._changed:
            self._changed.wait_for(lambda: not self._halted or self._stop_at is not None)
            if self._stop_at is not None and step > self._stop_at:
                return True
            self._started_step = step
            return False

    def shutdown(self) -> None:
        """Report success; closing the connection is no failure from now on."""
        self._send({"bye": True})

    def end(self, code: int, text: str, *, secondary: bool = False) -> bool:
        """Report why this process ends; the hub chooses the process that prints it.

        secondary: the cause may be another process's end. Ends this process, but returns True if
        it was the cause after all, so that the caller can show its traceback.
        """
        self._send({"end": code, "text": text[:MAX_TEXT], "rank": 2 if secondary else 1})
        if not self._blamed.wait(15):
            print(f"error: {escape_control_chars(text)}", file=sys.stderr, flush=True)
            os._exit(code)
        return True

    def _connect(self, run_token: RunToken) -> tuple[socket.socket, bytes]:
        """Return the connection and the token that the hub accepted."""
        address = self.launch.address
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + self.start_timeout
        while True:
            problem = ""
            for token in run_token.read():
                try:
                    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
                except OSError as error:
                    problem = (
                        f"could not reach process 0 at {address} within {self.start_timeout:g} s"
                        f" ({error.strerror or error}); is it running, and may this machine open"
                        " that port there (parallel.coordinator, parallel.start_timeout)?"
                    )
                    continue
                try:
                    introduce(connection, token)
                except HandshakeRefused as error:
                    connection.close()
                    problem = (
                        f"reached {address}, but it is not process 0 of this run ({error});"
                        f" {run_token.advise()}"
                    )
                    continue
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection, token
            if time.monotonic() > deadline:
                missing = f"found no token of process 0 at {address}; {run_token.advise()}"
                raise UserError(f"process {self.launch.process} {problem or missing}")
            time.sleep(0.2)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                pass  # the listener thread notices the end of the connection, too

    def _beat(self, pause: float) -> None:
        while True:
            time.sleep(pause)
            self._send({"beat": True})

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                while line := lines.readline(MAX_LINE):
                    self._handle(json.loads(line))
            except (OSError, ValueError, RecursionError):
                pass  # the connection broke, perhaps mid-line
        exit_now(
            1, f"stopped: process {self.launch.process} lost its connection to process 0's machine"
        )

    def _handle(self, message: dict[str, Any]) -> None:
        with self._changed:
            match message:
                case {"quit": code, "tell": line}:
                    if message.get("blamed"):
                        self._blamed.set()
                    else:
                        prefix = "error" if code == 2 else "stopped"
                        exit_now(code, f"{prefix}: {line}" if line else "")
                case {"say": text}:
                    self.log(text)
                case {"start": port, "relay": relay_port}:
                    self.service_port, self.relay_port = port, relay_port
                case {"open": name}:
                    self._open.add(name)
                case {"halt": name}:
                    self._halted, self.stop_name = True, name
                    self._send({"at": self._started_step})
                case {"stop_at": step}:
                    self._stop_at = step
            self._changed.notify_all()


def exit_now(code: int, line: str) -> None:
    """End the process, whatever its other threads wait for."""
    sys.stdout.flush()
    if line:
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{show_cursor}{line}\n".encode())
    os._exit(code)
