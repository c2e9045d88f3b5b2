"""Promises of results: accepted requests, and the results that they end in."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtrain.training_api.journal import Record

PROTOBUF, JSON, ERROR = "protobuf", "json", "error"
PAST = asyncio.Event()
"""Set event, shared by all entries that have ended: an event of their own takes more memory than
the rest of them."""
PAST.set()
USER, SERVER = "user", "server"
"""Categories of errors: the request, or this server, is at fault."""


class Result(NamedTuple):
    """Result of a request, as it is sent."""

    kind: str
    """PROTOBUF, JSON or ERROR, which is JSON, too."""
    body: bytes

    @classmethod
    def of(cls, value: Any) -> "Result":
        """Return the result of bytes, which are a protobuf message, or of an object."""
        if isinstance(value, bytes):
            return cls(PROTOBUF, value)
        return cls(JSON, json.dumps(value).encode())

    @classmethod
    def error(cls, message: str, category: str = USER) -> "Result":
        """Return an error."""
        return cls(ERROR, json.dumps({"error": message, "category": category}).encode())

    @property
    def message(self) -> str:
        """Text of an error."""
        return json.loads(self.body)["error"]

    @property
    def category(self) -> str:
        """Category of an error: USER or SERVER."""
        return json.loads(self.body)["category"]


@dataclass(eq=False)
class Entry:
    """Accepted request."""

    id: str
    seq_id: int
    operation: str
    digest: str
    """Hash of its body: the same number with another body is another request."""
    payload: bytes = b""
    """Its body; empty once it has been run and no restart would run it again."""
    result: Result | None = None
    ran: bool = True
    """False if it has ended without being run."""
    restarts: int = 0
    """Number of servers that have begun to run it again after another had ended meanwhile."""
    read_at: float | None = None
    """Time at which its result was first read."""
    ended_at: float | None = None
    """Time at which it ended, or was read from the log."""
    arrived: float = field(default_factory=time.monotonic)
    logged: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, result: Result) -> None:
        """Set the result and wake all tasks that wait for it."""
        self.result, self.ended_at = result, time.monotonic()
        self.note_end()

    def note_end(self) -> None:
        """Wake all tasks that wait for the result."""
        self.done.set()
        self.done = PAST

    def note_logged(self) -> None:
        """Wake all tasks that wait until the request is in the log, or was refused."""
        self.logged.set()
        self.logged = PAST

    def drop_result(self) -> int:
        """Forget the result; returns its size in bytes. Errors stay: they are short, and a replay
        reads them."""
        assert self.result is not None
        size = 0 if self.result.kind == ERROR else len(self.result.body)
        if size:
            self.result = self.result._replace(body=b"")
        return size

    def request_record(self) -> Record:
        """Return the request for the log."""
        names = ("id", "seq_id", "operation", "digest")
        return Record({"request": {name: getattr(self, name) for name in names}}, self.payload)

    def result_record(self) -> Record:
        """Return the result for the log."""
        assert self.result is not None
        header = {"result": self.seq_id, "kind": self.result.kind, "ran": self.ran}
        return Record(header, self.result.body)

    def restart_record(self) -> Record:
        """Return the number of restarts for the log."""
        return Record({"restarts": self.restarts, "of": self.seq_id})


def read_entries(records: list[Record]) -> tuple[dict[int, Entry], list[int]]:
    """Return (the entries of a model's log by number, the numbers in the order of their ends)."""
    entries: dict[int, Entry] = {}
    order: list[int] = []
    for header, payload in records:
        if "request" in header:
            # A log that was rewritten while a request was written holds that request twice.
            if header["request"]["seq_id"] in entries:
                continue
            entry = Entry(**header["request"], payload=payload)
            entry.note_logged()
            entries[entry.seq_id] = entry
        elif "restarts" in header:
            entries[header["of"]].restarts = header["restarts"]
        else:
            entry = entries[header["result"]]
            entry.ran = header["ran"]
            entry.end(Result(header["kind"], payload))
            order.append(entry.seq_id)
    return entries, order
