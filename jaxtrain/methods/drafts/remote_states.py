"""Target states from servers in other processes, on this host or others (state_server.py).

    batch ─> its rows on the devices of this process ─ a share a server ─> POST /states
          <─ streams on the mesh <─ put <─ states [A, B, T, n]

A server that is away, or busy, is asked again, or another in its place.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.config.secrets import reveal, reveal_url
from jaxtrain.distributed.feed import put
from jaxtrain.distributed.serialization import MalformedValueError, pack, unpack
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import pause_before
from jaxtrain.generation.event_loop import DaemonThreads
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, exchange
from jaxtrain.methods.drafts.capture import FrozenTarget, States, pad_rows
from jaxtrain.methods.drafts.config import TargetConfig
from jaxtrain.methods.drafts.state_server import ABOUT_ROUTE, FORMAT, STATES_ROUTE, describe_target
from jaxtrain.methods.drafts.state_writer import find_differences
from jaxtrain.methods.drafts.stored_states import format_size, local_rows
from jaxtrain.methods.offline import OfflineData
from jaxtrain.safe_io import parse_json
from jaxtrain.text_safety import escape_control_chars, redact_text, split_login

KEY_VARIABLE = "JAXTRAIN_API_KEY"
TRIES = 26
"""With the pauses between them two minutes, in which a server may be started again."""
LONGEST_PAUSE = 5.0
CONNECT_SECONDS = 10.0
"""Longest wait for a connection: a host that is off refuses none."""
LOST_SECONDS = 60.0
"""So long a server that was away is asked after the others."""
LOOK_SECONDS = 30.0
MAX_ABOUT_BYTES = 2**16
ANSWER_SECONDS = 600.0
"""Longest wait for an answer; the first one of a shape compiles a program."""
GIVE_UP_SECONDS = 2 * ANSWER_SECONDS
"""After which silent servers are not asked again, however few tries there were."""
PATIENCE = 0.2
"""Seconds between two looks whether the stage was closed."""
CHUNK_BYTES = 2**30
"""Size of states above which a server's rows are asked for in several requests."""
KEY = "task.target.servers"
REMEDIES = {
    401: "; give both sides the same key",
    403: "; give both sides the same key",
    409: "; start `jaxtrain capture` with this run's config there",
}
"""What to do about a status that would come again."""


class RemoteStates:
    """A `prefetch.CaptureStage` that asks servers."""

    name = "the target"

    def __init__(
        self,
        section: TargetConfig,
        target: FrozenTarget,
        sleep: Callable[[float], object] | None = None,
    ):
        """target: the model of the states on the training mesh, which is never opened. sleep: for
        the pauses between tries; by default `close` ends them."""
        self._closed = threading.Event()
        self.target, self.mesh, self.sleep = target, target.bundle.mesh, sleep or self._closed.wait
        self.streams = target.streams
        if not section.servers:
            raise UserError(
                f'task.target.source "server" needs {KEY}: start `jaxtrain capture` with this'
                ' config elsewhere and name its address, ["http://127.0.0.1:8100"]'
            )
        self.urls = [
            reveal_url(url, f"{KEY}.{index}").rstrip("/")
            for index, url in enumerate(section.servers)
        ]
        key = section.api_key and reveal({"api_key": section.api_key}, "task.target")["api_key"]
        self.key = key or os.environ.get(KEY_VARIABLE)
        self._about: dict[str, Any] | None = None
        self._data: OfflineData | None = None
        self._lost: dict[str, float] = {}
        """{URL: when it was away last} of servers that have not answered since."""

    @property
    def names(self) -> str:
        """Addresses of the servers, for people."""
        return ", ".join(map(redact_text, self.urls))

    @property
    def about(self) -> dict[str, Any]:
        """Description of the target that servers must run."""
        if self._about is None:
            self._about = describe_target(self.target)
        return self._about

    def check(self, data: OfflineData) -> str:
        """Return a line about the servers. Raises UserError if one runs another target."""
        self._data = data
        for url in self.urls:
            about, name = self._try(self._look, [url]), f"{KEY} {redact_text(url)}"
            if not isinstance(about, dict) or about.get("format") != FORMAT:
                raise UserError(
                    f"{name} is no `jaxtrain capture` of this version of the protocol ({FORMAT});"
                    " run one version of jaxtrain on both sides"
                )
            expected = {name: value for name, value in self.about.items() if name != "target"}
            if differences := find_differences(about, expected):
                raise UserError(
                    f"{name} runs another target: {', '.join(differences)}. Start it with this"
                    " run's config"
                )
        return f"target states from {self.names}, where this run's target is"

    def fill(self, batch: Batch) -> Batch:
        """Ask for the states of a batch."""
        rows = sorted(local_rows(batch, self.mesh))
        bare = batch._replace(weights={}, owner=None, denoms={}, streams={})
        local = take_rows(bare, rows)
        count = min(len(rows), self._count_requests(local.tokens.size))
        padded = pad_rows(local, count)
        share = padded.tokens.shape[1] // count
        parts = [
            (slice(start, start + share), index % len(self.urls))
            for index, start in enumerate(range(0, len(rows), share))
        ]
        with DaemonThreads(2 * len(self.urls)) as pool:
            answers = self._collect(
                [pool.submit(self._ask, take_rows(padded, span), first) for span, first in parts]
            )
        streams = {}
        for name, dtype in self.streams.items():
            states = np.zeros((*batch.tokens.shape, *dtype.shape), dtype.base)
            for (span, _), answer in zip(parts, answers, strict=True):
                here = rows[span]
                states[:, here] = answer[name][:, : len(here)]
            streams[name] = put(states, self.mesh)
        return batch._replace(streams={**batch.streams, **streams})

    def describe(self, row_tokens: int) -> str:
        """Describe the servers and the size of a row."""
        row = row_tokens * sum(dtype.itemsize for dtype in self.streams.values())
        return f"target states from {self.names}: {format_size(row)} a row of {row_tokens} tokens"

    def advise(self, busy: float, waiting: float) -> str:
        """Advise another server if states come more slowly than training takes them."""
        if busy <= waiting:
            return ""
        return f"States come more slowly than training takes them: add a server to {KEY}"

    def close(self) -> None:
        """End what is being asked, for good: a run that stops does not wait for servers."""
        self._closed.set()

    def _collect(self, requests: Sequence[Future]) -> list[States]:
        """Return the answers, or raise the first error; Interrupted once the stage is closed."""
        while True:
            done, left = wait(requests, PATIENCE, FIRST_EXCEPTION)
            for request in done:
                request.result()
            if not left:
                return [request.result() for request in requests]
            if self._closed.is_set():
                raise Interrupted

    def _count_requests(self, tokens: int) -> int:
        size = tokens * sum(dtype.itemsize for dtype in self.streams.values())
        return len(self.urls) * -(-size // (CHUNK_BYTES * len(self.urls)))

    def _look(self, url: str) -> Any:
        fields = self._authorize(url)
        limits = {"timeout": LOOK_SECONDS, "connect": CONNECT_SECONDS}
        with exchange(url, "GET", ABOUT_ROUTE, None, fields, **limits) as answer:
            raw = answer.read(MAX_ABOUT_BYTES)
        try:
            return parse_json(raw.decode())
        except ValueError:
            return None

    def _ask(self, batch: Batch, first: int) -> States:
        """Return the states of a batch from one of the servers, `first` if it answers."""
        request = {
            "target": self.about["target"],
            "layers": list(self.target.layers),
            "last": self.target.last,
            "batch": batch,
        }
        body = b"".join(pack("states", request))
        expected = {
            name: (dtype.base, (*batch.tokens.shape, *dtype.shape))
            for name, dtype in self.streams.items()
        }
        largest = batch.tokens.size * max(dtype.itemsize for dtype in self.streams.values())
        limits = {"timeout": ANSWER_SECONDS, "connect": CONNECT_SECONDS}

        def post(url: str) -> States:
            fields = {"Content-Type": "application/octet-stream", **self._authorize(url)}
            with exchange(url, "POST", STATES_ROUTE, body, fields, **limits) as answer:

                def receive(size: int) -> bytearray:
                    if size > max(largest, MAX_ABOUT_BYTES):
                        raise MalformedValueError("an answer of more than it was asked for")
                    room = bytearray(size)
                    view, seen = memoryview(room), 0
                    while seen < size:
                        count = answer.readinto(view[seen:])
                        if not count:
                            raise ConnectionError("hung up within an answer")
                        seen += count
                    return room

                states = unpack(receive)[1]
            values = states.items() if isinstance(states, dict) else ()
            if expected != {
                name: (value.dtype, value.shape)
                for name, value in values
                if isinstance(value, np.ndarray)
            }:
                raise RunStopped(
                    f"{redact_text(url)} answers with other states than it was asked for"
                )
            return states

        return self._try(post, [*self.urls[first:], *self.urls[:first]])

    def _log(self, text: str) -> None:
        # The data's log is that of the run once it is open.
        if self._data is not None:
            self._data.log(escape_control_chars(text))

    def _authorize(self, url: str) -> dict[str, str]:
        login = split_login(url)[1] or (self.key and f"Bearer {self.key}")
        return {"Authorization": login} if login else {}

    def _try(self, ask: Callable[[str], Any], urls: list[str]) -> Any:
        """Return the answer of the first server that has one; each is asked several times."""
        began, reason, turn = time.monotonic(), "", 0
        present = began - LOST_SECONDS
        urls = sorted(urls, key=lambda url: self._lost.get(url, present) > present)
        while turn < TRIES and time.monotonic() - began < GIVE_UP_SECONDS:
            if turn:
                self.sleep(min(pause_before(turn), LONGEST_PAUSE))
            turn += 1
            for url in urls:
                if self._closed.is_set():
                    raise Interrupted
                try:
                    answer = ask(url)
                except ServerGone as gone:
                    reason = f"{redact_text(url)}: {gone}"
                    if url not in self._lost:
                        self._log(f"{KEY}: {reason}; asked again, or another in its place")
                    self._lost[url] = time.monotonic()
                except ServerRefused as refused:
                    reason = f"{redact_text(url)}: {refused}"
                    if not refused.passes:
                        remedy = REMEDIES.get(refused.status, "")
                        raise UserError(f"{KEY}: {escape_control_chars(reason)}{remedy}") from None
                else:
                    if self._lost.pop(url, None) is not None:
                        self._log(f"{KEY}: {redact_text(url)} answers again")
                    return answer
        raise RunStopped(
            f"{KEY} did not answer {turn} times, the last time {escape_control_chars(reason)};"
            " start `jaxtrain capture` with this config there and run the same command again"
        )


def take_rows(batch: Batch, rows: slice | list[int]) -> Batch:
    """Return rows of the microsteps of a host batch [A, B, T]."""
    fields = batch._asdict().items()
    return batch._replace(**{n: v[:, rows] for n, v in fields if isinstance(v, np.ndarray)})
