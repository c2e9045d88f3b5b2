"""One process's connection to the hub: heartbeats, barriers, the last step of all, exit messages.

    listener thread   hears the hub; on "quit" prints the line it was given and ends the process
    beat thread       a line each second, so that a machine that vanished is noticed
    loop thread       meet(name), stops_before(step), end(...)

To stop, all processes must leave the loop after the same step, or the first collective of those who
go on would wait for ever. Whoever hears a signal tells the hub; the hub says "halt"; each process
answers with the step it has begun and begins no further one before it knows the largest of them.
No process is asked anything while nobody stops.
"""

import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.distributed.hub import MAX_LINE, MAX_TEXT
from jaxtrain.distributed.run_token import RunToken
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars
from jaxtrain_vllm.handshake import HandshakeRefused, introduce


class Peers:
    """The connection to the hub; one per process, open until the process ends."""

    def __init__(
        self,
        address: str,
        process: int,
        size: int,
        start_timeout: float,
        peer_timeout: float,
        run_token: RunToken,
        listen_at: Sequence[str] = ("",),
    ):
        """Connects and waits until all `size` processes have come; `service_port` is then known.

        listen_at: addresses for ports of this process that the others are to reach. Raises
        UserError when the hub is not there in time, or does not know the run's token. The hub ends
        the process itself when another one is missing.
        """
        self.process, self.size, self.start_timeout = process, size, start_timeout
        self.listen_at, self.token = list(listen_at), b""
        """The token is that by which the hub was entered."""
        self.host = address.rpartition(":")[0].strip("[]")
        """Process 0's machine, as this one reaches it."""
        self.log: Callable[[str], None] = lambda text: print(
            escape_control_chars(text), file=sys.stderr, flush=True
        )
        self.stop_name = ""
        self._begun, self._halted, self._stop_at = 0, False, None
        self._open: set[str] = set()
        self._notes: dict[str, str] = {}
        self._met: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._blamed = threading.Event()
        self.service_port = 0
        self._socket = self._connect(address, run_token)
        self._lock = threading.Lock()
        self._send({"process": process, "of": size, "host": platform.node()})
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        beat = min(1.0, peer_timeout / 4)
        threading.Thread(target=self._beat, args=(beat,), name="beats", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.service_port)

    def meet(self, name: str) -> None:
        """Return when every process has come here; those that do not come are named."""
        self._met[name] += 1
        if self._met[name] > 1:
            name = f"{name} ({self._met[name]})"
        self._send({"barrier": name})
        with self._changed:
            self._changed.wait_for(lambda: name in self._open)

    def note(self, name: str, text: str) -> None:
        """Tell all processes a short text, once each name."""
        self._send({"note": name, "text": text})

    def wait_for_note(self, name: str) -> str:
        """What some process tells under that name, as soon as it does."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._notes)
            return self._notes[name]

    def ask_to_stop(self, name: str) -> None:
        """A signal of that name arrived here: all stop after one and the same step."""
        self._send({"stop": name})

    def stops_before(self, step: int) -> bool:
        """To be asked by the loop before each step, counted from 1: must it not begin?"""
        with self._changed:
            self._changed.wait_for(lambda: not self._halted or self._stop_at is not None)
            if self._stop_at is not None and step > self._stop_at:
                return True
            self._begun = step
            return False

    def shutdown(self) -> None:
        """All is well here; what follows is only the end of the process."""
        self._send({"bye": True})

    def end(self, code: int, text: str, *, stumbled: bool = False) -> bool:
        """Tell the others why this process ends, and let one of them, or this one, print it.

        stumbled: the cause may well be another's end. Ends the process, but returns True where that
        was the very cause, so that the caller can show its traceback.
        """
        self._send({"end": code, "text": text[:MAX_TEXT], "rank": 2 if stumbled else 1})
        if not self._blamed.wait(15):
            print(f"error: {escape_control_chars(text)}", file=sys.stderr, flush=True)
            os._exit(code)
        return True

    def _connect(self, address: str, run_token: RunToken) -> socket.socket:
        host, _, port = address.rpartition(":")
        last = time.monotonic() + self.start_timeout
        while True:
            problem = ""
            for token in run_token.find():
                try:
                    found = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
                except OSError as error:
                    problem = (
                        f"could not reach process 0 at {address} within {self.start_timeout:g} s"
                        f" ({error.strerror or error}); is it running, and may this machine open"
                        " that port there (parallel.coordinator, parallel.start_timeout)?"
                    )
                    continue
                try:
                    introduce(found, token)
                except HandshakeRefused as error:
                    found.close()
                    problem = (
                        f"reached {address}, but it is not process 0 of this run ({error});"
                        f" {run_token.advise()}"
                    )
                    continue
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.token = token
                return found
            if time.monotonic() > last:
                missing = f"found no token of process 0 at {address}; {run_token.advise()}"
                raise UserError(f"process {self.process} {problem or missing}")
            time.sleep(0.2)

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                pass  # the listener sees the end of the connection, too

    def _beat(self, pause: float) -> None:
        while True:
            time.sleep(pause)
            self._send({"beat": True})

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            try:
                while line := lines.readline(MAX_LINE):
                    self._hear(json.loads(line))
            except (OSError, ValueError, RecursionError):
                pass  # it broke, in the middle of a line at worst
        leave(1, f"stopped: process {self.process} lost its connection to process 0's machine")

    def _hear(self, message: dict[str, Any]) -> None:
        match message:
            case {"quit": code, "tell": line}:
                if message.get("blamed"):
                    self._blamed.set()
                    return
                leave(code, f"{'error' if code == 2 else 'stopped'}: {line}" if line else "")
            case {"say": text}:
                self.log(text)
        with self._changed:
            match message:
                case {"start": port}:
                    self.service_port = port
                case {"open": name}:
                    self._open.add(name)
                case {"note": name, "text": text}:
                    self._notes[name] = text
                case {"halt": name}:
                    self._halted, self.stop_name = True, name
                    self._send({"at": self._begun})
                case {"stop_at": step}:
                    self._stop_at = step
            self._changed.notify_all()


def leave(code: int, line: str) -> None:
    """End the process now, whatever its other threads wait for."""
    sys.stdout.flush()
    if line:
        show_cursor = "\x1b[?25h" if os.isatty(2) else ""
        os.write(2, f"{show_cursor}{line}\n".encode())
    os._exit(code)
