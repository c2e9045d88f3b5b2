"""OpenAI-compatible endpoint of the policy in this process, for environments with HTTP agents.

    agent, in another process ── POST /v1/chat/completions ──> a thread with its own event loop
                                                                       │ to the episode's
    Env.run:  record = server.begin(...)                               v
              await record.watch(the agent's run)  <── what it drew ── Record ── Engine.generate
              record.finish() -> Episode

All environments thus sample from the same engine, with exact tokens and versions. The episode of a
request is the first of these that is present:

    /e/ID/v1/...                     agents configured with a base URL only
    X-Session-ID: ID
    "metadata": {"episode": "ID"}    forwarded by NeMo Gym

Every request needs `Authorization: Bearer TOKEN`. docs/nemo_gym.md has the routes.
"""

import asyncio
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from jaxtrain.data.chat.omissions import Kwargs
from jaxtrain.environments.chat_request import MODEL, limit, read_stop_ids
from jaxtrain.environments.chat_response import split_chat, write_chat, write_tokens
from jaxtrain.environments.episode_record import ChatAnswer, EndpointFormat, EpisodeRecord
from jaxtrain.environments.request_fields import (
    SAMPLING,
    TOKENS,
    RequestRefused,
    check_fields,
    decompress,
    parse_body,
)
from jaxtrain.environments.token_history import TurnTemplate
from jaxtrain.environments.tool_calls import find_family
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, Engine, Sampling
from jaxtrain.text_safety import escape_control_chars

T = TypeVar("T")
MAX_BYTES = 1 << 26
"""Limit of bytes of a request."""
START_SECONDS = 10.0
MAX_NOTED = 100
"""Names of fields that are logged, each once."""


class PolicyServer:
    """Policy endpoint (see the module's docstring). Call `open` before passing on its URL."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_model_len: int,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        log: Callable[[str], None] = print,
    ):
        """max_model_len: longest sequence, prompt and answer together. port: 0 for any free one.
        token: bearer token of requests; None for a random one. log: receives, once each, names of
        fields of requests that change nothing. Raises UserError for a tokenizer
        without a chat template."""
        self.template = TurnTemplate(tokenizer)
        self.family = find_family(str(tokenizer.chat_template))
        self.max_model_len, self.host, self.port = max_model_len, host, port
        self.token = token or secrets.token_urlsafe(24)
        self.log = log
        self._noted: set[str] = set()
        self._records: dict[str, EpisodeRecord] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        """Listen in a thread and return the base URL; UserError if the port is in use.
        Idempotent."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="policy", daemon=True)
                thread.start()
                try:
                    self._run_in(loop, self._listen())
                except OSError as error:
                    loop.call_soon_threadsafe(loop.stop)
                    raise UserError(
                        f"the policy endpoint cannot listen on {self.host}:{self.port}: {error};"
                        " give it another port, or 0 for any free one"
                    ) from None
                self._loop, self._thread = loop, thread
        return self.base_url

    @property
    def base_url(self) -> str:
        """Base URL for agents, "http://127.0.0.1:8311/v1"."""
        return f"http://{self.host}:{self.port}/v1"

    def begin(
        self,
        engine: Engine,
        sampling: Sampling,
        index: int,
        episode_id: str | None = None,
        within: EpisodeRecord | None = None,
        kwargs: Kwargs = None,
    ) -> EpisodeRecord:
        """Register an episode, so that requests can sample for it.

        Must be called in the event loop of its engine, or with `within` from any thread.
        episode_id: id chosen by the caller. within: the game that it is part of, which fails with
        it. kwargs: variables of the chat template, which those of a request replace.
        """
        with self._lock:
            self._count += 1
            name = episode_id or f"{index}-{self._count}"
            form = EndpointFormat(
                self.template, self.family, self.max_model_len, self._note, kwargs
            )
            url = f"http://{self.host}:{self.port}/e/{name}/v1"
            record = EpisodeRecord(name, form, engine, sampling, index, url, within)
            self._records[name] = record
        return record

    def end(self, episode_id: str) -> None:
        """Remove an episode; requests for it are refused from now on."""
        with self._lock:
            record = self._records.pop(episode_id, None)
        if record is not None:
            record.close()

    def close(self) -> None:
        """Stop listening and end the thread."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        try:
            self._run_in(loop, self._runner.cleanup())
        except TimeoutError:
            pass
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            loop.close()

    def _note(self, name: str) -> None:
        """Log, once, a field of requests that changes nothing."""
        with self._lock:
            new = name not in self._noted and len(self._noted) < MAX_NOTED
            self._noted.update([name] if new else [])
        if new:
            self.log(f"note: the policy endpoint does not read {escape_control_chars(name)}")

    @staticmethod
    def _run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(START_SECONDS)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[self._guard])
        for prefix in ("", "/e/{episode}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/tokenize", self._tokenize)
            app.router.add_post(f"{prefix}/inference/v1/generate", self._generate)
            # Clients configured with a base URL that ends with /v1 append the path to it.
            app.router.add_post(f"{prefix}/v1/inference/v1/generate", self._generate)
        # handler_cancellation: a client that disconnects cancels its request.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            # aiohttp logs a traceback for an encoding that it does not have; see read_json.
            auto_decompress=False,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Require the bearer token, and format refusals like OpenAI's servers."""
        token = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        try:
            # Header bytes that are not UTF-8 are lone surrogates here.
            sent = token.encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(sent, self.token.encode()):
                raise RequestRefused(
                    401, "the Authorization header does not carry this run's token"
                )
            return await handler(request)
        except RequestRefused as error:
            text = escape_control_chars(str(error))
            details = {"message": text, "type": "invalid_request_error", "code": error.status}
            return web.json_response(
                {"object": "error", "message": text, "error": details}, status=error.status
            )

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "jaxtrain"}
        data = [{**model, "max_model_len": self.max_model_len}]
        return web.json_response({"object": "list", "data": data})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        record = self._find(request, body)
        answer: ChatAnswer = await self._ask(record, record.chat(body))
        number = f"chatcmpl-{record.id}-{record.num_turns}"
        response = write_chat(answer, number, body)
        if body.get("stream"):
            return await stream(request, split_chat(response, body))
        return web.json_response(response)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        check_fields(body, TOKENS, self._note)
        check_fields(body.get("sampling_params") or {}, SAMPLING, self._note, "sampling_params.")
        record = self._find(request, body)
        tokens, params = body.get("token_ids") or [], body.get("sampling_params") or {}
        sampling = limit(params, record.sampling)
        stops = read_stop_ids(params, record.vocabulary)
        work = record.continue_tokens(tokens, sampling, stops)
        completion: Completion = await self._ask(record, work)
        number = f"generate-{record.id}-{record.num_turns}"
        return web.json_response(write_tokens(tokens, completion, number))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        record = self._find(request, body)

        tokens: list[int] = await self._ask(record, record.render(body))
        response = {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens}
        return web.json_response(response)

    def _find(self, request: web.Request, body: Mapping[str, Any]) -> EpisodeRecord:
        """Return the episode of a request; RequestRefused if there is none."""
        metadata = body.get("metadata")
        name = (
            request.match_info.get("episode")
            or request.headers.get("X-Session-ID")
            or (metadata.get("episode") if isinstance(metadata, dict) else None)
        )
        record = self._records.get(str(name))
        if record is None:
            raise RequestRefused(
                404,
                f"there is no episode {str(name)[:80]!r} (or it has ended): name one in the path"
                " (/e/ID/v1), in X-Session-ID, or in metadata.episode",
            )
        return record

    @staticmethod
    async def _ask(record: EpisodeRecord, work: Coroutine[Any, Any, T]) -> T:
        """Run work in the event loop that plays the episode."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, record.loop)
        except RuntimeError:  # the loop is closed
            work.close()
            raise RequestRefused(410, f"episode {record.id} has ended") from None
        try:
            return await asyncio.wrap_future(future)
        except RequestRefused as error:
            record.refused = str(error)
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client has disconnected
                future.cancel()
                raise
            raise RequestRefused(410, f"episode {record.id} has ended") from None
        except Exception as error:
            record.loop.call_soon_threadsafe(record.fail, error)
            raise RequestRefused(400, f"episode {record.id} is given up: {error!r}") from None


async def read_json(request: web.Request) -> dict[str, Any]:
    """Parse the body of a request; RequestRefused if it is not a JSON object."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(413, f"the body has more than {MAX_BYTES:,} bytes") from None
    except (ClientPayloadError, HttpProcessingError, ValueError) as error:
        raise RequestRefused(400, f"the body cannot be read: {error}") from None
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    # In a thread: 64 MiB of JSON take a second, and other agents wait.
    return await asyncio.to_thread(
        lambda: parse_body(decompress(raw, coding, MAX_BYTES), request.charset)
    )


async def stream(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    """Send chunks as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
