"""VllmEngine: many coroutines with one prompt each, on servers that may join and leave.

generate ──bounded──> its session's server ──answer──> checked ──> Completion
              ^                        │                  │
              │   refused, cut off, 5xx, late, dropped, unusable: back off, retry, elsewhere
              └────────────────────────┴──────────────────┘   if possible
                no server at all: wait, up to wait_seconds, then RunStopped

A call of `generate` gives one Completion or an exception, so nothing is lost or duplicated;
tokens that a dead server had drawn are discarded. An answer interrupted by new weights keeps its
tokens and continues behind them.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import numpy as np

from jaxtrain.batch import RouteShape, join_routes
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed, KeepLost, Likely, Sampling
from jaxtrain.generation.version_tracker import note_version
from jaxtrain.generation.vllm.control import explain, headers
from jaxtrain.generation.vllm.images import PromptImages, SentPrompt
from jaxtrain.generation.vllm.messages import (
    GENERATE,
    AnswerPart,
    GarbageAnswer,
    ServerAnswer,
    build_request,
    derive_seed,
    parse_answer,
)
from jaxtrain.generation.vllm.pool import Pool
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.text_safety import split_login

MAX_ATTEMPTS = 50
"""Attempts per request, including those that do not count as failures: a bound if servers flap."""
SESSION = "X-Session-ID"
"""Header by which a router keeps requests with a common prefix on one server."""
MAX_ANSWER_BYTES = 2**28
"""Limit for an answer; one with the experts of 100,000 tokens takes about a third of it."""
KEPT_POLL_SECONDS = 0.05
NO_LOGPROBS = "NaN log-probs"
POLL_SECONDS = 0.25
"""Interval at which a waiting request checks whether its server was dropped."""


class AnswerLost(Exception):
    """Raised when a request got no usable answer, but a retry may. kind: a few words, for
    counting."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class LoopConnection(NamedTuple):
    """Resources of one event loop."""

    session: aiohttp.ClientSession
    room: asyncio.Semaphore
    gate: asyncio.Lock
    """Locked by the one request that polls for a server; the others queue behind it."""


class KeptServers:
    """Servers that keep a version for one evaluation, while the others continue with training.

        loop thread   Pool.keep ─> KeptServers ───── a publish skips them ─────────────────> release
        evaluation    engine of these servers alone: every token is of that version            │
        watchers      behind by some versions: sent the newest at once, whole or as deltas <───┘

    A server that is dropped keeps nothing. When none is left, KeepLost ends the evaluation, which
    is then repeated; if all other servers are gone, training gets these.
    """

    def __init__(self, pool: Pool, servers: Sequence[VllmServer]):
        """servers: from Pool.keep; those that receive the version only soon are waited for."""
        self.pool, self.servers, self.version = pool, servers, pool.version
        self.share = len(servers) / max(1, len(pool.up()))
        """Fraction of all servers."""

    def ready(self) -> list[VllmServer]:
        """Return the servers that may get requests now."""
        return [
            server
            for server in self.servers
            if server.state == "up" and server.keeps and server.kept_version == self.version
            if not server.updating
        ]

    async def take(self, session: int | None) -> VllmServer:
        """Wait for a server and count its load; KeepLost if none keeps the version."""
        while True:
            server = self.pool.acquire(session, self.ready)
            if server is not None:
                return server
            if not any(self._may_come(server) for server in self.servers):
                reasons = ", ".join(server.describe() for server in self.servers)
                raise KeepLost(f"no server holds version {self.version} any more: {reasons}")
            await asyncio.sleep(KEPT_POLL_SECONDS)

    def release(self) -> None:
        """Return them to training."""
        self.pool.release_kept(
            server for server in self.servers if server.kept_version == self.version
        )

    def _may_come(self, server: VllmServer) -> bool:
        holds_version = server.state == "up" and server.kept_version == self.version
        return holds_version and server.version <= self.version


class VllmEngine:
    """`engine.Engine` over HTTP. adapters: versions are LoRA adapters, selected by name.

    May be used from several event loops, one after the other or at once.
    """

    reports_likely = True
    images = PromptImages()
    """Writer of prompts with images; whoever opens the engine sets that of a model with images."""

    def __init__(
        self,
        servers: Pool,
        *,
        adapters: bool,
        first_pause: float = 0.5,
        routes: RouteShape | None = None,
        group_size: int | None = None,
        kept_servers: KeptServers | None = None,
        policy: str = "",
    ):
        """routes: request the experts of each token, and fail if a server does not report them.
        group_size: this many consecutive indices share a prompt, form a session, and prefer one
        server; None: every request goes to the least loaded one. kept_servers: use these servers
        alone, and draw all tokens with the version that they keep. policy: draw with this policy's
        adapters."""
        self.policy = policy
        self.servers, self.adapters, self.first_pause = servers, adapters, first_pause
        self.routes, self.group_size, self.kept_servers = routes, group_size, kept_servers
        self._connections: dict[asyncio.AbstractEventLoop, LoopConnection] = {}
        self._logged_kinds: set[str] = set()

    @property
    def reads_images(self) -> bool:
        """True if prompts may hold images."""
        return self.images.tokenizer is not None

    @property
    def version(self) -> int:
        """Return the newest published version, or the kept one."""
        return self.servers.version if self.kept_servers is None else self.kept_servers.version

    def keep(self) -> "VllmEngine | None":
        """Return an engine on servers that keep the newest version (rollout.vllm.eval_servers);
        None if there are too few."""
        kept_servers = self.servers.keep(self.servers.config.eval_servers)
        if not kept_servers:
            return None
        engine = VllmEngine(
            self.servers,
            adapters=self.adapters,
            first_pause=self.first_pause,
            routes=self.routes,
            group_size=self.group_size,
            kept_servers=KeptServers(self.servers, kept_servers),
        )
        engine.images = self.images
        return engine

    def release(self) -> None:
        """Return the kept servers to training."""
        assert self.kept_servers is not None, "of a kept one"
        self.kept_servers.release()

    def counters(self) -> dict[str, float]:
        """Return requests, retries, lost servers etc. since the start, and the current number of
        servers."""
        return {f"vllm/{name}": number for name, number in self.servers.measure().items()}

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None:
            await connection.session.close()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
        likely: int = 0,
        images: PlacedImages | None = None,
    ) -> Completion:
        """Continue a prompt; see `engine.Engine`."""
        connection = self._loop_connection()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        best: list[Likely] = []
        routed: np.ndarray | None = None
        failures, pause = 0, self.first_pause
        session = index // (self.group_size or 1)
        direct = masks = False
        failed: VllmServer | None = None
        sent: SentPrompt | None = None
        if images is not None:
            # Decodes pictures: other requests go on meanwhile.
            sent = await asyncio.to_thread(self.images.write, prompt, images)
        async with connection.room:
            for _ in range(MAX_ATTEMPTS):
                server = await self._acquire_server(connection, session, direct, failed)
                epoch = server.epoch
                # Before the request: a group that will be too old is cancelled at once.
                note_version(min(versions, default=server.version))
                try:
                    # The seed depends on the position, so that a repeated request draws the same
                    # and a continued one draws anew.
                    part = AnswerPart(
                        [*prompt, *tokens],
                        sampling,
                        stop_ids,
                        max_tokens=sampling.max_new_tokens - len(tokens),
                        seed=derive_seed(sampling.seed, index, len(prompt) + len(tokens)),
                        session=session,
                        likely=likely,
                        masks=masks,
                        images=sent and sent._replace(tokens=[*sent.tokens, *tokens]),
                        never=self.images.never,
                    )
                    answer, drawn = await self._request(connection, server, part)
                except AnswerLost as lost:
                    self.servers.count("retries")
                    if server is self.servers.front:
                        await self._leave_router(lost)
                        direct = True
                        continue
                    self.servers.suspect(server)
                    failed, masks = server, masks or lost.kind == NO_LOGPROBS
                    # Failures of a server that was dropped meanwhile are not the request's fault.
                    failures += server.epoch == epoch
                    if failures > self.servers.config.retries:
                        self._log_failure(lost)
                        raise EpisodeFailed(f"vllm: {lost.kind}") from None
                    # Random, so that the requests of a lost server do not return all at once.
                    await asyncio.sleep(pause * (1 + random.random()))
                    pause = min(2 * pause, 30.0)
                    continue
                finally:
                    self.servers.release(server)
                tokens += answer.tokens
                logprobs += answer.logprobs
                versions += drawn
                best += answer.likely
                routed = join_routes(routed, answer.routed)
                # A weight update interrupted the answer: continue behind the tokens drawn so far.
                if answer.finish_reason == "abort" and len(tokens) < sampling.max_new_tokens:
                    self.servers.count("interrupted")
                    continue
                reason = "stop" if answer.finish_reason == "stop" else "length"
                return Completion(tokens, logprobs, reason, versions, routed, tuple(best))
        raise EpisodeFailed("vllm: asked too often")

    def _log_failure(self, lost: AnswerLost) -> None:
        """Log why a request was given up, once per kind; the caller counts them."""
        if lost.kind not in self._logged_kinds:
            self._logged_kinds.add(lost.kind)
            times = self.servers.config.retries + 1
            self.servers.log(f"a request failed {times} times, the last time: {lost}")

    async def _leave_router(self, lost: AnswerLost) -> None:
        """Handle a failure through the router; the request is repeated on a server itself."""
        if lost.kind == "connection lost":
            self.servers.mark_front_down(str(lost))
        if lost.kind == "unknown weights":
            await asyncio.to_thread(self.servers.drop_strangers)

    async def _acquire_server(
        self, connection: LoopConnection, session: int, direct: bool, failed: VllmServer | None
    ) -> VllmServer:
        """Wait for a server; RunStopped if none comes in time. direct: bypass the router. failed:
        prefer another one."""
        servers = self.servers
        if self.kept_servers is not None:
            return await self.kept_servers.take(session if self.group_size else None)
        # One request polls for all: thousands of them polling would keep the event loop busy.
        async with connection.gate:
            deadline = servers.clock() + servers.config.wait_seconds
            while True:
                server = None if direct else servers.acquire_front()
                if server is None:
                    server = servers.acquire(session if self.group_size else None, avoid=failed)
                if server is not None:
                    return server
                # Servers that update their weights, sleep or are full are not missing: the time
                # limit is for a pool without usable servers.
                if servers.asleep or servers.publishing or servers.ready():
                    deadline = servers.clock() + servers.config.wait_seconds
                servers.check(servers.clock() > deadline)
                await asyncio.sleep(0.05)

    async def _request(
        self, connection: LoopConnection, server: VllmServer, part: AnswerPart
    ) -> tuple[ServerAnswer, list[int]]:
        """Return (answer, version of each token) of one request to one server."""
        if 0 < server.max_model_len <= len(part.prompt):
            raise EpisodeFailed("vllm: the prompt fills the server's max_model_len")
        self.servers.check_length(server, len(part.prompt), part.max_tokens)
        # Read once: a publish may change it while the request is under way.
        sent_version = server.version
        model = self.servers.label(sent_version, self.policy) if self.adapters else server.model
        route = server.route
        if part.images is not None and route != GENERATE:
            raise UserError(
                f"{server.url} takes images with prompts of ids only over {GENERATE}; start it with"
                " --enable-scale-out"
            )
        body = build_request(route, part, model)
        # The config refuses those that the body has already.
        body.get("sampling_params", body).update(self.servers.config.generation_kwargs)
        self.servers.count("requests")
        status, raw = await self._post(connection, server, body, part.session)
        self.servers.note_progress(server)
        if status >= 500 or status in (408, 425, 429):
            raise AnswerLost(
                f"HTTP {status}", f"HTTP {status} from {server.url}: {explain(raw, 120)}"
            )
        if status == 404 and self.adapters:
            # It was restarted, or the adapter was unloaded: its watcher loads it again.
            if server is not self.servers.front:
                self.servers.drop(server, f"does not serve {model} any more")
            raise AnswerLost("adapter gone", f"{server.url} does not serve {model}")
        if status != 200:
            raise UserError(
                f"{server.url} refuses a prompt of {len(part.prompt)} tokens with max_new_tokens"
                f" {part.max_tokens}: HTTP {status}, {explain(raw)}"
            )
        try:
            echo = None if part.images is None else part.prompt
            answer = parse_answer(
                route, raw, part.max_tokens, len(part.prompt), self.routes, part.likely, echo
            )
        except GarbageAnswer as error:
            self.servers.note_answer(server, str(error))
            raise AnswerLost("bad answer", f"{server.url}{route}: {error}") from None
        if self.routes is not None and answer.routed is None and answer.tokens:
            raise RunStopped(
                f"{server.url} does not say to which experts tokens went, which"
                " rollout.router_replay needs; start it with --enable-return-routed-experts"
            )
        missing = sum(value != value for value in answer.logprobs)
        self.servers.count("tokens_without_logprob", missing)
        problem = f"{missing} of {len(answer.tokens)} log-probs are NaN" if missing else ""
        self.servers.note_answer(server, problem)
        if missing == len(answer.tokens) > 0 or (missing and not part.masks):
            raise AnswerLost(NO_LOGPROBS, f"{server.url}{route}: {problem}")
        versions = self._date_tokens(server, answer, sent_version)
        if self.kept_servers is not None and any(
            version != self.kept_servers.version for version in versions
        ):
            raise KeepLost(f"{server.url} went on to other weights")
        return answer, versions

    def _date_tokens(
        self, server: VllmServer, answer: ServerAnswer, sent_version: int
    ) -> list[int]:
        """Return the version of each token; drops a server whose weights are not this run's."""
        count = len(answer.tokens)
        if self.adapters:
            return [sent_version] * count
        if answer.labels is None:
            # Requests are cut when weights change, so a whole answer is of one version; one that
            # raced with the change could be of either.
            if server.version != sent_version and answer.finish_reason != "abort":
                raise AnswerLost("weights changed", "the weights changed while it was answered")
            return [sent_version] * count
        versions: list[int] = []
        for label in answer.labels:
            version = self.servers.read_label(label)
            if version is None:
                self.servers.count("unknown_version")
                why = f"it samples from weights {label!r}, which this run never sent"
                if server is not self.servers.front:
                    self.servers.drop(server, why)
                raise AnswerLost("unknown weights", f"{server.url} sampled from unknown weights")
            versions.append(version)
        return versions

    async def _post(
        self, connection: LoopConnection, server: VllmServer, body: dict, session: int
    ) -> tuple[int, bytes]:
        """Return (status, body) of the answer; AnswerLost if there is none or the server was
        dropped."""
        epoch = server.epoch
        limit = self.servers.config.request_seconds
        task = asyncio.ensure_future(
            self._exchange(connection.session, server, body, session, limit)
        )
        try:
            # A dead host keeps connections open; the epoch changes as soon as its watcher notices.
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if server.epoch != epoch:
                    raise AnswerLost("server gone", f"{server.url} is gone")
            return task.result()
        except TimeoutError:
            raise AnswerLost(
                "time-out", f"no answer from {server.url} within {limit:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerLost("connection lost", f"{server.url}: {error or error!r}") from None
        finally:
            task.cancel()

    async def _exchange(
        self,
        connections: aiohttp.ClientSession,
        server: VllmServer,
        body: dict,
        session: int,
        limit: float,
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=10)
        url = f"{split_login(server.url)[0]}{server.route}"
        named = {**headers(server.url), SESSION: f"{self.servers.session}-{session}"}
        async with connections.post(url, json=body, timeout=timeout, headers=named) as answer:
            # Read in parts, so that a broken server cannot fill the memory with one answer.
            raw = bytearray()
            async for part in answer.content.iter_any():
                raw += part
                if len(raw) > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(
                        f"an answer of more than {MAX_ANSWER_BYTES} bytes"
                    )
            return answer.status, bytes(raw)

    def _loop_connection(self) -> LoopConnection:
        # aiohttp sessions and asyncio locks belong to the event loop that created them.
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            room = self.servers.config.concurrency
            # Evaluation gets its servers' share of the concurrency; training has the rest.
            if self.kept_servers is not None:
                room = max(1, int(room * self.kept_servers.share))
            # Shorter than the server's 5 s, or a request meets the end of its connection half way.
            connector = aiohttp.TCPConnector(limit=room + 16, keepalive_timeout=2.0)
            session = aiohttp.ClientSession(connector=connector)
            self._connections[loop] = LoopConnection(
                session, asyncio.Semaphore(room), asyncio.Lock()
            )
        return self._connections[loop]
