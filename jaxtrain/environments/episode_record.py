"""Record of an episode at the policy endpoint: requests, sampled turns, and the resulting Episode.

Token ids, log-probs and versions of an Episode are those of the engine, whatever the agent reports.

    chat messages ─> which of them are our turns ─> TokenHistory ─> token ids ─> Engine.generate
    token ids ──────────────────────────────────────────────────────┘               │
                                     sequences of the Episode <── turn by turn ──────┘

A turn extends the sequence that is an exact prefix of its prompt. If an agent edited earlier
messages (summarized them, dropped thoughts), another sequence starts.
"""

import asyncio
import secrets
import string
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from jaxtrain.data.chat.omissions import Kwargs, list_unwritten_names
from jaxtrain.data.chat.template import TemplateFailed, decode_answer
from jaxtrain.environments.chat_request import ChatRequest, message_key, read_request
from jaxtrain.environments.request_fields import Note, RequestRefused
from jaxtrain.environments.token_history import (
    DrawnTurn,
    Prompt,
    PromptTooLong,
    TokenHistory,
    TurnTemplate,
)
from jaxtrain.environments.tool_calls import OPENED, split_calls
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Completion, Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episodes import Episode

T = TypeVar("T")


class ChatAnswer(NamedTuple):
    """Response of the chat endpoint with its tokens."""

    message: dict[str, Any]
    """role, content, and tool_calls with arguments as dicts."""
    prompt: list[int]
    completion: Completion


class EndpointFormat(NamedTuple):
    """Format in which an endpoint writes prompts and reads turns."""

    template: TurnTemplate
    family: str
    """Format of tool calls, a key of tool_calls.FAMILIES."""
    row_tokens: int
    """Longest sequence, prompt and answer together."""
    note: Note = lambda name: None
    """Receives names of fields of requests that change nothing."""
    kwargs: Kwargs = None
    """Variables of the chat template, which those of a request replace."""


class RecordedTurn(NamedTuple):
    """Identity of a sampled turn, to recognize it among an agent's messages."""

    key: tuple[Any, ...]
    before: tuple[int, ...]
    """Numbers of the turns in its prompt."""


class EpisodeRecord:
    """Episode in progress. All methods run in the event loop that created it."""

    def __init__(
        self,
        episode_id: str,
        form: EndpointFormat,
        engine: Engine,
        sampling: Sampling,
        index: int,
        base_url: str = "",
        within: "EpisodeRecord | None" = None,
    ):
        """within: record of the same event loop that fails with this one; by default the running
        loop is used."""
        self.id, self.base_url = episode_id, base_url
        """base_url: URL with the episode in its path, for agents configured with a URL only."""
        self.engine, self.sampling, self.index = engine, sampling, index
        self.form = form
        self.within = within
        self.loop = asyncio.get_running_loop() if within is None else within.loop
        self.history = TokenHistory(form.template)
        self.num_calls = 0
        """Number of sampled tool calls."""
        self.refused = ""
        """Reason of the last request refused because of the agent."""
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
        """Sample the turn that a chat request asks for; RequestRefused."""
        request, drawn, prompt = await self._prepare(body)
        completion = await self._generate(
            prompt.tokens, request.sampling, request.stop_ids, request.likely
        )
        number = len(self.history.turns)
        turn = self._add(prompt, completion)
        shown = turn.tokens[:-1] if turn.finished else turn.tokens
        text = self.history.template.tokenizer.decode(shown)
        if prompt.opened and OPENED not in text.partition("</think>")[0]:
            text = f"{OPENED}\n{text}"
        content, calls = text, []
        if request.tools:
            content, calls = split_calls(text, self.form.family, request.tools)
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

    async def continue_tokens(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        likely: int = 0,
    ) -> Completion:
        """Sample a turn from a token prompt; RequestRefused. sampling: the episode's, perhaps
        restricted by chat_request.limit. stop_ids: tokens that end it besides the template's.
        likely: number of likely tokens at each place."""
        size = self.vocabulary
        if not tokens or any(not 0 <= token < size for token in tokens):
            raise RequestRefused(400, f"token_ids must be one or more of the ids 0 to {size - 1}")
        completion = await self._generate(list(tokens), sampling, stop_ids, likely)
        self._add(Prompt(list(tokens), []), completion)
        return completion

    async def render(self, body: Any) -> list[int]:
        """Return the token ids of the prompt of a chat request; RequestRefused."""
        return (await self._prepare(body))[2].tokens

    @property
    def vocabulary(self) -> int:
        """Number of token ids: the tokenizer's, and what a larger model has drawn here."""
        drawn = (token + 1 for turn in self.history.turns for token in turn.tokens)
        return max(len(self.history.template.tokenizer), *drawn, 0)

    async def watch(self, work: Awaitable[T]) -> T:
        """Await the work (an agent's run). It is cancelled as soon as the engine fails the episode,
        and the engine's error is raised."""
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
        """Return True if `tokens` are a sampled turn with this prompt (None: any prompt)."""
        return any(
            turn.tokens == tokens and (prompt is None or hash(tuple(prompt)) == before)
            for turn, before in zip(self.history.turns, self._prompts, strict=True)
        )

    @property
    def is_full(self) -> bool:
        """True if a prompt left no room for an answer."""
        return self._overflow

    @property
    def num_turns(self) -> int:
        """Number of turns so far."""
        return len(self.history.turns)

    def finish(self) -> Episode:
        """Return the episode so far, without rewards, and refuse further turns; EpisodeFailed if
        there is no turn."""
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
            completion=dialogue or decode_answer(self.history.template.tokenizer, turn.tokens),
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
        """Refuse further turns and cancel running ones."""
        self._closed = True
        for task in self._asking:
            task.cancel()

    def fail(self, error: Exception) -> None:
        """Fail the episode: `watch` raises this error."""
        self._error = self._error or error
        self._failed.set()
        if self.within is not None:
            self.within.fail(error)

    async def _prepare(self, body: Any) -> tuple[ChatRequest, dict[int, int], Prompt]:
        """Return (chat request, {index of a message: number of its turn}, prompt)."""
        try:
            # A long text takes seconds to render and tokenize; all episodes share the event loop.
            return await asyncio.to_thread(self._read, body)
        except PromptTooLong as error:
            self._refuse_length(str(error))
        except TemplateFailed as error:
            # The agent can say something else; what it has drawn stays.
            name = self.history.template.tokenizer.name_or_path
            raise RequestRefused(400, f"messages: {name} refuses them: {error}") from None

    def _read(self, body: Any) -> tuple[ChatRequest, dict[int, int], Prompt]:
        """Do the work of `_prepare`, in a thread: what it reads of the episode only grows."""
        request = read_request(body, self.sampling, self.vocabulary, self.form.note)
        for name in list_unwritten_names(self.form.template.tokenizer, request.messages):
            self.form.note(name)
        drawn = self._find_drawn(request)
        messages = [
            {"role": "assistant", "content": message["content"]} if index in drawn else message
            for index, message in enumerate(request.messages)
        ]
        kwargs = {**(self.form.kwargs or {}), **(request.kwargs or {})} or None
        most = self.form.row_tokens
        prompt = self.history.prepare(messages, drawn, request.tools, kwargs, most)
        return request, drawn, prompt

    def _refuse_length(self, size: str) -> NoReturn:
        self._overflow, self._finish_reason = True, "length"
        raise RequestRefused(
            400,
            f"This model's maximum context length is {self.form.row_tokens} tokens; the prompt has"
            f" {size}",
        )

    def _add(self, prompt: Prompt, completion: Completion) -> DrawnTurn:
        self._prompts.append(hash(tuple(prompt.tokens)))
        return self.history.add(prompt, completion)

    async def _generate(
        self, tokens: list[int], sampling: Sampling, stop_ids: Sequence[int] = (), likely: int = 0
    ) -> Completion:
        if self._closed:
            raise RequestRefused(410, f"episode {self.id} has ended")
        room = self.form.row_tokens - len(tokens)
        if room <= 0:
            self._refuse_length(str(len(tokens)))
        if room < sampling.max_new_tokens:
            sampling = sampling.model_copy(update={"max_new_tokens": room})
        options = {"likely": likely} if likely else {}
        if likely and not getattr(self.engine, "reports_likely", False):
            self.form.note("top_logprobs (the engine reports the drawn token's alone)")
            options = {}
        ends, work = (*self.history.template.ends, *stop_ids), asyncio.current_task()
        assert work is not None, "an endpoint asks in a task"
        self._asking.add(work)
        try:
            completion = await self.engine.generate(
                tokens, sampling, ends, index=self.index, **options
            )
        except (EpisodeFailed, RunStopped, UserError) as error:
            constrained = sampling.structured_outputs != self.sampling.structured_outputs
            if isinstance(error, UserError) and constrained:
                # A regex or a schema of the agent's that the engine cannot compile.
                raise RequestRefused(400, f"what the answer must match: {error}") from None
            self.fail(error)
            raise RequestRefused(400, f"episode {self.id} is given up: {error}") from None
        finally:
            self._asking.discard(work)
        if self._closed:
            raise RequestRefused(410, f"episode {self.id} has ended")
        self._finish_reason = completion.finish_reason
        return completion

    def _find_drawn(self, request: ChatRequest) -> dict[int, int]:
        """Return {index of a message: number of its turn} for messages equal to a turn.

        A message with the token ids of a turn may lack its thinking, because message types of
        agents may have no field for it.
        """
        turn_of: dict[int, int] = {}
        for index, message in enumerate(request.messages):
            if message["role"] != "assistant":
                continue
            key, before = message_key(message), tuple(turn_of.values())
            ids = request.given_ids.get(index)
            same = []
            for number, answered in list(self._answered.items()):
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
    """Draw an id that templates of all families accept: nine letters or digits."""
    alphabet = string.ascii_letters + string.digits
    return "".join(secrets.choice(alphabet) for _ in range(9))
