"""NeMo Gym environments: rows are its JSON lines, and its servers play and judge with our policy.

    agent   row ── POST /run ──> Gym's agent ── chat ──> PolicyServer ──> Engine      (turn by turn)
            reward, extras <──        │  tools, /verify: its resources server
    verify  row ── one answer of the engine ── /seed_session, /verify ──> its resources server

The endpoint's record is trained; only the verdict of Gym's answer is used. Token ids that it
returns must equal the recorded ones.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import aiohttp

from jaxtrain.config.gym import GymConfig
from jaxtrain.data.chat.messages import MalformedRow, read_json
from jaxtrain.environments.chat_request import message_key, read_input, read_tools
from jaxtrain.environments.episode_record import ChatAnswer, EpisodeRecord
from jaxtrain.environments.gym_servers import share_servers
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episodes import Episode
from jaxtrain.safe_io import UnreadableRow

T = TypeVar("T")
PARAMS = "responses_create_params"
MAX_BYTES = 1 << 27
REWARD = "gym"
"""Name of the reward."""
PLAIN = {"reward", "mask_sample", "failure_kind", "failure_reason", "response", PARAMS}
"""Keys of an answer that are not metrics of the environment."""


class NemoGym:
    """`episodes.Env` of a NeMo Gym."""

    remote = True

    def __init__(
        self,
        tokenizer: Any,
        config: GymConfig,
        row_tokens: int | None = None,
        key: str = "env.gym",
        folder: str | None = None,
    ):
        """row_tokens: longest sequence. key: the section's. folder: folder of the run, for logs."""
        self.config, self.key = config, key
        self.servers = share_servers(tokenizer, config, row_tokens or 1 << 20, key, folder)
        self._rooms: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._rooms = WeakKeyDictionary()
        self._waits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
        self._waits = WeakKeyDictionary()
        self._counts: Counter[str] = Counter()

    def inspect(
        self, rows: Iterable[Mapping[str, Any]], log: Callable[[str], None], wait: bool = True
    ) -> None:
        """Log the servers of a running Gym before a run; UserError if it lacks the agents that the
        config or the rows name. A Gym that the run starts is not checked.

        wait: open the endpoint, which Gym may be waiting for, and wait for Gym; else only log that
        it does not answer.
        """
        servers, key = self.servers, self.key
        if self.config.start:
            return
        if wait:
            servers.ready(self.config.mode == "agent", log)
        else:
            try:
                servers.roster.read()
            except (OSError, ValueError) as error:
                log(f"warning: {key}: {servers.roster.name} does not answer now: {error}")
                return
        named = {self.config.agent} if self.config.agent else {_agent_of(row) for row in rows}
        how = f"{key}.agent" if self.config.agent else f"{key}: a row's agent_ref.name"
        servers.roster.check([name for name in named if name], self.config.mode, how)
        available = ", ".join(servers.roster.list(self.config.mode))
        kind = "agents" if self.config.mode == "agent" else "resources servers"
        text = f"{servers.roster.name}: {kind} {available or '(none)'}"
        if text not in servers.logged:
            servers.logged.add(text)
            log(text)

    def counters(self) -> dict[str, float]:
        """Return the number of server losses so far."""
        return {name: float(count) for name, count in self._counts.items()}

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play an episode: see the module's docstring."""
        params = self._read(row)
        waiting = getattr(engine, "waiting", nullcontext)
        if not self.servers.is_ready:
            with waiting():
                await asyncio.to_thread(self.servers.ready, self.config.mode == "agent")
        name = self.config.agent or _agent_of(row)
        if name is None:
            raise UserError(
                f"{self.key}.agent is not set, and a row has no agent_ref.name: name the agent"
            )
        room = self._rooms.setdefault(
            asyncio.get_running_loop(), asyncio.Semaphore(self.config.concurrency)
        )
        with waiting():
            await room.acquire()
        kwargs = row.get("chat_template_kwargs")
        record = self.servers.policy.begin(engine, sampling, index, kwargs=kwargs)
        seen = self.servers.found
        try:
            url = self.servers.find(name, self.config.mode)
            if self.config.mode == "verify":
                answer = await self._verify(url, row, params, record)
            else:
                answer = await self._explain(self._play(url, row, params, record), record)
            return self._finish(row, answer, record)
        except GymServerLost:
            if not record.refused:
                with waiting():
                    await self._revive(seen)
            raise
        finally:
            room.release()
            self.servers.policy.end(record.id)

    def close(self) -> None:
        """Release the servers; the last user stops what was started."""
        self.servers.close()

    async def _revive(self, seen: int) -> None:
        """Wait until the servers answer again. One thread per event loop waits for all episodes.

        seen: value of `servers.found` when the servers were found.
        """
        async with self._waits.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if self.servers.found == seen:
                self._counts["gym/restarts"] += await asyncio.to_thread(self.servers.revive, seen)

    async def _explain(self, work: Coroutine[Any, Any, T], record: EpisodeRecord) -> T:
        """Await Gym's answer; add the endpoint's refusal of a request, if any, to a failure."""
        try:
            return await record.watch(work)
        except EpisodeFailed as failure:
            if record.refused:
                failure.cause += f"; the policy endpoint had refused a request: {record.refused}"
            raise

    def _read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's responses_create_params; UserError if it is not a row of Gym."""
        if isinstance(row, UnreadableRow):
            raise UserError(f"env: a row cannot be used: {row.reason}")
        params = row.get(PARAMS)
        if not isinstance(params, dict) or "input" not in params:
            raise UserError(
                f"env.kind nemo_gym needs rows with {PARAMS}.input, as NeMo Gym's JSON lines have"
                f" them; a row has only {', '.join(sorted(map(str, row))) or 'nothing'}"
            )
        return _drop_nulls(params) if self.config.drop_nulls else params

    async def _play(
        self, url: str, row: Mapping[str, Any], params: dict[str, Any], record: EpisodeRecord
    ) -> dict[str, Any]:
        """Play a row with Gym's agent and our policy; return Gym's answer."""
        sampling, most = record.sampling, params.get("max_output_tokens")
        request_params = {
            **params,
            "metadata": {**(params.get("metadata") or {}), "episode": record.id},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_output_tokens": min(most or sampling.max_new_tokens, sampling.max_new_tokens),
        }
        async with open_session(self.servers.headers) as session:
            return await post(session, f"{url}/run", {**row, PARAMS: request_params})

    async def _verify(
        self, url: str, row: Mapping[str, Any], params: dict[str, Any], record: EpisodeRecord
    ) -> dict[str, Any]:
        """Sample one answer and return the resources server's verdict on it."""
        try:
            messages = read_input(params["input"])
            if params.get("instructions"):
                messages = [{"role": "system", "content": params["instructions"]}, *messages]
            body = {"messages": messages, "tools": read_tools(params.get("tools"))}
            if kwargs := (params.get("metadata") or {}).get("chat_template_kwargs"):
                body["chat_template_kwargs"] = read_json(kwargs, "metadata.chat_template_kwargs")
            most = params.get("max_output_tokens")
            answer = await record.watch(
                record.chat({**body, **({"max_tokens": most} if most else {})})
            )
        except (RequestRefused, MalformedRow) as error:
            raise EpisodeFailed("gym: row", cause=str(error), again=False) from None
        body = {**row, PARAMS: params}
        async with open_session(self.servers.headers) as session:
            await post(session, f"{url}/seed_session", body)
            verdict = await post(session, f"{url}/verify", {**body, "response": respond(answer)})
        return {"response": {}, **verdict}

    def _finish(
        self, row: Mapping[str, Any], answer: Mapping[str, Any], record: EpisodeRecord
    ) -> Episode:
        """Build the episode with its rewards; EpisodeFailed without a valid verdict."""
        if kind := answer.get("failure_kind"):
            raise EpisodeFailed(
                f"gym: {kind}"[:80], cause=f"NeMo Gym: {kind}: {answer.get('failure_reason')}"
            )
        if answer.get("mask_sample"):
            raise EpisodeFailed("gym: masked", cause="NeMo Gym: mask_sample: its reward is invalid")
        check_tokens(answer, record)
        episode = record.finish()
        numbers = dict(read_numbers(row, answer))
        factors = self.config.rewards or {"reward": 1.0}
        for name, factor in factors.items():
            value = answer.get("reward") if name == "reward" else numbers.get(name)
            if not isinstance(value, int | float):
                raise EpisodeFailed(
                    "gym: no reward", cause=f"NeMo Gym: {name} of its verdict is {value!r:.80}"
                )
            episode.rewards[REWARD if name == "reward" else name] = factor * value
        episode.metrics |= numbers
        response = answer.get("response")
        if isinstance(response, dict) and response.get("status") == "incomplete":
            episode.finish_reason = "length"
        return episode


class GymServerLost(EpisodeFailed):
    """A server of Gym, or a server behind it, does not answer."""


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """Open the HTTP session of an episode; Gym's sessions are cookies, also for IP addresses."""
    timeout = aiohttp.ClientTimeout(sock_connect=30)
    jar = aiohttp.CookieJar(unsafe=True)
    return aiohttp.ClientSession(cookie_jar=jar, headers=headers, timeout=timeout)


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> dict[str, Any]:
    """POST to a server of Gym and return its JSON; EpisodeFailed on an error or without answer."""
    try:
        async with session.post(url, json=body) as answer:
            status, raw = answer.status, await answer.content.read(MAX_BYTES)
            while status == 200 and not answer.content.at_eof() and len(raw) < MAX_BYTES:
                raw += await answer.content.read(MAX_BYTES)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        cause = f"NeMo Gym: {url}: {error or error!r}"
        raise GymServerLost("gym: connection lost", cause=cause, pause=True) from None
    if status != 200:
        text = raw[:600].decode("utf-8", "replace")
        raise (GymServerLost if status >= 500 else EpisodeFailed)(
            f"gym: HTTP {status}",
            cause=f"NeMo Gym: {url} answers HTTP {status}: {text}",
            pause=status != 422,
            again=status != 422,
            mistake=status in (401, 403, 404, 405, 422),
        )
    try:
        body_json = json.loads(raw)
    except (ValueError, RecursionError):
        body_json = None
    if not isinstance(body_json, dict):
        raise EpisodeFailed("gym: garbage", cause=f"NeMo Gym: {url} answers no JSON object")
    return body_json


def check_tokens(answer: Mapping[str, Any], record: EpisodeRecord) -> None:
    """Raise EpisodeFailed if Gym returns token ids that differ from the sampled ones."""
    response = answer.get("response")
    items = response.get("output") if isinstance(response, dict) else None
    for item in items if isinstance(items, list) else []:
        ids = item.get("generation_token_ids") if isinstance(item, dict) else None
        if ids is not None and not record.drew(item.get("prompt_token_ids"), ids):
            raise EpisodeFailed(
                "gym: tokens differ",
                cause="NeMo Gym: it hands back token ids that this run never drew: does another"
                " model answer its agents (policy_base_url)?",
            )


def read_numbers(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers that an environment adds to its verdict."""
    parts = answer.get("reward_components")
    for name, value in [*answer.items(), *(parts.items() if isinstance(parts, dict) else ())]:
        is_input = name in row or name in PLAIN or name.startswith("_ng_")
        if not is_input and isinstance(value, bool | int | float) and value == value:
            yield name, float(value)


def respond(answer: ChatAnswer) -> dict[str, Any]:
    """Build the response object of a sampled turn, which resources servers judge."""
    thinking, content, _ = message_key(answer.message)
    items: list[dict[str, Any]] = []
    if thinking:
        summary = [{"type": "summary_text", "text": thinking}]
        items.append({"type": "reasoning", "id": "rs_0", "summary": summary})
    calls = answer.message.get("tool_calls") or []
    if content or not calls:
        part = {"type": "output_text", "text": content, "annotations": []}
        items.append(
            {
                "type": "message",
                "id": "msg_0",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": arguments,
            }
        )
    cut = answer.completion.finish_reason == "length"
    return {
        "id": "resp_0",
        "created_at": int(time.time()),
        "model": "policy",
        "object": "response",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": items,
        "status": "incomplete" if cut else "completed",
        **({"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}),
    }


def _agent_of(row: Mapping[str, Any]) -> str | None:
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else None
    return name if isinstance(name, str) else None


def _drop_nulls(value: Any) -> Any:
    """Copy a value without keys of objects that are null."""
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value
