"""Single-turn environment: a prompt and one answer, judged by reward functions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.chat.control_tokens import SpecialTokens
from jaxtrain.data.chat.messages import SYSTEM_ROLES, MalformedRow
from jaxtrain.data.chat.prompt import (
    Prompt,
    join_answer,
    prompt_tokens,
    read_prompt,
    split_opening,
)
from jaxtrain.data.chat.rows import PROMPTS, Row
from jaxtrain.data.chat.template import (
    TemplateFailed,
    decode_answer,
    encode_text,
    end_of_turn_ids,
)
from jaxtrain.data.chat.tokenize import open_images, open_row_images
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.data.sample import TOO_MANY_PATCHES
from jaxtrain.errors import UnusableRow, UserError
from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Episode
from jaxtrain.safe_io import UnreadableRow


def read_row(row: Mapping[str, Any], column: str, images: Any = None) -> Prompt:
    """Return a row's prompt, a text or messages (see Row.prompt); UnusableRow without one that can
    be read. images: reader of its images; None refuses them."""
    if isinstance(row, UnreadableRow):
        raise UnusableRow(f"env: a row cannot be used: {row.reason}")
    try:
        columns = Row(row)
        columns.images = open_row_images(images, "")
        prompt = read_prompt(columns, column)
    except MalformedRow as error:
        reason = error.describe("env: a row cannot be used")
        raise UnusableRow(f"{reason}; env.prompt_column is {column!r}") from None
    if prompt is None and any(name in row for name in (column, *PROMPTS)):
        raise UnusableRow("env: a row cannot be used: its prompt is empty")
    if prompt is None:
        raise UnusableRow(
            f"env: a row cannot be used: no prompt; it needs {column!r} (a text or messages) or"
            f" messages, found keys {', '.join(sorted(row)) or 'none'}; env.prompt_column names"
            " another column"
        )
    return prompt


def find_prompt(
    row: Mapping[str, Any], column: str, images: Any = None
) -> str | list[dict[str, Any]]:
    """Return the text or messages of `read_row`, with images as parts of type "image"; UnusableRow
    for a begun turn."""
    prompt = read_row(row, column, images)
    if not isinstance(prompt.value, str) and split_opening(prompt.value)[1] is not None:
        raise UnusableRow(
            "env: a row cannot be used: its prompt ends in a turn of the assistant, which only the"
            " environment single_turn continues"
        )
    if prompt.images is None or isinstance(prompt.value, str):
        return prompt.value
    return prompt.images.to_parts(prompt.value, lambda image: {"image": image})


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
        row_patches: int | None = None,
    ):
        """special_tokens: meaning of control tokens that a prompt spells. row_patches: limit of a
        prompt's images; None: no limit."""
        self.tokenizer = tokenizer
        self.column = column
        self.system = system
        self.raw = raw or not tokenizer.chat_template
        self.special_tokens: SpecialTokens = special_tokens
        self.stop_ids = tuple(sorted(end_of_turn_ids(tokenizer, self.raw)))
        self.row_patches = row_patches
        self.images = None if self.raw else open_images(None, tokenizer)

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Sample one answer. Reward functions receive texts for text prompts, else messages; a turn
        that the prompt begins is part of the answer's."""
        source, prompt, images = self.read(row)
        options: dict[str, Any] = {} if images is None else {"images": images}
        answer = await engine.generate(prompt, sampling, self.stop_ids, index=index, **options)
        text = decode_answer(self.tokenizer, answer.tokens, self.raw)
        count, drawn = len(prompt), len(answer.tokens)
        completion: Any = text
        if not isinstance(source, str):
            source, turn = join_answer(source, text)
            completion = [turn]
        return Episode(
            tokens=[*prompt, *answer.tokens],
            sampled=[False] * count + [True] * drawn,
            logprobs=[0.0] * count + list(answer.logprobs),
            versions=[-1] * count + list(answer.versions or [-1] * drawn),
            finish_reason=answer.finish_reason,
            completion=completion,
            prompt=source,
            routed=answer.routed,
            images=images,
        )

    def read(self, row: Mapping[str, Any]) -> tuple[Any, list[int], PlacedImages | None]:
        """Return (prompt for reward functions, its tokens, its images); UserError for an invalid
        row."""
        prompt = read_row(row, self.column, self.images)
        parts = prompt.tools or prompt.chat_template_kwargs
        if self.raw and isinstance(prompt.value, str) and not parts:
            text = prompt.value
            return text, encode_text(self.tokenizer, text, True, self.special_tokens), None
        if self.raw:
            raise UserError(
                "env: a row's prompt is a list of messages, or has a system message, a history,"
                " tools or chat_template_kwargs, which needs a chat template; set"
                " model.chat_template, and env.raw to false"
            )
        try:
            tokens, source, placed = self.render(prompt), prompt.value, None
            if prompt.images is not None and not isinstance(source, str):
                placed = prompt.images.find(np.asarray(tokens), source)
                source = prompt.images.to_parts(source)
                if placed is not None and self._has_too_many(placed):
                    raise MalformedRow(TOO_MANY_PATCHES)
            return source, tokens, placed
        except MalformedRow as error:
            raise UnusableRow(error.describe("env: a row cannot be used")) from None
        except TemplateFailed as error:
            raise UnusableRow(f"env: a row cannot be used: {error}") from None

    def _has_too_many(self, images: PlacedImages) -> bool:
        """Return True for images that no row has room for."""
        return self.row_patches is not None and images.num_patches > self.row_patches

    def render(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a conversation with the generation prompt."""
        messages = prompt.messages
        if self.system is not None and messages[0].get("role") not in SYSTEM_ROLES:
            messages = [{"role": "system", "content": self.system}, *messages]
        return prompt_tokens(
            self.tokenizer, messages, prompt.tools, self.special_tokens, prompt.chat_template_kwargs
        )
