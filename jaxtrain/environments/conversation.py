"""Conversation API of custom environments: `say`, `draw`, `finish`.

    async def capital(row, chat):
        chat.say(f"What is the capital of {row['country']}?")
        answer = await chat.draw()
        return chat.finish(reward=float(row["capital"] in answer))

The tokens that the model wrote are kept exactly and are the only ones trained; messages of the
environment (questions, tool results) are context. token_history.py defines the prompt of a turn.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.data.chat.messages import MalformedRow, MessageReader
from jaxtrain.data.chat.omissions import Kwargs
from jaxtrain.data.chat.tokenize import open_row_images
from jaxtrain.environments.token_history import TokenHistory, TurnTemplate
from jaxtrain.environments.tool_calls import (
    ToolCall,
    parse_tool_calls,
    split_thinking,
    strip_tool_calls,
)
from jaxtrain.environments.tools import Toolbox, make_tool
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, FrozenPolicy, Sampling
from jaxtrain.generation.episodes import Episode

Rewards = float | Mapping[str, float | None] | None


class AssistantReply(str):
    """Assistant turn: its text without thinking and tool calls."""

    raw: str
    """Full text with special tokens, except the token that ended the turn."""
    thinking: str
    tool_calls: list[ToolCall]
    finished: bool
    """True if the model ended the turn; False if it was cut off at sampling.max_new_tokens, at a
    stop text, or because the row is full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRules:
    """Rules of the conversations of an episode."""

    name: str = "reward"
    """Name of rewards without one."""
    max_turns: int = 8
    """Turns of `Conversation.answer`."""
    rewritten: bool = True
    """See TokenHistory."""
    row_tokens: int | None = None
    """Longest sequence that can be trained."""
    row_patches: int | None = None
    """Patches of images in a sequence that can be trained; None: no limit."""
    kwargs: Kwargs = None
    """Variables of the chat template."""


class Conversation:
    """Episode in progress."""

    policy: str = ""
    agent: str = ""
    """Policy and agent of the Episode."""

    def __init__(
        self,
        template: TurnTemplate,
        engine: Engine,
        sampling: Sampling,
        index: int,
        rules: ChatRules,
        *,
        tools: Toolbox | None = None,
        schemas: Sequence[Any] | None = None,
    ):
        """schemas: tools that the environment answers itself."""
        self.engine, self.sampling, self.index, self.rules = engine, sampling, index, rules
        self.tools = Toolbox() if tools is None else tools
        self.schemas = list(schemas or [])
        self.max_turns = rules.max_turns
        self.messages: list[dict[str, Any]] = []
        """Messages in chat-template form. An environment may edit the list, for instance to
        summarize old messages: the prompt of the next turn follows it."""
        self.num_turns = 0
        """Assistant turns so far."""
        self._history = TokenHistory(template, rules.rewritten)
        self.images = template.images
        """Reader of images (data/images/reader.py); None: the model reads text alone."""
        self._images = open_row_images(template.images, "")
        self._said: list[dict[str, Any]] = []
        self._drawn: list[dict[str, Any]] = []
        """Message of each sampled turn."""
        self._texts: list[str] = []
        self._prompt_end = 0
        self._finish_reason = "stop"
        self._full = self._drawing = False
        self._turn_rewards: list[dict[str, float]] = []

    def use(self, *functions: Callable[..., Any]) -> None:
        """Offer functions as tools (see tools.py); UserError for one without a schema."""
        for function in functions:
            self.tools.add(make_tool(function))

    def say(self, content: Any, role: str = "user", **keys: Any) -> None:
        """Add a text, a list of parts of a content, a message, or a list of messages of the
        environment.

        A part is {"type": "text", "text": ...} or an image: {"type": "image", "image": the bytes
        of its file, a data URL, or an image of the row}. keys: additional keys of the message, such
        as name="search" with role="tool". Raises UserError for an image that cannot be read.
        """
        for message in list_messages(content, role, keys):
            if isinstance(message.get("content"), list):
                message["content"] = self._read_parts(message["content"])
            self._add(message)

    def other(self, name: str) -> "PolicyConversation | Conversation":
        """Open a conversation with another policy of section policies.

        With a trained policy it is a separate episode, which must be finished and returned too.
        """
        policies = getattr(self.engine, "others", {})
        if name not in policies:
            names = ", ".join(policies) or "none"
            raise UserError(
                f"chat.other({name!r}): there is no such policy; section policies has: {names}"
            )
        if isinstance(policies[name], FrozenPolicy):
            return PolicyConversation(policies[name], self.index)
        return self._begin(policies[name], name, "")

    def another(self, agent: str) -> "Conversation":
        """Open a conversation with the same policy in the role of another agent.

        It is a separate episode, which must be finished and returned too. Its rewards are compared
        with those of the same agent in other games of the prompt.
        """
        return self._begin(self.engine, self.policy, agent)

    def _begin(self, engine: Engine, policy: str, agent: str) -> "Conversation":
        tools = Toolbox(seconds=self.tools.seconds)
        template, sampling = self._history.template, self.sampling
        chat = Conversation(template, engine, sampling, self.index, self.rules, tools=tools)
        chat.policy, chat.agent = policy, agent
        return chat

    @property
    def full(self) -> bool:
        """True if the row is full, so that the next draw would fail."""
        return self._full

    async def draw(self) -> AssistantReply:
        """Sample the assistant's next turn, without executing its tool calls: see `answer`, `call`.

        Raises EpisodeFailed if the row is already full.
        """
        if self._full:
            raise EpisodeFailed("the conversation has no room left in a row of data.sequence_len")
        if self._drawing:
            raise UserError("chat.draw: the turn before is still being drawn; await it first")
        self._drawing = True
        try:
            return await self._draw()
        finally:
            self._drawing = False

    async def _draw(self) -> AssistantReply:
        if not self._drawn:
            self._prompt_end = len(self._said)
        tools = [*self.schemas, *self.tools.schemas]
        marked, images = self._mark_images(self.messages)
        prompt = self._history.prepare(
            marked, self._find_drawn(), tools, self.rules.kwargs, images=images
        )
        sampling, room = self.sampling, None
        if self.rules.row_tokens is not None:
            room = self.rules.row_tokens - len(prompt.tokens)
            if room < sampling.max_new_tokens:
                sampling = sampling.model_copy(update={"max_new_tokens": max(room, 1)})
        patches = 0 if prompt.images is None else prompt.images.num_patches
        too_many = self.rules.row_patches is not None and patches > self.rules.row_patches
        if too_many or (room is not None and room <= 0):
            self._full, self._finish_reason = True, "length"
            return make_answer("", [], finished=False)
        template = self._history.template
        options: dict[str, Any] = {} if prompt.images is None else {"images": prompt.images}
        completion = await self.engine.generate(
            list(prompt.tokens), sampling, template.ends, index=self.index, **options
        )
        turn = self._history.add(prompt, completion)
        self._full = room is not None and len(completion.tokens) >= room
        self._finish_reason = completion.finish_reason
        self.num_turns += 1
        raw = template.tokenizer.decode(turn.tokens[:-1] if turn.finished else turn.tokens)
        message = {"role": "assistant", "content": raw}
        self._drawn.append(message)
        self._texts.append(raw)
        self._add(message)
        return read_answer(raw, tools, finished=turn.finished, opened=turn.opened)

    async def answer(self) -> AssistantReply:
        """Sample turns and execute their tool calls; return the first turn without calls, the first
        that is cut off, or the env.max_turns-th."""
        answer = await self.draw()
        while answer.tool_calls and answer.finished and self.num_turns < self.max_turns:
            await self.call(answer)
            answer = await self.draw()
        return answer

    async def call(self, answer: AssistantReply) -> list[Any]:
        """Execute the tool calls of a turn in order and add their results to the conversation."""
        results = [await self.tools.answer(call) for call in answer.tool_calls]
        self.say(results)
        return [result["content"] for result in results]

    def _read_parts(self, parts: list[Any]) -> Any:
        """Return a content as text, or, if it has images, as parts that hold them as read."""
        try:
            text = self._mark(parts)
        except MalformedRow as error:
            raise UserError(error.describe("chat.say: a content cannot be used")) from None
        text = _replace_surrogates(text)
        if self._images is None:
            return text
        message = {"role": "user", "content": text}
        return self._images.to_parts([message], lambda image: {"image": image})[0]["content"]

    def _mark(self, content: list[Any]) -> str:
        """Return the text of a content with a marker in place of each image."""
        reader = MessageReader(lenient=True, images=self._images)
        return reader.read({"role": "user", "content": content})["content"]

    def _mark_images(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return messages with markers of images, and the images, in order."""
        try:
            marked = [
                {**message, "content": self._mark(message["content"])}
                if isinstance(message.get("content"), list)
                else dict(message)
                for message in messages
            ]
            return marked, [] if self._images is None else self._images.list(marked)
        except MalformedRow as error:
            raise UserError(error.describe("chat.messages: a content cannot be used")) from None

    def reward(self, value: float, name: str | None = None) -> None:
        """Give a reward for the last turn. It adds to the reward of the episode, and is credited to
        this turn and earlier ones. Rewards of equal name add up."""
        if not self.num_turns:
            raise UserError("chat.reward comes after chat.draw: no turn was drawn yet")
        self._turn_rewards += [{} for _ in range(self.num_turns - len(self._turn_rewards))]
        rewards, name = self._turn_rewards[-1], name or self.rules.name
        rewards[name] = rewards.get(name, 0.0) + read_reward(value, f"chat.reward({value!r:.80})")

    def finish(self, reward: Rewards = None, **metrics: Any) -> Episode:
        """Return the finished episode.

        reward: reward of the episode: a number, several by name, or None if section rewards defines
        it. metrics: numbers to log as env/NAME, or pairs (sum, weight). Raises EpisodeFailed if no
        turn was sampled, UserError for values that are not numbers.
        """
        if not self.num_turns:
            raise EpisodeFailed("its environment drew no answer")
        source = f"chat.finish(reward={reward!r:.80})"
        rewards: dict[str, float | None] = {}
        if isinstance(reward, Mapping):
            for name, value in reward.items():
                rewards[str(name)] = None if value is None else read_reward(value, source)
        elif reward is not None:
            rewards[self.rules.name] = read_reward(reward, source)
        rewarded = self._turn_rewards
        if rewarded:
            rewarded = [*rewarded, *({} for _ in range(self.num_turns - len(rewarded)))]
        *earlier, last = self._history.sequences
        messages = self._said
        if self._images is not None:  # as parts without pixels
            messages = self._images.to_parts(self._mark_images(messages)[0])
        counts: dict[str, Any] = {"turns": float(self.num_turns)}
        if self.tools.tools:
            counts["tool_calls"] = float(self.tools.num_calls)
            counts["tool_errors"] = float(self.tools.num_errors)
        return Episode(
            last.tokens,
            last.sampled,
            last.logprobs,
            last.versions,
            self._finish_reason,
            completion=messages[self._prompt_end :],
            prompt=messages[: self._prompt_end],
            rewards=rewards,
            metrics={**counts, **{name: read_metric(name, v) for name, v in metrics.items()}},
            turns=last.turns,
            turn_rewards=rewarded,
            earlier=earlier,
            routed=last.routed,
            images=last.images,
            policy=self.policy,
            agent=self.agent,
        )

    def _add(self, message: dict[str, Any]) -> None:
        if isinstance(content := message.get("content"), str):
            message["content"] = _replace_surrogates(content)
        self.messages.append(message)
        self._said.append(dict(message))

    def _find_drawn(self) -> dict[int, int]:
        """Return {index of a message: number of its turn} for turns that were not edited."""
        numbers = {id(message): number for number, message in enumerate(self._drawn)}
        turn_of = {}
        for index, message in enumerate(self.messages):
            number = numbers.get(id(message))
            if number is not None and message.get("content") == self._texts[number]:
                turn_of[index] = number
        return turn_of


def _replace_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which a broken file or a tool may give and tokenizers
    refuse."""
    return text.encode("utf-8", "replace").decode()


def read_reward(value: Any, source: str) -> float:
    """Return a reward as float, which may be NaN; UserError if it is not a finite number or NaN."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.inf
    if isinstance(value, str) or math.isinf(number):
        raise UserError(f"{source}: a reward is a finite number")
    return number


def read_metric(name: str, value: Any) -> Any:
    """Return a metric as float or a pair of floats; UserError for anything else."""
    try:
        if isinstance(value, tuple | list):
            total, weight = value
            return float(total), float(weight)
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"chat.finish({name}={value!r:.80}): a metric is a number, or a pair (sum, weight)"
        ) from None


class PolicyConversation:
    """Conversation with a frozen policy, `chat.other("judge")`, whose replies are not trained."""

    def __init__(self, speaker: FrozenPolicy, index: int = 0):
        """index: number of the episode."""
        self.speaker, self.index = speaker, index
        self.messages: list[dict[str, Any]] = []
        """Messages so far; an environment may edit the list."""

    def say(self, content: Any, role: str = "user", **keys: Any) -> None:
        """Add messages of the environment, like `Conversation.say`; images as `image_url`."""
        messages = list_messages(content, role, keys)
        lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        for part in itertools.chain.from_iterable(lists):
            if isinstance(part, Mapping) and part.get("type") == "image":
                raise UserError(
                    "chat.say: a frozen policy takes an image as {'type': 'image_url', 'image_url':"
                    " {'url': a web or data URL}}, not as a part of type 'image'"
                )
        self.messages += messages

    async def draw(self) -> AssistantReply:
        """Return the policy's next turn; EpisodeFailed if it gives none."""
        reply = await self.speaker.reply(self.messages, self.index)
        answer = read_answer(reply.text, (), finished=reply.finished)
        self.messages.append({"role": "assistant", "content": reply.text})
        return answer


def list_messages(content: Any, role: str, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a text, a list of parts, a message, or several; UserError for anything
    else."""
    parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part and "role" not in part for part in content
    )
    if isinstance(content, str) or (content and parts):
        return [{"role": role, "content": content, **keys}]
    messages = [content] if isinstance(content, Mapping) else content
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise UserError(
            f"chat.say({content!r:.80}): give a text, a list of parts of a content, a message with"
            " role and content, or a list of such messages"
        )
    return [dict(message) for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def make_answer(text: str, tool_calls: Sequence[ToolCall], *, finished: bool) -> AssistantReply:
    """Build a reply from its text and calls."""
    answer = AssistantReply(text)
    answer.raw, answer.thinking = text, ""
    answer.tool_calls, answer.finished = list(tool_calls), finished
    return answer


def read_answer(
    raw: str, tools: Sequence[Any], *, finished: bool, opened: bool = False
) -> AssistantReply:
    """Parse an assistant turn into text, thinking and tool calls. tools: schemas that arguments are
    typed by. opened: see split_thinking."""
    thinking, rest = split_thinking(raw, opened)
    calls = parse_tool_calls(rest, tools)
    answer = make_answer(strip_tool_calls(rest).strip(), calls, finished=finished)
    answer.raw, answer.thinking = raw, thinking
    return answer
