"""What environments of many turns share: the episode as it grows, and tool calls out of text.

What the model wrote stays as it wrote it, token for token; only what the world says (tool results,
the user's next question) is rendered and appended, and never trained, so that the model continues
exactly the sequence that it has produced:

    prompt tokens | drawn ... end-of-turn | tool result + header | drawn ... end-of-turn | ...
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.data.template import (
    encode,
    end_of_turn,
    end_of_turn_ids,
    prompt_tokens,
    render_text,
    require_chat_template,
)
from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Engine, Episode, Sampling

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THINKING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
PLACEHOLDER = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]


class ToolCallError(Exception):
    """A tool call that cannot be answered; its text goes back to the model."""


def strip_thinking(text: str) -> str:
    """An assistant turn without its thinking."""
    return THINKING.sub("", text)


def parse_tool_call(text: str) -> dict[str, Any] | None:
    """The first tool call of an assistant turn in Qwen's and Hermes' form, as {"name",
    "arguments"}, or None if there is none.

    Raises ToolCallError when there is one that is not valid JSON of that form.
    """
    text = strip_thinking(text)
    found = CALL.search(text)
    if not found:
        if "<tool_call>" in text:
            raise ToolCallError("unfinished tool call")
        return None
    try:
        call = json.loads(found.group(1))
    except (ValueError, RecursionError):
        raise ToolCallError("tool call is not valid JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        raise ToolCallError("tool call needs name and arguments")
    return {"name": call.get("name"), "arguments": call["arguments"]}


class Joint:
    """Tokens between two assistant turns: what follows the end-of-turn token up to the next header.

    They do not depend on what the model wrote, so they are rendered after a placeholder turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        end = end_of_turn(tokenizer)
        if end is None:
            raise UserError(
                "the chat template writes no end-of-turn token after an assistant turn: "
                "use one that does (model.chat_template)"
            )
        self.mark = tokenizer.decode([end])
        self.ends = tuple(sorted(end_of_turn_ids(tokenizer)))

    def __call__(self, message: Mapping[str, Any], tools: Sequence[Any] | None) -> list[int]:
        """Tokens of a tool or user message, with the generation prompt after it."""
        before = render_text(self.tokenizer, PLACEHOLDER, tools)
        end = before.index(self.mark, before.rindex("ANSWER")) + len(self.mark)
        after = render_text(self.tokenizer, [*PLACEHOLDER, message], tools, generation=True)
        if not after.startswith(before[:end]):
            raise UserError(
                "the chat template rewrites earlier turns, so a conversation cannot be continued "
                "token by token: use a template that keeps them (model.chat_template)"
            )
        return encode(self.tokenizer, after[end:])


class Conversation:
    """An episode of many turns while it is played; made anew for each.

    talk = Conversation(joint, prompt, tools, engine, sampling, index)
    text = await talk.answer()    talk.tell({"role": "tool", ...})    ...    talk.end(rewards)
    """

    def __init__(
        self,
        joint: Joint,
        prompt: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        engine: Engine,
        sampling: Sampling,
        index: int,
    ):
        """prompt: messages up to where the assistant speaks."""
        self.joint, self.tokenizer, self.tools = joint, joint.tokenizer, tools
        self.engine, self.sampling, self.index = engine, sampling, index
        self.num_turns = 0
        """Assistant turns so far."""
        self.episode = Episode([], [], [], [], "stop", completion=[], prompt=list(prompt))
        self._append(prompt_tokens(self.tokenizer, prompt, tools))

    async def answer(self) -> str | None:
        """The assistant's next turn as text, special tokens included, without the one that ends it;
        None where it was cut off."""
        found = await self.engine.generate(
            list(self.episode.tokens), self.sampling, self.joint.ends, index=self.index
        )
        self._append(found.tokens, found.logprobs, found.versions)
        self.episode.finish_reason = found.finish_reason
        text = self.tokenizer.decode(found.tokens, skip_special_tokens=True)
        self.episode.completion.append({"role": "assistant", "content": text})
        self.num_turns += 1
        if not found.tokens or found.tokens[-1] not in self.joint.ends:
            return None
        return self.tokenizer.decode(found.tokens[:-1])

    def tell(self, message: Mapping[str, Any]) -> None:
        """Go on with a tool's or the user's message."""
        self._append(self.joint(message, self.tools))
        self.episode.completion.append(dict(message))

    def end(self, rewards: dict[str, float | None], **metrics: Any) -> Episode:
        """The played episode; `metrics` go beside the number of its turns."""
        self.episode.rewards = rewards
        self.episode.metrics = {"turns": float(self.num_turns), **metrics}
        return self.episode

    def _append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] = (),
    ) -> None:
        """Tokens that the policy drew with these log-probs, or that were told it (None)."""
        count, episode = len(tokens), self.episode
        episode.tokens += [int(token) for token in tokens]
        episode.sampled += [logprobs is not None] * count
        episode.logprobs += [0.0] * count if logprobs is None else logprobs
        episode.versions += versions or [-1] * count
