"""Middleware before all routes of a server that was started with a key (VLLM_API_KEY).

vLLM itself demands the key only on the routes of its OpenAI API. Here it is also required to pause
a server, replace its weights or put it to sleep. Only /health, /ping and /metrics are open: they
change nothing and reveal nothing of what is drawn. Bodies larger than any real request are refused.
The guard also announces a shutdown (`shutdown.py`) and accepts adapters (`adapter_store.py`).
"""

import hmac
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from jaxtrain_vllm.adapter_store import FILES_HEADER, ROUTE, AdapterStore
from jaxtrain_vllm.shutdown import VARIABLE, ShutdownState

MIDDLEWARE = "jaxtrain_vllm.guard.RequestGuard"
KEY_VARIABLE = "VLLM_API_KEY"
OPEN = ("/health", "/ping", "/metrics")
MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million tokens as JSON is an eighth of it."""

DRAWS = ("/generate", "/completions", "/responses")
"""Endings of the routes that start an answer."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class TooLarge(Exception):
    """Raised for a body beyond MAX_BODY_BYTES."""


class RequestGuard:
    """ASGI middleware; without a key in the environment it only limits bodies."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        key: str | None = None,
        shutdown: ShutdownState | None = None,
        adapters: AdapterStore | None = None,
    ):
        self.app, self.key = app, os.environ.get(KEY_VARIABLE) if key is None else key
        self.shutdown = shutdown or ShutdownState(float(os.environ.get(VARIABLE, "0")))
        self.adapters = adapters or AdapterStore()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.shutdown.install_handler()  # after vLLM has set handlers of its own
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = dict(scope.get("headers") or ())
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        if self.key and path not in OPEN and not self._knows_key(headers.get(b"authorization")):
            return await refuse(scope, send, 401, b"no or another key; see VLLM_API_KEY")
        if path.startswith(ROUTE):
            return await self._take_adapter(scope, path.removeprefix(ROUTE), headers, receive, send)
        if self.shutdown.draining and (path == "/health" or path.endswith(DRAWS)):
            return await refuse(scope, send, 503, self.shutdown.describe().encode())
        counts = path not in OPEN
        self.shutdown.running += counts
        try:
            await self._pass_on(scope, headers, receive, send)
        finally:
            self.shutdown.running -= counts

    async def _pass_on(
        self, scope: dict[str, Any], headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        """Forward a request to vLLM, and stop it if its body is too large."""
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return await refuse(scope, send, 413, b"the body is too large")
        sent, heard = False, 0

        async def bounded() -> dict[str, Any]:
            nonlocal heard
            message = await receive()
            heard += len(message.get("body") or b"")
            if heard > MAX_BODY_BYTES:
                raise TooLarge
            return message

        async def noted(message: dict[str, Any]) -> None:
            nonlocal sent
            sent = True
            await send(message)

        try:
            await self.app(scope, bounded, noted)
        except TooLarge:
            if not sent:
                await refuse(scope, send, 413, b"the body is too large")

    async def _take_adapter(
        self,
        scope: dict[str, Any],
        name: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
    ) -> None:
        if not self.key:
            return await refuse(scope, send, 403, b"only a server with a VLLM_API_KEY takes files")
        if scope["type"] != "http":
            return await refuse(scope, send, 403, b"no websocket")

        async def read() -> AsyncIterator[bytes]:
            has_more = True
            while has_more:
                message = await receive()
                has_more = message["type"] == "http.request" and message.get("more_body", False)
                yield message.get("body") or b""

        files = headers.get(FILES_HEADER.lower().encode())
        files_header = None if files is None else files.decode("latin-1")
        pieces = (piece async for piece in read() if piece)
        status, answer = await self.adapters.handle(scope["method"], name, files_header, pieces)
        await refuse(scope, send, status, json.dumps(answer).encode())

    def _knows_key(self, authorization: bytes | None) -> bool:
        return hmac.compare_digest(authorization or b"", b"Bearer " + (self.key or "").encode())


async def refuse(scope: dict[str, Any], send: Send, status: int, why: bytes) -> None:
    """Answer with a status and one line; close a websocket."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    kind = (b"content-type", b"text/plain")
    # What is left of the body is not read.
    head = [kind, (b"content-length", str(len(why)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": why})
