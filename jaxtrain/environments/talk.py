"""What is said by whom: messages, an assistant's turn, and the talk with a frozen policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.environments.turns import ToolCall, parse_tool_calls, split_thinking, strip_tool_calls
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import FrozenPolicy


class AssistantReply(str):
    """An assistant turn: the text itself, without its thinking and its tool calls."""

    raw: str
    """All that was drawn but the token that ended it, special tokens included."""
    thinking: str
    tool_calls: list[ToolCall]
    finished: bool
    """Whether the model ended it; False: it was cut off, at sampling.max_new_tokens, at a stop
    text, or because the row is full."""


class PolicyConversation:
    """A conversation with a frozen policy, `chat.other("judge")`: what it says trains nobody."""

    def __init__(self, speaker: FrozenPolicy, index: int = 0):
        """index: number of the episode."""
        self.speaker, self.index = speaker, index
        self.messages: list[dict[str, Any]] = []
        """What was said so far; an environment may edit the list."""

    def log(self, content: Any, role: str = "user", **keys: Any) -> None:
        """As Conversation.say."""
        self.messages += list_messages(content, role, keys)

    async def draw(self) -> AssistantReply:
        """Its next turn. Raises EpisodeFailed where it gives none."""
        found = await self.speaker.reply(self.messages, self.index)
        answer = read_answer(found.text, finished=found.finished)
        self.messages.append({"role": "assistant", "content": found.text})
        return answer


def list_messages(content: Any, role: str, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a `log`: a text, a whole message, or several; UserError for anything else."""
    if isinstance(content, str):
        return [{"role": role, "content": content, **keys}]
    messages = [content] if isinstance(content, Mapping) else content
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise UserError(
            f"chat.say({content!r:.80}): give a text, a message with role and content, or a"
            " list of such messages"
        )
    return [dict(message) for message in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def make_answer(text: str, tool_calls: Sequence[ToolCall], *, finished: bool) -> AssistantReply:
    """An answer with nothing but its text and calls."""
    answer = AssistantReply(text)
    answer.raw, answer.thinking = text, ""
    answer.tool_calls, answer.finished = list(tool_calls), finished
    return answer


def read_answer(raw: str, *, finished: bool, opened: bool = False) -> AssistantReply:
    """What an assistant turn says: its thinking and its tool calls apart. opened: as for
    split_thinking."""
    thinking, rest = split_thinking(raw, opened)
    answer = make_answer(strip_tool_calls(rest).strip(), parse_tool_calls(rest), finished=finished)
    answer.raw, answer.thinking = raw, thinking
    return answer
