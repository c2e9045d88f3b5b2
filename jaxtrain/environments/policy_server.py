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
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiohttp import web

from jaxtrain.data.chat.omissions import Kwargs
from jaxtrain.environments.chat_request import MODEL, limit, read_logprobs, read_stop_ids
from jaxtrain.environments.chat_response import split_chat, write_chat, write_tokens
from jaxtrain.environments.endpoint_app import EndpointApp, Route, read_json, stream
from jaxtrain.environments.episode_record import ChatAnswer, EndpointFormat, EpisodeRecord
from jaxtrain.environments.request_fields import SAMPLING, TOKENS, RequestRefused, check_fields
from jaxtrain.environments.token_history import TurnTemplate
from jaxtrain.environments.tool_calls import find_family
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, Engine, Sampling
from jaxtrain.text_safety import escape_control_chars

T = TypeVar("T")
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
            self._run_in(loop, self._app.close())
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
        routes = [
            route
            for prefix in ("", "/e/{episode}")
            for route in (
                Route("GET", f"{prefix}/v1/models", self._models),
                Route("POST", f"{prefix}/v1/chat/completions", self._chat),
                Route("POST", f"{prefix}/tokenize", self._tokenize),
                Route("POST", f"{prefix}/inference/v1/generate", self._generate),
                # Clients whose base URL ends with /v1 append the path to it.
                Route("POST", f"{prefix}/v1/inference/v1/generate", self._generate),
            )
        ]
        self._app = EndpointApp(routes, self.token, owner="this run's token")
        self.port = await self._app.listen(self.host, self.port)

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
            return await stream(request, iterate(split_chat(response, body)))
        return web.json_response(response)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        check_fields(body, TOKENS, self._note)
        check_fields(body.get("sampling_params") or {}, SAMPLING, self._note, "sampling_params.")
        record = self._find(request, body)
        tokens, params = body.get("token_ids") or [], body.get("sampling_params") or {}
        sampling = limit(params, record.sampling)
        stops = read_stop_ids(params, record.vocabulary)
        # Clients ask for 1 to get the drawn token's, which would cost a pass over the answer.
        likely = read_logprobs(params) or 0
        work = record.continue_tokens(tokens, sampling, stops, likely if likely > 1 else 0)
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


async def iterate(chunks: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield chunks that are known at once."""
    for chunk in chunks:
        yield chunk
