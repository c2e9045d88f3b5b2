"""Frozen policies: models on separate servers that take part in episodes and are never updated.

    chat.other("judge").draw() ── messages ──> ServedPolicy.reply ──> POST /v1/chat/completions
                                                     ^                      │
                                                     └── refused, late: another server, a pause

A request that cannot be answered fails its episode, as a server of the trained policy would.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import sleep as pause
from typing import Any

import aiohttp
from typing_extensions import override

from jaxtrain.config import Config
from jaxtrain.config.policies import PolicyConfig
from jaxtrain.config.secrets import reveal, reveal_url
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed, FrozenPolicy, PolicyReply, pause_before
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call, explain, headers
from jaxtrain.text_safety import escape_control_chars, split_login

ROUTE = "/v1/chat/completions"
LOOKS = 3
"""Attempts to reach a server at the start."""
LOOK_SECONDS = 30.0
MAX_ANSWER_BYTES = 2**24
"""Largest size of an answer."""


class ServedPolicy(FrozenPolicy):
    """`FrozenPolicy` over HTTP. May be used from several event loops."""

    def __init__(
        self,
        name: str,
        section: PolicyConfig,
        *,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ):
        """section: with its secrets. sleep: for pauses between tries."""
        self.key, self.section, self.sleep = f"policies.{name}", section, sleep
        self.model = section.model
        self._busy = {url.rstrip("/").removesuffix("/v1"): 0 for url in section.servers}
        self._lines: dict[Any, tuple[aiohttp.ClientSession, asyncio.Semaphore]] = {}
        self._counted = dict.fromkeys(("requests", "retries", "failed"), 0)

    def check(self, sleep: Callable[[float], Any] = pause) -> None:
        """Check every server; raises UserError if one does not answer or serves another model."""
        for url in self._busy:
            self.model = self.model or self._look(url, sleep)
            listed = self._list(url, sleep)
            if listed and self.model not in listed:
                raise UserError(
                    f"{self.key}.model {self.model!r} is not what {url} serves, which is"
                    f" {escape_control_chars(', '.join(listed[:8]))}"
                )

    def _look(self, url: str, sleep: Callable[[float], Any]) -> str:
        listed = self._list(url, sleep)
        if not listed:
            raise UserError(f"{self.key}: {url}/v1/models names no model; set {self.key}.model")
        return listed[0]

    def _list(self, url: str, sleep: Callable[[float], Any]) -> list[str]:
        """Return the models that a server lists; empty if it does not say."""
        section, reason = self.section, ""
        for attempt in range(LOOKS):
            if attempt:
                sleep(pause_before(attempt))
            try:
                answer = call(
                    url, "GET", "/v1/models", timeout=LOOK_SECONDS, api_key=section.api_key
                )
                return [str(model["id"]) for model in answer["data"]]
            except ServerRefused as refused:
                if refused.status in (404, 405):
                    return []  # it does not offer that route
                reason = str(refused)
                if not refused.passes:
                    break
            except ServerGone as gone:
                reason = str(gone)
            except (KeyError, TypeError):
                return []
        raise UserError(
            f"{self.key}.servers: {url} does not answer: {escape_control_chars(reason)}; start it,"
            f" or mend its address or {self.key}.api_key"
        )

    @override
    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        section = self.section
        body = {
            **section.options,
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }
        session, room = self._line()
        reason, tried = "", set[str]()
        async with room:
            for attempt in range(section.retries + 1):
                if attempt:
                    self._counted["retries"] += 1
                    await self.sleep(pause_before(attempt))
                with self._choose(tried) as url:
                    try:
                        return read_reply(await self._post(session, url, body))
                    except ServerRefused as refused:
                        reason = f"{url}: {refused}"
                        if not refused.passes:
                            self._counted["failed"] += 1
                            raise EpisodeFailed(
                                f"{self.key} refuses: HTTP {refused.status}",
                                cause=escape_control_chars(
                                    f"{self.key}: {url}{ROUTE}: {refused.message}"
                                ),
                                again=False,
                                mistake=True,
                            ) from None
                    except ServerGone as gone:
                        reason = f"{url}: {gone}"
        self._counted["failed"] += 1
        raise EpisodeFailed(
            f"{self.key} does not answer",
            cause=escape_control_chars(
                f"{self.key}: asked {section.retries + 1} times, at last {reason}"
            ),
            pause=True,
        )

    @contextmanager
    def _choose(self, tried: set[str]) -> Iterator[str]:
        """Yield the least busy server, preferably one that this request has not tried."""
        if len(tried) == len(self._busy):
            tried.clear()
        url = min(
            (server for server in self._busy if server not in tried), key=self._busy.__getitem__
        )
        tried.add(url)
        self._busy[url] += 1
        try:
            yield url
        finally:
            self._busy[url] -= 1

    async def _post(self, session: aiohttp.ClientSession, url: str, body: dict) -> Any:
        """Return the answer's JSON; raises ServerGone or ServerRefused."""
        self._counted["requests"] += 1
        limit = self.section.seconds
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=10)
        address, sent = f"{split_login(url)[0]}{ROUTE}", headers(url, self.section.api_key)
        try:
            async with session.post(address, json=body, timeout=timeout, headers=sent) as answer:
                raw = await answer.content.read(MAX_ANSWER_BYTES)
                while len(raw) < MAX_ANSWER_BYTES and (
                    chunk := await answer.content.read(MAX_ANSWER_BYTES)
                ):
                    raw += chunk
        except TimeoutError:
            raise ServerGone(f"no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(str(error) or repr(error)) from None
        if answer.status != 200:
            raise ServerRefused(answer.status, explain(raw))
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise ServerGone(f"{ROUTE} answers what is no JSON") from None

    def counters(self) -> dict[str, float]:
        """Return requests, retries and failures since the start: {"judge/requests": 4.0}."""
        name = self.key.removeprefix("policies.")
        return {f"{name}/{counter}": float(count) for counter, count in self._counted.items()}

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        line = self._lines.pop(asyncio.get_running_loop(), None)
        if line is not None:
            await line[0].close()

    def _line(self) -> tuple[aiohttp.ClientSession, asyncio.Semaphore]:
        loop, room = asyncio.get_running_loop(), self.section.concurrency
        if loop not in self._lines:
            connector = aiohttp.TCPConnector(limit=room, keepalive_timeout=2.0)
            session = aiohttp.ClientSession(connector=connector)
            self._lines[loop] = session, asyncio.Semaphore(room)
        return self._lines[loop]


def read_reply(answer: Any) -> PolicyReply:
    """Return the reply of a chat completion; raises ServerGone for anything else, which another try
    may fix."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        return PolicyReply(
            "" if text is None else str(text), choice.get("finish_reason") != "length"
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ServerGone(f"{ROUTE} answers {str(answer)[:120]!r}, no chat completion") from None


def open_frozen(config: Config) -> dict[str, ServedPolicy]:
    """Open the frozen policies behind servers by name, each of which has answered; raises
    UserError."""
    policies = {}
    for name, section in config.policies.items():
        if not section.servers:
            continue
        key = f"policies.{name}"
        servers = [
            reveal_url(url, f"{key}.servers.{index}") for index, url in enumerate(section.servers)
        ]
        secrets = {"api_key": section.api_key} if section.api_key else {}
        update = {**reveal(secrets, key), "options": reveal(section.options, f"{key}.options")}
        policies[name] = ServedPolicy(
            name, section.model_copy(update={**update, "servers": servers})
        )
        policies[name].check()
    return policies
