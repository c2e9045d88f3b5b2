"""Short, blocking control calls to a server, with plain answers and errors; from any thread.

Requests for tokens are in `engine.py`: those are many at once and asynchronous.
"""

import contextlib
import http.client
import json
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import redact_text, split_login
from jaxtrain_vllm.wire import cut_after

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key of servers that were started with one; vLLM reads it, too."""
MAX_ANSWER_BYTES = 64 * 2**20


class ServerGone(Exception):
    """Raised when a server did not answer: the connection was refused or broke, or timed out."""


class ServerHung(ServerGone):
    """Raised when a server, or a worker of it, was silent for too long over an open connection."""


class ServerRefused(Exception):
    """Raised when a server answered with a status other than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}")
        self.status, self.message = status, message

    @property
    def passes(self) -> bool:
        """Return True if the same request may succeed later, or on another server."""
        # 408, 425, 429: too slow, too early, too many; any other 4xx would come again.
        return self.status >= 500 or self.status in (408, 425, 429)


class Deadline:
    """A time limit shared by several steps."""

    def __init__(self, seconds: float):
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def left(self, most: float = math.inf) -> float:
        """Return the remaining seconds for a step, at most `most`; 0 once the deadline has
        passed."""
        return max(0.0, min(most, self._end - time.monotonic()))


def headers(url: str, key: str | None = None) -> dict[str, str]:
    """Return the headers of every request to a URL. key: overrides that of KEY_VARIABLE; the user
    and password of the URL, which a proxy before the server demands, override both."""
    key = key or os.environ.get(KEY_VARIABLE)
    sent = split_login(url)[1] or (f"Bearer {key}" if key else None)
    fields = {"Content-Type": "application/json"}
    return {**fields, "Authorization": sent} if sent else fields


def call(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout: float,
    api_key: str | None = None,
    **query: str | int,
) -> Any:
    """Return the JSON of an answer, or None for an empty one; raises ServerGone or ServerRefused.

    timeout: seconds for the whole call, however slowly bytes arrive. api_key: as for `headers`.
    """
    if query:
        path = f"{path}?{urllib.parse.urlencode(query)}"
    data = None if body is None else json.dumps(body).encode()
    fields = headers(url, api_key)
    with exchange(url, method, path, data, fields, timeout=timeout) as answer:
        raw = answer.read(MAX_ANSWER_BYTES)
    try:
        return json.loads(raw) if raw.strip() else None
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")


@contextlib.contextmanager
def exchange(
    url: str,
    method: str,
    path: str,
    data: bytes | None,
    fields: Mapping[str, str],
    *,
    timeout: float,
    connect: float = math.inf,
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield the answer, whose body may be read; raises as `call` does, also for
    errors within the context. fields: headers. timeout: seconds until the end of the context.
    connect: at most so many of them for the connection."""
    late = ServerGone(f"{path} was not answered within {timeout:.3g} s")
    if timeout <= 0:
        raise late
    # http.client would show a key that it refuses.
    if not all(value.isascii() and value.isprintable() for value in fields.values()):
        raise UserError(
            f"the key for {redact_text(url)} has characters that no header may have, a line's end"
            " perhaps; set it again"
        )
    base = urllib.parse.urlsplit(url)
    make = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
    expired = threading.Event()
    try:
        limit = min(timeout, connect)
        connection = make(base.hostname or "", base.port, timeout=limit)
        with contextlib.closing(connection):
            try:
                connection.connect()
            except TimeoutError:
                reason = f"{path} was not answered within {limit:.3g} s: no connection"
                raise ServerGone(reason) from None
            connection.sock.settimeout(timeout)
            # A socket's timeout counts from byte to byte: a server that sends one now and then
            # would never exceed it.
            with cut_after(timeout, connection.sock, expired):
                connection.request(method, f"{base.path}{path}", data, dict(fields))
                answer = connection.getresponse()
                if not 200 <= answer.status < 300:
                    raise ServerRefused(answer.status, explain(answer.read(MAX_ANSWER_BYTES)))
                yield answer
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The cut socket raises whatever the read was doing; the reason is the limit.
        if expired.is_set() or isinstance(error, TimeoutError):
            raise late from None
        if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
            raise ServerGone(getattr(error, "strerror", None) or "hung up") from None
        if isinstance(error, OSError):
            raise ServerGone(error.strerror or str(error)) from None
        raise ServerGone(f"{path}: {error!r}") from None
    if expired.is_set():
        raise late


def explain(raw: bytes, longest: int = 400) -> str:
    """Return the message of an error answer in one line."""
    text = raw.decode(errors="replace")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        message = text
    if isinstance(message, dict):
        message = message.get("error", message.get("detail", message))
    if isinstance(message, dict):
        message = message.get("message", message)
    text = " ".join(str(message).split())
    return text if len(text) <= longest else text[: longest - 3] + "..."
