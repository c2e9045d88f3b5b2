"""Messages to tokens by the tokenizer's chat template, and the mask of what an assistant wrote.

The mask comes from incremental prefixes of the template. For an assistant turn i,

    prompt = render(messages[:i], generation prompt)     the model's input when it writes the turn
    done   = render(messages[:i+1])                      the same with the turn

so the turn is done minus prompt, including its end-of-turn token. A turn trains only in a rendering
that begins with both, in text and in tokens; then training sees what inference will see.

- A template that rewrites history (Qwen3 strips earlier thinking) gives several renderings of one
  conversation: the full one, and for each turn that it shows differently the conversation up to
  that turn. Each turn trains in exactly one.
- If the rendering of a turn does not begin with its prompt (a generation prompt that opens a
  thinking block, and a turn without one), the turn trains from where the two differ.
- If tokens merge across the boundary of a turn (silent re-tokenization), the model would train on
  tokens that it never sees at inference: `RetokenizationError`; the row is dropped.
- Control tokens that texts of the data spell stay text: see control_tokens.py.
- If the template omits tools, tool calls or thinking of the row: `TemplateOmission`; dropped too.
"""

import bisect
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data.chat.control_tokens import Encoder, SpecialTokens, encoder_of, find_control
from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import TemplateFailed as TemplateFailed
from jaxtrain.huggingface.chat_template import render, render_prefixes
from jaxtrain.huggingface.tokenizer import open_tokenizer

Message = Mapping[str, Any]


class RetokenizationError(Exception):
    """A turn is tokenized differently once the next turn follows."""


class TemplateOmission(Exception):
    """The chat template does not write a part of the row, which the message names."""


@dataclass(frozen=True)
class Rendering:
    """Token sequence of a conversation."""

    tokens: np.ndarray
    """int32 [n]."""
    author: np.ndarray
    """int32 [n]: index of the trained message that a token belongs to; -1 for context (headers,
    generation prompts, messages that do not train)."""
    controls: int = 0
    """Control tokens that the messages spell, counted with their first rendering."""


def load_tokenizer(name_or_path: str, chat_template: str | None = None) -> Any:
    """Load a transformers fast tokenizer from a folder, the Hub, or "builtin" (shipped here).

    chat_template: a named template or a file with one, which replaces the tokenizer's own;
    "builtin" is ChatML with tools and thinking. Raises UserError if there is no such tokenizer or
    only a slow one.
    """
    from jaxtrain.data.chat.named_templates import BUILTIN

    location = str(BUILTIN) if name_or_path == "builtin" else os.fspath(name_or_path)
    folder = Path(location)
    if folder.exists() and not (folder / "tokenizer_config.json").exists():
        if not (folder / "tokenizer.json").exists():
            raise UserError(
                f"no tokenizer in {location}: expected a folder with tokenizer.json and "
                'tokenizer_config.json (key model.tokenizer; "builtin" is the one shipped here)'
            )
    if not folder.exists() and (location.startswith((".", "/", "~")) or location.count("/") > 1):
        raise UserError(f"tokenizer folder {location} does not exist (key model.tokenizer)")
    tokenizer = open_tokenizer(location)
    # A tokenizer.json may request truncation or padding.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    return tokenizer


def set_template(tokenizer: Any, chat_template: str) -> None:
    """Replace a tokenizer's template by a named one or a file's; UserError if it lacks the tokens
    that a named template writes."""
    from jaxtrain.data.chat.named_templates import read_template, require_tokens

    require_tokens(tokenizer, chat_template)
    tokenizer.chat_template = read_template(chat_template)


def require_chat_template(tokenizer: Any) -> None:
    """Raise UserError unless the tokenizer can render messages."""
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, which chat data needs: "
            "name a file with one as model.chat_template, or another model.tokenizer"
        )


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Encode a trusted text, in which control tokens are control tokens (else use `encoder_of`).

    special: with the tokens that the tokenizer adds at the ends.
    """
    # The Python wrapper gives the same ids, at several times the cost for a short text.
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids


def encode_text(
    tokenizer: Any, text: str, special: bool = False, special_tokens: SpecialTokens = "text"
) -> list[int]:
    """Encode a text of the data, in which control tokens are text; special: as in `encode`."""
    encoder = encoder_of(tokenizer, special_tokens)
    if special_tokens == "control" or not encoder.count(text):
        return encode(tokenizer, text, special)
    alone, around = encode(tokenizer, "a"), encode(tokenizer, "a", special=special)
    before = next(
        (i for i in range(len(around)) if around[i : i + len(alone)] == alone), len(around)
    )
    return [*around[:before], *encoder.text(text), *around[before + len(alone) :]]


def begin_text(tokenizer: Any, encoder: Encoder, text: str) -> list[int]:
    """Encode the beginning of a text of the data, with bos if the tokenizer adds one."""
    ids = encoder.text(text)
    bos = tokenizer.bos_token_id
    habit = encode(tokenizer, "", special=True)
    return [bos, *ids] if bos is not None and habit[:1] == [bos] and ids[:1] != [bos] else ids


def eos_of(tokenizer: Any) -> int:
    """Return the id of the token that ends plain text; UserError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} names no eos token, which plain text "
            "must end with: set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def render_text(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, generation: bool = False
) -> str:
    """Render messages to text. Raises TemplateFailed with the template's reason, and UserError for
    an invalid template or one that exceeds its time budget."""
    return render(tokenizer, messages, tools, generation)


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Any = None,
    special_tokens: SpecialTokens = "text",
) -> list[int]:
    """Return the tokens of messages with the generation prompt, for a model to continue.

    special_tokens: meaning of control tokens that the messages spell.
    """
    require_chat_template(tokenizer)
    encoder = encoder_of(tokenizer, special_tokens)
    (messages, tools), mark, _ = encoder.protect((messages, tools))
    return encoder(render_text(tokenizer, messages, tools, generation=True), mark)


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the id of the special token that ends an assistant turn in the template, if any.

    Raises UserError for a template that refuses even a question with its answer.
    """
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        tail = render_text(tokenizer, turns).rpartition("ANSWER")[2].strip()
    except TemplateFailed as error:
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} refuses a user's message and an answer"
            f" ({error}); name another one as model.chat_template"
        ) from None
    ids = encode(tokenizer, tail)
    return ids[0] if ids and ids[0] in special_ids(tokenizer) else None


def end_of_turn_ids(tokenizer: Any, raw: bool = False) -> frozenset[int]:
    """Return the tokens that end an answer: eos and, unless the text is `raw`, the token with which
    the chat template ends an assistant turn."""
    templated = not raw and tokenizer.chat_template
    token_ids = {tokenizer.eos_token_id, end_of_turn(tokenizer) if templated else None}
    return frozenset(token for token in token_ids if token is not None)


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of control tokens, which no ordinary text produces."""
    return set(find_control(tokenizer).values())


MOST_RENDERED = 2**27
"""Limit of characters times trained turns where each turn is rendered with all that precedes it."""
MOST_RENDERED_MESSAGES = 1000
"""Limit of messages of such a conversation."""
FEW = 3
"""Up to this many turns, rendering turn by turn is as fast as locating all turns at once."""


@dataclass(frozen=True)
class TurnSpan:
    """Position of a trained message, in characters of the rendering that shows it."""

    index: int
    start: int
    end: int
    done: str
    """Rendering that ends with the turn; "" if the full one is known to begin with it."""


class Renderer:
    """Renders conversations with one tokenizer. Picklable."""

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens = "text") -> None:
        """special_tokens: meaning of control tokens that the messages spell."""
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.encoder = encoder_of(tokenizer, special_tokens)
        self.special = self.encoder.contents_ids

    def __call__(
        self, messages: Sequence[Message], tools: Any, trained: Sequence[int]
    ) -> list[Rendering]:
        """Return renderings that mark each trained message once; the first is the full one.

        trained: indices of the messages that train, of any role; an assistant's starts after the
        generation prompt. Raises TemplateFailed, RetokenizationError, TemplateOmission, and
        UserError if an assistant turn does not end with a special token.
        """
        (messages, tools), mark, count = self.encoder.protect((messages, tools))
        first, *later = self.render(messages, tools, trained, mark)
        return [dataclasses.replace(first, controls=count), *later]

    def render(
        self, messages: Sequence[Message], tools: Any, trained: Sequence[int], mark: str
    ) -> list[Rendering]:
        """Render messages and tools that are protected with `mark`; otherwise as `__call__`."""
        if len(trained) > FEW and (located := self.find_turns(messages, tools, trained)):
            text, turns = located
            self._check_tools(tools, text)
            return [self._mark(EncodedText(self.encoder, text, mark, {}), turns, messages)]
        size = sum(len(message.get("content") or "") for message in messages)
        if size * len(trained) > MOST_RENDERED:
            raise TemplateFailed(f"turns times characters are more than {MOST_RENDERED:,}")
        if len(trained) > FEW and len(messages) > MOST_RENDERED_MESSAGES:
            raise TemplateFailed(
                f"more than {MOST_RENDERED_MESSAGES:,} messages for a chat template that does not"
                " write message by message"
            )
        pending = [self._turn(messages, tools, index) for index in trained]
        if pending and pending[-1].index == len(messages) - 1:
            text = pending[-1].done
        else:
            text = render_text(self.tokenizer, messages, tools)
        self._check_tools(tools, text)
        renderings, encoded_pieces = [], {}
        while True:
            shown = [turn for turn in pending if text.startswith(turn.done)]
            if shown or not renderings:
                encoded = EncodedText(self.encoder, text, mark, encoded_pieces)
                renderings.append(self._mark(encoded, shown, messages))
            pending = [turn for turn in pending if turn not in shown]
            if not pending:
                return renderings
            text = pending[-1].done

    def find_turns(
        self, messages: Sequence[Message], tools: Any, trained: Sequence[int]
    ) -> tuple[str, list[TurnSpan]] | None:
        """Locate the trained turns from two renderings: (full text, spans).

        None if the template does not write message by message, or shows a trained turn differently
        later on. Raises TemplateOmission as `_turn` does.
        """
        prefixes = render_prefixes(self.tokenizer, messages, tools)
        if prefixes is None or prefixes.text != render_text(self.tokenizer, messages, tools):
            return None
        text, starts, turns = prefixes.text, prefixes.starts, []
        for index in trained:
            is_assistant = messages[index]["role"] == "assistant"
            done, offset = prefixes.lasts[index], starts[index]
            if not text.startswith(done, offset) or (index == 0 and is_assistant):
                return None
            start, end = 0, offset + len(done)
            if index > 0:
                prompt = (prefixes.prompts if is_assistant else prefixes.lasts)[index - 1]
                start = starts[index - 1] + len(prompt)
                # `text` begins with all of `done`, so anything within that may be compared.
                if start > end or not text.startswith(prompt, starts[index - 1]):
                    return None
            turns.append(TurnSpan(index, start, end, ""))
        for turn in turns:
            self._check_complete(messages[turn.index], text[turn.start : turn.end])
        return text, turns

    @staticmethod
    def _check_tools(tools: Any, text: str) -> None:
        names = [tool.get("function", tool).get("name", "") for tool in tools or []]
        if not all(name in text for name in names):
            raise TemplateOmission("tools")

    def _turn(self, messages: Sequence[Message], tools: Any, index: int) -> TurnSpan:
        """Render the conversation up to a message, without and with it."""
        is_assistant = messages[index]["role"] == "assistant"
        prompt = ""
        if is_assistant or index > 0:
            prompt = render_text(self.tokenizer, messages[:index], tools, generation=is_assistant)
        done = render_text(self.tokenizer, messages[: index + 1], tools)
        if not done.startswith(prompt):
            prompt = os.path.commonprefix([prompt, done])
            before = render_text(self.tokenizer, messages[:index], tools) if index else ""
            if len(prompt) < len(os.path.commonprefix([before, done])) or prompt == done:
                raise TemplateFailed("chat template: a turn rewrites what precedes it")
        self._check_complete(messages[index], done[len(prompt) :])
        return TurnSpan(index, len(prompt), len(done), done)

    @staticmethod
    def _check_complete(message: Message, text: str) -> None:
        """Raise TemplateOmission unless a turn's text contains its thinking and tool calls."""
        if message.get("reasoning_content", "").strip() not in text:
            raise TemplateOmission("reasoning_content")
        for call in message.get("tool_calls", []):
            if call["function"]["name"] not in text:
                raise TemplateOmission("tool_calls")

    def _mark(
        self, text: "EncodedText", turns: list[TurnSpan], messages: Sequence[Message]
    ) -> Rendering:
        """Encode a text and mark the tokens of its turns."""
        author = np.full(len(text.tokens), -1, np.int32)
        for turn in turns:
            start, end = text.find(turn.start), text.find(turn.end)
            if messages[turn.index]["role"] == "assistant":
                end = self._end_of_turn(text.tokens, start, end)
            author[start:end] = turn.index
        return Rendering(np.asarray(text.tokens, np.int32), author)

    def _end_of_turn(self, tokens: list[int], start: int, end: int) -> int:
        """Return the end of an assistant turn: after its last special token, which only white space
        may follow."""
        for index in range(end - 1, start - 1, -1):
            if tokens[index] in self.special:
                return index + 1
            if self.tokenizer.decode([tokens[index]]).strip():
                break
        raise UserError(
            "the chat template does not end an assistant turn with a special token, so a model "
            f"would never learn to stop: the turn ends in "
            f"{self.tokenizer.decode(tokens[max(start, end - 8) : end])!r}. "
            "Use another chat template (key model.chat_template)."
        )


class EncodedText:
    """Tokens of a rendered text, with a map from characters to tokens.

    The text is encoded in pieces between control tokens, each once for all renderings of a
    conversation, so that the work grows with the conversation and not with all its prefixes.
    """

    def __init__(
        self, encoder: Encoder, text: str, mark: str, encoded_pieces: dict[str, list[int]]
    ) -> None:
        """encoded_pieces: cache of encoded pieces; new ones are added to it."""
        self.encoder, self.mark = encoder, mark
        self.pieces = encoder.pieces(text)
        self.tokens: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        start = 0
        for piece in self.pieces:
            self._starts.append(start)
            self._counts.append(len(self.tokens))
            if piece not in encoded_pieces:
                encoded_pieces[piece] = encoder(piece, mark)
            self.tokens += encoded_pieces[piece]
            start += len(piece)

    def find(self, cut: int) -> int:
        """Count the tokens before character `cut`; RetokenizationError if that is inside one."""
        index = bisect.bisect_right(self._starts, cut) - 1
        if index < 0:
            return 0
        before, count = self.pieces[index][: cut - self._starts[index]], self._counts[index]
        if len(before) == len(self.pieces[index]):
            return self._counts[index + 1] if index + 1 < len(self.pieces) else len(self.tokens)
        head = self.encoder(before, self.mark)
        if head != self.tokens[count : count + len(head)]:
            around = self.encoder.backend.decode(head[-5:], skip_special_tokens=False)
            raise RetokenizationError(f"tokens change after {around!r} when the next turn follows")
        return count + len(head)
