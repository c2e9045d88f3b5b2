"""One episode as the policy endpoint sees it: what it was asked, what was drawn, what it comes to.

What the endpoint recorded is the truth, whatever the agent says afterwards: token ids, log-probs
and versions of an Episode are those that the engine gave.

    chat messages ─> which of them are turns of ours ─> History ─> token ids ─> Engine.generate
    token ids ──────────────────────────────────────────────────────┘               │
                                     sequences of the Episode <── turn by turn ──────┘

A turn goes on with the sequence that its prompt begins with, to the token; where an agent edited
what was said (summed it up, dropped thoughts), another sequence begins.
"""

import asyncio
import secrets
import string
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, TypeVar

from jaxtrain.data.chat.template import TemplateFailed
from jaxtrain.environments.chat_request import (
    ChatRequest,
    RequestRefused,
    message_key,
    read_request,
)
from jaxtrain.environments.token_history import DrawnTurn, Prompt, TokenHistory, TurnTemplate
from jaxtrain.environments.tool_calls import OPENED, split_calls
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Completion, Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episodes import Episode

T = TypeVar("T")


class ChatAnswer(NamedTuple):
    """A drawn turn as a chat endpoint answers it."""

    message: dict[str, Any]
    """role, content, and tool_calls with arguments as dicts."""
    prompt: list[int]
    completion: Completion


class RecordedTurn(NamedTuple):
    """What is known of a drawn turn, to find it again among an agent's messages."""

    key: tuple[Any, ...]
    before: tuple[int, ...]
    """Numbers of the turns that its prompt showed."""


class EpisodeRecord:
    """An episode that is being played. All of it runs in the event loop that began it."""

    def __init__(
        self,
        episode_id: str,
        template: TurnTemplate,
        family: str,
        engine: Engine,
        sampling: Sampling,
        index: int,
        row_tokens: int,
        base_url: str = "",
        within: "EpisodeRecord | None" = None,
    ):
        """family: of tool calls, tool_calls.FAMILIES. row_tokens: longest sequence. within: one of
        the same event loop that is given up with this one; without it the running loop is taken."""
        self.id, self.base_url = episode_id, base_url
        """base_url: for agents that can be told nothing else: the episode is in its path."""
        self.engine, self.sampling, self.index = engine, sampling, index
        self.family, self.row_tokens = family, row_tokens
        self.within = within
        self.loop = asyncio.get_running_loop() if within is None else within.loop
        self.history = TokenHistory(template)
        self.num_calls = 0
        """Tool calls that were drawn."""
        self.refused = ""
        """Why a request was last refused, where that is nobody's fault but the agent's."""
        self._answered: dict[int, RecordedTurn] = {}
        self._prompts: list[int] = []
        self._first: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []
        self._finish_reason = "stop"
        self._overflow = self._closed = False
        self._error: Exception | None = None
        self._failed = asyncio.Event()
        self._asking: set[asyncio.Task] = set()

    async def chat(self, body: Any) -> ChatAnswer:
        """The turn that a chat request asks for; Refused."""
        request, drawn, prompt = self._prepare(body)
        completion = await self._generate(prompt.tokens, request.sampling)
        number = len(self.history.turns)
        turn = self._add(prompt, completion)
        shown = turn.tokens[:-1] if turn.finished else turn.tokens
        text = self.history.template.tokenizer.decode(shown)
        if prompt.opened and OPENED not in text.partition("</think>")[0]:
            text = f"{OPENED}\n{text}"
        content, calls = split_calls(text, self.family) if request.tools else (text, [])
        self.num_calls += len(calls)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {
                    "id": make_call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        self._answered[number] = RecordedTurn(message_key(message), tuple(drawn.values()))
        self._first = self._first or request.messages
        self._last = [*request.messages, message]
        return ChatAnswer(message, prompt.tokens, completion)

    async def continue_tokens(self, tokens: Sequence[int], sampling: Sampling) -> Completion:
        """The turn that is drawn behind these very tokens; Refused. sampling: the episode's, maybe
        cut (chat_request.limit)."""
        completion = await self._generate(list(tokens), sampling)
        self._add(Prompt(list(tokens), []), completion)
        return completion

    def render(self, body: Any) -> list[int]:
        """Token ids of the prompt that a chat request would be answered behind; Refused."""
        return self._prepare(body)[2].tokens

    async def watch(self, work: Awaitable[T]) -> T:
        """What the work (an agent's run) returns or raises; it is cancelled as soon as the engine
        gives this episode up, and what the engine raised is raised."""
        task, failed = asyncio.ensure_future(work), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            return task.result()
        finally:
            for pending in (task, failed):
                pending.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    def drew(self, prompt: Any, tokens: Any) -> bool:
        """Whether these ids are those of one of the turns, and of what it was drawn behind (None:
        whatever that was)."""
        return any(
            turn.tokens == tokens and (prompt is None or hash(tuple(prompt)) == before)
            for turn, before in zip(self.history.turns, self._prompts, strict=True)
        )

    @property
    def is_full(self) -> bool:
        """Whether a prompt left no room for an answer."""
        return self._overflow

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return len(self.history.turns)

    def finish(self) -> Episode:
        """The episode so far, without rewards; no more turns are drawn for it. Raises EpisodeFailed
        where nothing was drawn."""
        self._closed = True
        if not self.num_turns:
            if self._overflow:
                raise EpisodeFailed("its prompt fills a row of data.sequence_len", again=False)
            raise EpisodeFailed("its agent asked for no answer")
        *earlier, last = self.history.sequences
        decode = self.history.template.tokenizer.decode
        first, turn = len(self._first), self.history.turns[-1]
        dialogue = self._last[first:] if self._last[:first] == self._first else self._last
        return Episode(
            last.tokens,
            last.sampled,
            last.logprobs,
            last.versions,
            self._finish_reason,
            completion=dialogue or decode(turn.tokens, skip_special_tokens=True),
            prompt=self._first or decode(last.tokens[: last.sampled.index(True)]),
            metrics={
                "turns": float(self.num_turns),
                "branches": float(len(self.history.sequences)),
                "tool_calls": float(self.num_calls),
            },
            turns=last.turns,
            earlier=earlier,
            routed=last.routed,
        )

    def close(self) -> None:
        """Draw nothing more; what is being drawn is given up."""
        self._closed = True
        for task in self._asking:
            task.cancel()

    def fail(self, error: Exception) -> None:
        """Give the episode up: whoever watches it gets this."""
        self._error = self._error or error
        self._failed.set()
        if self.within is not None:
            self.within.fail(error)

    def _prepare(self, body: Any) -> tuple[ChatRequest, dict[int, int], Prompt]:
        """(a chat request, which of its messages are turns, what its turn is drawn behind)"""
        request = read_request(body, self.sampling)
        drawn = self._find_drawn(request)
        messages = [
            {"role": "assistant", "content": message["content"]} if index in drawn else message
            for index, message in enumerate(request.messages)
        ]
        try:
            return request, drawn, self.history.prepare(messages, drawn, request.tools)
        except TemplateFailed as error:
            cause = f"the chat template refuses what the agent says: {error}"
            self.fail(EpisodeFailed("chat template", cause=cause, again=False))
            raise RequestRefused(400, cause) from None

    def _add(self, prompt: Prompt, completion: Completion) -> DrawnTurn:
        self._prompts.append(hash(tuple(prompt.tokens)))
        return self.history.add(prompt, completion)

    async def _generate(self, tokens: list[int], sampling: Sampling) -> Completion:
        if self._closed:
            raise RequestRefused(410, f"episode {self.id} has ended")
        room = self.row_tokens - len(tokens)
        if room <= 0:
            self._overflow, self._finish_reason = True, "length"
            raise RequestRefused(
                400,
                f"This model's maximum context length is {self.row_tokens} tokens; the prompt has"
                f" {len(tokens)}",
            )
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        ends, work = self.history.template.ends, asyncio.current_task()
        assert work is not None, "an endpoint asks in a task"
        self._asking.add(work)
        try:
            completion = await self.engine.generate(tokens, sampling, ends, index=self.index)
        except (EpisodeFailed, RunStopped, UserError) as error:
            self.fail(error)
            raise RequestRefused(400, f"episode {self.id} is given up: {error}") from None
        finally:
            self._asking.discard(work)
        if self._closed:
            raise RequestRefused(410, f"episode {self.id} has ended")
        self._finish_reason = completion.finish_reason
        return completion

    def _find_drawn(self, request: ChatRequest) -> dict[int, int]:
        """{index of a message: number of its turn}: those that say what was answered. One that
        carries the turn's own token ids may have lost some of its thinking on the way: what agents
        keep messages as may have no place for it."""
        turn_of: dict[int, int] = {}
        for index, message in enumerate(request.messages):
            if message["role"] != "assistant":
                continue
            key, before = message_key(message), tuple(turn_of.values())
            ids = request.given_ids.get(index)
            same = []
            for number, answered in self._answered.items():
                if ids is None:
                    equal = answered.key == key
                else:
                    equal = ids == self.history.turns[number].tokens and answered.key[1:] == key[1:]
                if equal and number not in before:
                    same.append(number)
            exact = [number for number in same if self._answered[number].before == before]
            if same:
                turn_of[index] = (exact or same)[0]
        return turn_of


def make_call_id() -> str:
    """An id as all families' templates take it: nine letters or digits."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9))
