"""Prompts: the tokens of a conversation that a model continues.

A conversation that ends in the assistant's turn is continued within that turn, as its answer trains
behind such a prompt (`tokenize.continue_turn`); any other by the generation prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat.control_tokens import SpecialTokens, encoder_of, require_chat_template
from jaxtrain.data.chat.messages import MalformedRow, without_flags
from jaxtrain.data.chat.omissions import Kwargs, check_omissions, write_thoughts_once
from jaxtrain.data.chat.rows import IMAGES, MESSAGES, PROMPTS, TOOLS, Row, is_conversation
from jaxtrain.data.chat.template import Message, Renderer, RetokenizationError, context_spans
from jaxtrain.data.chat.tokenize import continue_turn
from jaxtrain.huggingface.chat_template import TemplateFailed, render

ANSWER = "#"
"""Answer in whose place a begun turn is rendered."""


class Prompt(NamedTuple):
    """Question to answer, with all that a chat template renders."""

    value: str | list[dict[str, Any]]
    """Plain text, or messages; the assistant's at their end is a turn to be continued."""
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    images: Any = None
    """Row.images, in whose markers the messages hold images; None: they hold none."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages; a text is the user's."""
        if isinstance(self.value, str):
            return [{"role": "user", "content": self.value}]
        return self.value


def read_prompt(row: Row, column: str = "prompt") -> Prompt | None:
    """Return the prompt of a row; None if it has no column of prompts. Raises MalformedRow."""
    value = row.prompt(column)
    if value is None:
        return None
    return Prompt(value, row.tools(), row.chat_template_kwargs(), row.images)


def normalize_row(row: Row, column: str = "prompt") -> dict[str, Any]:
    """Return the columns of a row with messages, tools and keywords of templates in one form, for
    readers that do not know the dataset's names; other columns stay as they are. Images are read:
    columns and parts hold packing.tree.Image, which any reader takes.

    Raises MalformedRow.
    """
    row.parse({column}.difference(PROMPTS))
    columns, images = dict(row.columns), row.images
    for name in {column, *PROMPTS}:
        if is_conversation(columns.get(name), row.fields):
            chat = row.messages() if name in MESSAGES else row.read_messages(row.get(name))
            assert chat is not None, "is_conversation has seen it"
            is_answered = name not in MESSAGES and chat and chat[-1]["role"] == "assistant"
            if is_answered and not row.continues(name):
                row.ignore(f"answer at the end of column {name}")
            columns[name] = _with_parts(chat, images)
    for name in IMAGES:
        if images is not None and name in row:
            columns[name] = images.read_column(columns[name])
    if is_conversation(columns.get("history"), row.fields):
        columns["history"] = _with_parts(row.history(), images)
    schemas = [columns[name] for name in TOOLS if name in row]
    if schemas and all(map(_is_schemas, schemas)):
        columns["tools"] = row.tools()
        columns.pop("functions", None)
    if isinstance(columns.get("chat_template_kwargs"), str | Mapping):
        columns["chat_template_kwargs"] = row.chat_template_kwargs()
    return columns


def _with_parts(messages: Sequence[Message], images: Any) -> Sequence[Message]:
    """Return messages whose images are parts, not markers, which only the row's reader knows."""
    if images is None:
        return messages
    return images.to_parts(messages, lambda image: {"image": image})


def _is_schemas(value: Any) -> bool:
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and all(isinstance(tool, Mapping) for tool in value)


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Any = None,
    special_tokens: SpecialTokens = "text",
    kwargs: Kwargs = None,
) -> list[int]:
    """Return the tokens of messages for a model to continue: with the generation prompt, or up to
    the end of the assistant's turn that they end in.

    special_tokens: meaning of control tokens that the messages spell. kwargs: further variables of
    the template. Raises TemplateFailed, also for a part that the template leaves out.
    """
    require_chat_template(tokenizer)
    if split_opening(messages)[1] is not None:
        return _begun_tokens(Renderer(tokenizer, special_tokens, kwargs), messages, tools)
    encoder = encoder_of(tokenizer, special_tokens)
    messages = write_thoughts_once(tokenizer, messages)
    (messages, tools, kwargs), mark, _ = encoder.protect((messages, tools, kwargs))
    return encoder(render_prompt(tokenizer, messages, tools, kwargs), mark)


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], tools: Any, kwargs: Kwargs = None
) -> str:
    """Render messages with the generation prompt to text; raises TemplateFailed, also for a part
    that the template leaves out."""

    def write(messages: Sequence[Message], tools: Any) -> list[str]:
        return [render(tokenizer, messages, tools, True, kwargs)]

    [text] = texts = write(messages, tools)
    check_omissions(tokenizer, messages, tools, (), kwargs, texts, write)
    return text


def split_opening(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Return (messages before the turn that a prompt begins, text of that turn); None without."""
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        return [*messages[:-1]], messages[-1].get("content") or ""
    return [*messages], None


def join_answer(messages: Sequence[Message], text: str) -> tuple[list[Message], Message]:
    """Return (prompt, the assistant's turn) for the text that a model wrote behind messages."""
    before, opening = split_opening(messages)
    return before, {"role": "assistant", "content": (opening or "") + text}


def _begun_tokens(renderer: Renderer, messages: Sequence[Message], tools: Any) -> list[int]:
    answer = {"role": "assistant", "content": ANSWER}
    try:
        before, [[turn]] = continue_turn([*map(dict, messages)], [[answer]])
        conversation, last = [*before, turn], len(before)
        spans = context_spans(conversation)
        [rendering] = renderer(without_flags(conversation), tools, [last], None, spans)
    except (MalformedRow, RetokenizationError) as error:
        reason = str(error) or "its last turn has no tokens of its own"
        raise TemplateFailed(f"the prompt cannot be continued: {reason}") from None
    return rendering.tokens[: int(np.argmax(rendering.author == last))].tolist()
