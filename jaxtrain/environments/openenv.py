"""Environments on OpenEnv servers: one WebSocket per episode, with a separate environment object.

    jaxtrain                          server (openenv 0.10, create_app)
      reset {seed, ...}       ──>     observation, reward, done
      step  {action fields}   ──>     the same, once a turn (or once a tool call)
      close                   ──>     the session's place is free again

The openenv package is not needed. Plain HTTP POST /reset and /step would not work, because each
call creates a new environment object. config/openenv.py documents the actions of a turn.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from jaxtrain.config import EnvConfig
from jaxtrain.config.secrets import redact_text, reveal, reveal_url
from jaxtrain.data.chat.messages import SYSTEM_ROLES
from jaxtrain.environments.conversation import AssistantReply, Conversation
from jaxtrain.environments.rewards.texts import FENCE
from jaxtrain.environments.single_turn import find_prompt
from jaxtrain.environments.tool_calls import ToolCall
from jaxtrain.environments.tools import MAX_ERROR, MAX_RESULT, shorten
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episodes import Episode
from jaxtrain.text_safety import split_login

MAX_MESSAGE = 16 * 2**20
"""Limit of bytes of a server's message."""
CONNECT_SECONDS = 10.0
FULL_PAUSE = 0.2
"""Seconds before the next attempt if every server is full; doubles up to FULL_PAUSE_MOST."""
FULL_PAUSE_MOST = 5.0
TEXTS = ("prompt", "text", "message", "content")
"""Fields of an observation with readable text."""
Seen = dict[str, Any]
"""An observation."""


class OpenEnvError(Exception):
    """A server answered with an error; the session continues."""

    def __init__(self, data: Mapping[str, Any]):
        self.code = str(data.get("code", ""))
        problems = [
            f"{'.'.join(map(str, problem.get('loc', ())))}: {problem.get('msg', '')}"
            for problem in data.get("errors") or []
            if isinstance(problem, Mapping)
        ]
        super().__init__("; ".join(problems) or str(data.get("message", "")))


class OpenEnv:
    """Environment with a function `run(row, chat)` that plays on one of several servers."""

    def __init__(self, config: EnvConfig, section: str = "env"):
        """section: key in the config. Raises UserError if a secret is missing."""
        self.config, self.options = config, config.openenv
        key = f"{section}.openenv"
        urls = [
            make_socket_url(reveal_url(url, f"{key}.url.{number}"))
            for number, url in enumerate(self.options.url)
        ]
        self.sessions = dict.fromkeys(urls, 0)
        """Number of running episodes by URL."""
        token = reveal({"token": self.options.token}, key)["token"]
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def run(self, row: Mapping[str, Any], chat: Conversation) -> Episode:
        """Play an episode. UserError for an invalid row, EpisodeFailed for server failures."""
        async with self._connect(self._reset_data(row), chat) as (session, observation):
            self._begin(row, chat, observation)
            if self.options.action == "tools":
                chat.schemas = await session.list_tools()
            while not (session.done or chat.full or chat.num_turns >= self.config.max_turns):
                answer = await chat.draw()
                # A truncated text is still an action; truncated calls and JSON are not.
                complete = answer.finished or (self.options.action == "text" and answer.raw)
                if not complete or not await self._act(session, chat, answer):
                    break
            return chat.finish(session.reward(self.options.reward_of), **session.counts)

    def _begin(self, row: Mapping[str, Any], chat: Conversation, observation: Seen) -> None:
        """Add the messages before the first turn: system message, row's prompt, observation."""
        column, system = self.config.prompt_column, self.config.system
        messages: list[dict[str, Any]] = []
        if row.get(column, row.get("messages")):
            prompt = find_prompt(row, column)
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None and (not messages or messages[0].get("role") not in SYSTEM_ROLES):
            chat.say(system, "system")
        chat.say(messages)
        if text := show(observation, self.options.observation_field):
            chat.say(text)
        elif not messages:
            raise UserError(
                f"env.openenv: the row has no {column!r} and the observation of the reset nothing"
                f" to show (its fields: {', '.join(sorted(observation)) or 'none'}); give rows a"
                " prompt, or name a field in env.openenv.observation_field"
            )

    async def _act(
        self, session: "OpenEnvSession", chat: Conversation, answer: AssistantReply
    ) -> bool:
        """Execute the actions of a turn and add the results; return True if the episode goes on."""
        if self.options.action == "tools":
            for call in answer.tool_calls:
                chat.say(await session.call_tool(call), "tool", name=call.name)
                if session.done:
                    break
            return bool(answer.tool_calls)
        try:
            if self.options.action == "json":
                action = read_action(answer)
            else:
                action = {self.options.text_field: str(answer)}
            seen = await session.step(action)
        except (OpenEnvError, ValueError) as error:
            session.count("invalid_actions")
            chat.say(f"error: {shorten(str(error), MAX_ERROR)}")
            return True
        if not session.done:
            chat.say(show(seen, self.options.observation_field) or "(nothing to see)")
        return True

    def _reset_data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        row_reset = row.get("reset") or {}
        if not isinstance(row_reset, Mapping):
            raise UserError(f"env.openenv: a row's column reset is a table, not {row_reset!r:.80}")
        seed = row["seed"] if isinstance(row.get("seed"), int) else seed_of(row)
        values = {name: value for name, value in row_reset.items() if value is not None}
        return {"seed": seed, **self.options.reset, **values}

    @contextlib.asynccontextmanager
    async def _connect(
        self, reset: Mapping[str, Any], chat: Conversation
    ) -> AsyncIterator[tuple["OpenEnvSession", Seen]]:
        """Open a session on the server with the fewest, with its first observation; waits while all
        are full."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        pause = FULL_PAUSE
        async with aiohttp.ClientSession(headers=self.headers, timeout=timeout) as client:
            while True:
                for url in sorted(self.sessions, key=self.sessions.__getitem__):
                    self.sessions[url] += 1
                    try:
                        async with OpenEnvSession.open(client, url) as session:
                            if (seen := await session.reset(reset)) is not None:
                                yield session, seen
                                return
                    finally:
                        self.sessions[url] -= 1
                with getattr(chat.engine, "waiting", contextlib.nullcontext)():
                    await asyncio.sleep(pause)
                pause = min(2 * pause, FULL_PAUSE_MOST)


class OpenEnvSession:
    """Connection of an episode, with its rewards and counts so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str):
        self.socket, self.url = socket, url
        self.done = False
        self.rewards: list[float] = []
        self.counts: dict[str, float] = {}
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        # Pings are answered only while a task receives, and sampling a turn may take longer than
        # the server's ping timeout.
        self._reader = asyncio.ensure_future(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, client: aiohttp.ClientSession, url: str) -> AsyncIterator["OpenEnvSession"]:
        """Connect; sends close at the end, so that the server frees the session at once."""
        address, login = split_login(url)
        sent = {"Authorization": login} if login else None
        try:
            socket = await client.ws_connect(address, max_msg_size=MAX_MESSAGE, headers=sent)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise fail(url, "cannot be reached", error) from None
        session = cls(socket, url)
        try:
            yield session
        finally:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                await socket.send_json({"type": "close"})
            session._reader.cancel()
            await socket.close()

    async def reset(self, data: Mapping[str, Any]) -> Seen | None:
        """Return the first observation; None if the server has no free session."""
        try:
            return self._take(await self.ask("reset", data))
        except OpenEnvError as error:
            if error.code == "CAPACITY_REACHED":
                return None
            raise fail(self.url, "refuses the reset", error) from None

    async def step(self, action: Mapping[str, Any]) -> Seen:
        """Return the observation after an action. Raises OpenEnvError for an invalid action, and
        EpisodeFailed if the environment failed."""
        try:
            return self._take(await self.ask("step", action))
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise fail(self.url, "failed at a step", error) from None
            raise

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the environment's tools, in chat-template form."""
        try:
            tools = self._take(await self.ask("step", {"type": "list_tools"})).get("tools")
        except OpenEnvError as error:
            raise UserError(
                f"env.openenv: {redact_text(self.url)} has no tools ({error}); set"
                ' env.openenv.action to "text" or "json"'
            ) from None
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in tools or []
        ]

    async def call_tool(self, call: ToolCall) -> str:
        """Call a tool and return the text for the model."""
        self.count("tool_calls")
        try:
            if call.error is not None:
                raise ValueError(call.error)
            action = {"tool_name": call.name, "arguments": call.arguments}
            seen = await self.step({"type": "call_tool", **action})
            if error := seen.get("error"):
                raise ValueError(error.get("message") if isinstance(error, Mapping) else error)
            text, wrong = read_result(seen.get("result"))
            if wrong:
                raise ValueError(text)
            return shorten(text, MAX_RESULT)
        except (OpenEnvError, ValueError) as error:
            self.count("tool_errors")
            return f"error: {shorten(str(error), MAX_ERROR)}"

    def reward(self, of: str) -> float:
        """Return the reward of the episode; 0 for an agent that never acted, so that it counts."""
        return sum(self.rewards) if of == "sum" else [0.0, *self.rewards][-1]

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + 1.0

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the data of its answer. Raises OpenEnvError, and EpisodeFailed
        if the connection ends."""
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the reader reports the cause
            await self.socket.send_json({"type": kind, "data": data})
        heard = await self._heard.get()
        if isinstance(heard, EpisodeFailed):
            raise heard
        if heard["type"] == "error":
            raise OpenEnvError(heard["data"])
        return heard["data"]

    async def _read(self) -> None:
        async for message in self.socket:
            try:
                heard = json.loads(message.data)
                if not isinstance(heard["data"], dict) or not isinstance(heard["type"], str):
                    raise TypeError
            except (KeyError, TypeError, ValueError, RecursionError):
                break
            self._heard.put_nowait(heard)
        problem = self.socket.exception() or f"close code {self.socket.close_code}"
        self._heard.put_nowait(fail(self.url, "is gone", problem))

    def _take(self, data: Mapping[str, Any]) -> Seen:
        reward, seen = data.get("reward"), data.get("observation")
        if isinstance(reward, int | float):
            self.rewards.append(float(reward))
        self.done = bool(data.get("done"))
        return seen if isinstance(seen, dict) else {}


def fail(url: str, problem: str, cause: object) -> EpisodeFailed:
    """Build the failure of an episode that its server ended."""
    text = f"env.openenv: {redact_text(url)} {problem}: {cause or type(cause).__name__}"
    return EpisodeFailed(f"OpenEnv server {problem}", cause=text, pause=True, mistake=True)


def make_socket_url(url: str) -> str:
    """Return the WebSocket URL of a server's base URL."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/").removesuffix("/ws")
    return urlunsplit((scheme, parts.netloc, f"{path}/ws", parts.query, ""))


def seed_of(row: Mapping[str, Any]) -> int:
    """Return a seed of 31 bits, a hash of the row."""
    text = json.dumps(row, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:4], "big") >> 1


def show(seen: Seen, field: str | None = None) -> str:
    """Return the text of an observation for the model; "" if it is empty."""
    value: Any = {
        name: field_value
        for name, field_value in seen.items()
        if name != "metadata" and field_value not in (None, "")
    }
    if field is not None:
        value = seen
        for part in field.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(
                    f"env.openenv.observation_field is {field!r}, but an observation has only"
                    f" {', '.join(sorted(seen)) or 'no field'}"
                )
            value = value[part]
    elif len(value) == 1 and next(iter(value)) in TEXTS:
        (value,) = value.values()
    if value is None or value == {}:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(text, MAX_RESULT)


def read_action(answer: str) -> dict[str, Any]:
    """Parse the JSON object of an answer, or of its last code block; ValueError without one."""
    blocks = FENCE.findall(answer)
    try:
        action = json.loads(blocks[-1] if blocks else answer)
    except (ValueError, RecursionError):
        raise ValueError("the answer must be one JSON object") from None
    if not isinstance(action, dict):
        raise ValueError("the answer must be one JSON object")
    return action


def read_result(result: Any) -> tuple[str, bool]:
    """Return (text, True if it is an error) of an MCP tool's result."""
    wrong = False
    if isinstance(result, Mapping) and "content" in result:
        wrong = bool(result.get("is_error"))
        data = result.get("data")
        parts = [
            part["text"]
            for part in result["content"] or []
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        ]
        result = "\n".join(parts) if parts else data
    if isinstance(result, str):
        return result, wrong
    return json.dumps(result, ensure_ascii=False), wrong
