"""Single-turn environment: a prompt and one answer, judged by reward functions."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.data.chat.control_tokens import SpecialTokens
from jaxtrain.data.chat.template import (
    decode_answer,
    encode_text,
    end_of_turn_ids,
    prompt_tokens,
)
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Episode
from jaxtrain.safe_io import UnreadableRow


def find_prompt(row: Mapping[str, Any], column: str) -> str | list[dict[str, Any]]:
    """Return a row's prompt, a text or messages before the last assistant turns; UserError without
    one."""
    if isinstance(row, UnreadableRow):
        raise UserError(f"env: a row cannot be used: {row.reason}")
    prompt = row.get(column, row.get("messages"))
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise UserError(
            f"env: a row has no prompt; it needs {column!r} (a text or messages) or messages, found"
            f" keys {', '.join(sorted(row)) or 'none'}; env.prompt_column names another column"
        )
    messages = list(prompt)
    if not all(isinstance(message, Mapping) for message in messages):
        raise UserError(
            f"env: a row's {column} is a list, but not of messages with role and content"
        )
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()  # answers of SFT data are not the policy's
    if not messages:
        raise UserError("env: a row's messages are all the assistant's; nothing to answer")
    return messages


class SingleTurn:
    """Environment for rows with a prompt: a text, or messages before an assistant turn.

    With a chat template a text is a user message; `raw` continues texts unchanged.
    """

    def __init__(
        self,
        tokenizer: Any,
        column: str = "prompt",
        system: str | None = None,
        raw: bool = False,
        special_tokens: SpecialTokens = "text",
    ):
        """special_tokens: meaning of control tokens that a prompt spells."""
        self.tokenizer = tokenizer
        self.column = column
        self.system = system
        self.raw = raw or not tokenizer.chat_template
        self.special_tokens: SpecialTokens = special_tokens
        self.stop_ids = tuple(sorted(end_of_turn_ids(tokenizer, self.raw)))

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Sample one answer. Reward functions receive texts for text prompts, else messages."""
        source, prompt = self.read(row)
        answer = await engine.generate(prompt, sampling, self.stop_ids, index=index)
        text = decode_answer(self.tokenizer, answer.tokens, self.raw)
        count, drawn = len(prompt), len(answer.tokens)
        return Episode(
            tokens=[*prompt, *answer.tokens],
            sampled=[False] * count + [True] * drawn,
            logprobs=[0.0] * count + list(answer.logprobs),
            versions=[-1] * count + list(answer.versions or [-1] * drawn),
            finish_reason=answer.finish_reason,
            completion=(
                text if isinstance(source, str) else [{"role": "assistant", "content": text}]
            ),
            prompt=source,
            routed=answer.routed,
        )

    def read(self, row: Mapping[str, Any]) -> tuple[Any, list[int]]:
        """Return (prompt for reward functions, its tokens); UserError for an invalid row."""
        prompt = find_prompt(row, self.column)
        if isinstance(prompt, str):
            if self.raw:
                return prompt, encode_text(self.tokenizer, prompt, True, self.special_tokens)
            return prompt, self.render([{"role": "user", "content": prompt}], row)
        if self.raw:
            raise UserError(
                "env: a row's prompt is a list of messages, which needs a chat template; set"
                " model.chat_template, and env.raw to false"
            )
        return prompt, self.render(prompt, row)

    def render(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation with the generation prompt."""
        if self.system is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return prompt_tokens(
            self.tokenizer,
            messages,
            row.get("tools"),
            self.special_tokens,
            row.get("chat_template_kwargs"),
        )
