"""The HTTP application of every endpoint that answers in OpenAI's form.

    routes of an answerer ──> EndpointApp: key, bounds, errors as OpenAI's servers write them
       PolicyServer      sampling is the run's, turns go to an episode      (training)
       serving.Answerer  sampling is the request's                          (jaxtrain serve)

An error is {"error": {"message", "type", "param", "code"}}; `param` is the field at fault.
"""

import asyncio
import hmac
import json
import re
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from jaxtrain.environments.request_fields import (
    CHAT,
    EMPTY,
    NEUTRAL,
    TOKENS,
    RequestRefused,
    decompress,
    parse_body,
)
from jaxtrain.text_safety import escape_control_chars

MAX_BYTES = 1 << 26
"""Limit of bytes of a request."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}
FIELD = re.compile(r"[a-z_]+(?=[\s.:\[])")
FIELDS = {*CHAT, *TOKENS, *NEUTRAL, *EMPTY, "prompt", "tokens"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """A path that an answerer serves."""

    method: str
    path: str
    handler: Handler


class EndpointApp:
    """Routes behind a key; see the module's docstring."""

    def __init__(
        self,
        routes: Sequence[Route],
        key: str | None,
        public: Collection[str] = (),
        owner: str = "",
    ):
        """key: bearer token of requests; None lets every program of this machine in, though no web
        page. public: paths that need no key. owner: whose key it is, for the refusal."""
        self.key, self.public, self.owner = key, public, owner or "this server's key"
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[self._guard])
        for route in routes:
            app.router.add_route(route.method, route.path, route.handler)
        # handler_cancellation: a client that disconnects cancels its request.
        self.runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            # aiohttp logs a traceback for an encoding that it does not have; see read_json.
            auto_decompress=False,
        )

    async def listen(self, host: str, port: int) -> int:
        """Listen in the running event loop; return the port. OSError if it is in use."""
        await self.runner.setup()
        await web.TCPSite(self.runner, host, port).start()
        return self.runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and cancel what is being answered."""
        await self.runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the key, and answer whatever goes wrong with an error in OpenAI's form."""
        try:
            if request.path not in self.public:
                self._check_key(request)
            return await handler(request)
        except RequestRefused as error:
            return write_error(error)
        except web.HTTPException as error:
            return write_error(RequestRefused(error.status, f"{request.method}: {error.reason}"))
        except ConnectionResetError:
            raise
        except Exception as error:
            print(escape_control_chars(traceback.format_exc()), file=sys.stderr)
            return write_error(RequestRefused(500, f"the server failed: {type(error).__name__}"))

    def _check_key(self, request: web.Request) -> None:
        if self.key is None:
            origin = urlsplit(request.headers.get("Origin", "http://localhost")).hostname
            if origin not in LOOPBACK:
                raise RequestRefused(403, "web pages may ask only a server that has a key")
            return
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        token = token or request.headers.get("X-API-Key", "")
        # Header bytes that are not UTF-8 are lone surrogates here.
        sent = token.encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent, self.key.encode()):
            raise RequestRefused(401, f"the Authorization header does not carry {self.owner}")


def write_error(error: RequestRefused) -> web.Response:
    """Build the response to a refused request."""
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return web.json_response(describe_error(error), status=error.status, headers=headers)


def describe_error(error: RequestRefused) -> dict[str, Any]:
    """Build the body of an error. Messages begin with the field that they are about."""
    text = escape_control_chars(str(error))
    start = FIELD.match(text)
    details = {
        "message": text,
        "type": KINDS.get(error.status, "invalid_request_error"),
        "param": error.param or (start.group() if start and start.group() in FIELDS else None),
        "code": error.status,
    }
    return {"object": "error", "message": text, "error": details}


async def read_json(request: web.Request) -> dict[str, Any]:
    """Parse the body of a request; RequestRefused if it is not a JSON object."""
    # In a thread: 64 MiB of JSON take a second, and other agents wait.
    raw = await read_body(request)
    return await asyncio.to_thread(parse_body, raw, request.charset)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request, decompressed; RequestRefused."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(413, f"the body has more than {MAX_BYTES:,} bytes") from None
    except (ClientPayloadError, HttpProcessingError, ValueError) as error:
        raise RequestRefused(400, f"the body cannot be read: {error}") from None
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    return await asyncio.to_thread(decompress, raw, coding, MAX_BYTES)


async def stream(
    request: web.Request, chunks: AsyncIterator[Mapping[str, Any]]
) -> web.StreamResponse:
    """Send chunks as server-sent events. What is refused before the first chunk is an error as
    always; later, an event of its own."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
    except RequestRefused as error:
        if not response.prepared:
            raise
        await response.write(f"data: {json.dumps(describe_error(error))}\n\n".encode())
    except ConnectionResetError:  # a client that hangs up is no error of the server
        return response
    await response.write_eof()
    return response
