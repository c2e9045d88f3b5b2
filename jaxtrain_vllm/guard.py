"""What stands before all routes of a server that was started with a key (VLLM_API_KEY).

vLLM asks for the key at the routes of its OpenAI API alone. Who may pause a server, give it other
weights or put it to sleep must know it, too. Only /health, /ping and /metrics are open: they
change nothing and tell nothing of what is drawn. And no request may be larger than any real one.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

MIDDLEWARE = "jaxtrain_vllm.guard.Guard"
KEY_VARIABLE = "VLLM_API_KEY"
OPEN = ("/health", "/ping", "/metrics")
MAX_BODY_BYTES = 64 * 2**20
"""A prompt of a million tokens as JSON is an eighth of it."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class TooLarge(Exception):
    """A body beyond MAX_BODY_BYTES."""


class Guard:
    """ASGI middleware; without a key in the environment it only bounds bodies."""

    def __init__(self, app: Callable[..., Awaitable[None]], key: str | None = None):
        self.app, self.key = app, os.environ.get(KEY_VARIABLE) if key is None else key

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = dict(scope.get("headers") or ())
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        if self.key and path not in OPEN and not self._knows_key(headers.get(b"authorization")):
            return await refuse(scope, send, 401, b"no or another key; see VLLM_API_KEY")
        told = headers.get(b"content-length", b"0")
        if not told.isdigit() or int(told) > MAX_BODY_BYTES:
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

    def _knows_key(self, given: bytes | None) -> bool:
        return hmac.compare_digest(given or b"", b"Bearer " + (self.key or "").encode())


async def refuse(scope: dict[str, Any], send: Send, status: int, why: bytes) -> None:
    """Answer with a status and one line; hang up on a websocket."""
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    kind = (b"content-type", b"text/plain")
    # What is left of the body is not read.
    head = [kind, (b"content-length", str(len(why)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": why})
