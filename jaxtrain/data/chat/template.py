"""Messages to tokens: the tokenizer's own chat template, and which tokens an assistant wrote.

The mask comes from incremental prefixes of the template. For an assistant turn i,

    prompt = render(messages[:i], generation prompt)     what the model sees when it has to speak
    done   = render(messages[:i+1])                      the same with the turn it wrote

so the turn is done minus prompt, up to and with its end-of-turn token. A turn trains only in a
rendering that begins with both, in text and in tokens; then training sees what inference will see.

- A template that rewrites history (Qwen3 strips earlier thinking) gives several renderings of one
  conversation: the whole, and for the turns that it shows differently the conversation up to them.
  Each turn trains in exactly one.
- Where the turn's own rendering does not begin with its prompt (a generation prompt that opens a
  thinking block, a turn that has none), the turn trains from where the two part.
- Where tokens merge across the border of a turn (silent re-tokenization), the model would be
  trained on tokens that it never sees in use: `RetokenizationError`, which formats count as dropped.
- What people's texts spell of control tokens stays text: see control.py.
- Where the template leaves out tools, tool calls or thinking that the row has: `TemplateOmission`, the same.
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
from jaxtrain.data.chat.named_templates import BUILTIN, read_template, require_tokens
from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import TemplateFailed as TemplateFailed
from jaxtrain.huggingface.chat_template import render, render_prefixes
from jaxtrain.huggingface.tokenizer import open_tokenizer

Message = Mapping[str, Any]


class RetokenizationError(Exception):
    """Text that is tokenized differently once it is followed by the next turn."""


class TemplateOmission(Exception):
    """The chat template does not write a part of the row; the text names the part."""


@dataclass(frozen=True)
class Rendering:
    """One token sequence of a conversation."""

    tokens: np.ndarray
    """int32 [n]."""
    author: np.ndarray
    """int32 [n]: index of the message that a token belongs to as a trainable part; -1 for context
    (headers, generation prompts, messages that are not asked for)."""
    controls: int = 0
    """Control tokens that the messages spell; counted with the first rendering of them."""


def load_tokenizer(name_or_path: str, chat_template: str | None = None) -> Any:
    """A transformers fast tokenizer from a folder, the Hub or "builtin" (the one shipped here).

    chat_template: a named template or a file with one, which replaces the tokenizer's own;
    "builtin" is the one shipped here (ChatML with tools and thinking). Raises UserError when
    there is no such tokenizer or only a slow one.
    """
    place = str(BUILTIN) if name_or_path == "builtin" else os.fspath(name_or_path)
    folder = Path(place)
    if folder.exists() and not (folder / "tokenizer_config.json").exists():
        if not (folder / "tokenizer.json").exists():
            raise UserError(
                f"no tokenizer in {place}: expected a folder with tokenizer.json and "
                'tokenizer_config.json (key model.tokenizer; "builtin" is the one shipped here)'
            )
    if not folder.exists() and (place.startswith((".", "/", "~")) or place.count("/") > 1):
        raise UserError(f"tokenizer folder {place} does not exist (key model.tokenizer)")
    tokenizer = open_tokenizer(place)
    # A tokenizer.json may ask to cut or fill up what it encodes.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    return tokenizer


def set_template(tokenizer: Any, chat_template: str) -> None:
    """Replace a tokenizer's template by that of a name or a file; UserError where it lacks tokens
    that a named one writes."""
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
    """Token ids of a text in which control tokens count as such (of people's: `encoder_of`);
    special: with the tokens that the tokenizer adds at its ends."""
    # The Python wrapper gives the same ids, at several times the cost for a short text.
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=special).ids


def encode_text(
    tokenizer: Any, text: str, special: bool = False, special_tokens: SpecialTokens = "text"
) -> list[int]:
    """Token ids of a text of people, in which control tokens are text; special: as `encode`."""
    encoder = encoder_of(tokenizer, special_tokens)
    if special_tokens == "control" or not encoder.count(text):
        return encode(tokenizer, text, special)
    alone, around = encode(tokenizer, "a"), encode(tokenizer, "a", special=special)
    before = next(
        (i for i in range(len(around)) if around[i : i + len(alone)] == alone), len(around)
    )
    return [*around[:before], *encoder.text(text), *around[before + len(alone) :]]


def begin_text(tokenizer: Any, encoder: Encoder, text: str) -> list[int]:
    """Tokens of the beginning of a text of people, with a bos token if the tokenizer has that
    habit."""
    ids = encoder.text(text)
    bos = tokenizer.bos_token_id
    habit = encode(tokenizer, "", special=True)
    return [bos, *ids] if bos is not None and habit[:1] == [bos] and ids[:1] != [bos] else ids


def eos_of(tokenizer: Any) -> int:
    """Id of the token that ends plain text; UserError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} names no eos token, which plain text "
            "must end with: set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def render_text(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, generation: bool = False
) -> str:
    """The chat template's text; raises TemplateFailed with the template's reason, UserError for a
    template that is none or that does not end."""
    return render(tokenizer, messages, tools, generation)


def prompt_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Any = None,
    special_tokens: SpecialTokens = "text",
) -> list[int]:
    """Tokens of messages with the generation prompt: what a model continues.

    special_tokens: what a control token is that the messages spell.
    """
    require_chat_template(tokenizer)
    encoder = encoder_of(tokenizer, special_tokens)
    (messages, tools), mark, _ = encoder.protect((messages, tools))
    return encoder(render_text(tokenizer, messages, tools, generation=True), mark)


def end_of_turn(tokenizer: Any) -> int | None:
    """Id of the special token with which the chat template ends an assistant turn, if any.

    Raises UserError for a template that refuses even a question and its answer.
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
    """Tokens that end an answer: the tokenizer's eos and, unless the text is `raw`, what the chat
    template ends an assistant turn with."""
    templated = not raw and tokenizer.chat_template
    found = {tokenizer.eos_token_id, end_of_turn(tokenizer) if templated else None}
    return frozenset(token for token in found if token is not None)


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of control tokens: those that no ordinary text produces."""
    return set(find_control(tokenizer).values())


MOST_RENDERED = 2**27
"""Characters of a conversation times its trained turns, where each turn has to be rendered behind
all that precedes it."""
MOST_RENDERED_MESSAGES = 1000
"""Of such a conversation."""
FEW = 3
"""Turns up to which they are rendered one by one, which then is as quick."""


@dataclass(frozen=True)
class TurnSpan:
    """Where a trainable message lies, in characters of the rendering that shows it."""

    index: int
    start: int
    end: int
    done: str
    """What ends with it; "" where the whole conversation is known to begin so."""


class Renderer:
    """Renders conversations with one tokenizer. Picklable."""

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens = "text") -> None:
        """special_tokens: what a control token is that the messages spell."""
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.encoder = encoder_of(tokenizer, special_tokens)
        self.special = self.encoder.contents_ids

    def __call__(
        self, messages: Sequence[Message], tools: Any, wanted: Sequence[int]
    ) -> list[Rendering]:
        """Renderings in which each wanted message is marked once; the first is the whole.

        wanted: indices of the messages that train, of any role; an assistant's starts after the
        generation prompt. Raises TemplateFailed, Retokenized, TemplateOmission, or UserError when an
        assistant turn does not end in a special token.
        """
        (messages, tools), mark, count = self.encoder.protect((messages, tools))
        first, *others = self.render(messages, tools, wanted, mark)
        return [dataclasses.replace(first, controls=count), *others]

    def render(
        self, messages: Sequence[Message], tools: Any, wanted: Sequence[int], mark: str
    ) -> list[Rendering]:
        """As called, of protected messages and tools with their mark."""
        if len(wanted) > FEW and (found := self.find_turns(messages, tools, wanted)):
            text, turns = found
            self._check_tools(tools, text)
            return [self._mark(EncodedText(self.encoder, text, mark, {}), turns, messages)]
        size = sum(len(message.get("content") or "") for message in messages)
        if size * len(wanted) > MOST_RENDERED:
            raise TemplateFailed(f"turns times characters are more than {MOST_RENDERED:,}")
        if len(wanted) > FEW and len(messages) > MOST_RENDERED_MESSAGES:
            raise TemplateFailed(
                f"more than {MOST_RENDERED_MESSAGES:,} messages for a chat template that does not"
                " write message by message"
            )
        left = [self._turn(messages, tools, index) for index in wanted]
        if left and left[-1].index == len(messages) - 1:
            text = left[-1].done
        else:
            text = render_text(self.tokenizer, messages, tools)
        self._check_tools(tools, text)
        renderings, known = [], {}
        while True:
            shown = [turn for turn in left if text.startswith(turn.done)]
            if shown or not renderings:
                encoded = EncodedText(self.encoder, text, mark, known)
                renderings.append(self._mark(encoded, shown, messages))
            left = [turn for turn in left if turn not in shown]
            if not left:
                return renderings
            text = left[-1].done

    def find_turns(
        self, messages: Sequence[Message], tools: Any, wanted: Sequence[int]
    ) -> tuple[str, list[TurnSpan]] | None:
        """(the whole conversation, where the wanted turns lie in it) from two renderings; None
        where the template is none that writes message by message, or shows one of them otherwise
        later on. Raises TemplateOmission as `_turn` does."""
        found = render_prefixes(self.tokenizer, messages, tools)
        if found is None or found.text != render_text(self.tokenizer, messages, tools):
            return None
        text, starts, turns = found.text, found.starts, []
        for index in wanted:
            is_assistant = messages[index]["role"] == "assistant"
            done, at = found.lasts[index], starts[index]
            if not text.startswith(done, at) or (index == 0 and is_assistant):
                return None
            start, end = 0, at + len(done)
            if index > 0:
                prompt = (found.prompts if is_assistant else found.lasts)[index - 1]
                start = starts[index - 1] + len(prompt)
                # `text` begins with all of `done`, so whatever lies within that may be compared.
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
        """Render up to a message, without and with it."""
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
        """Raise TemplateOmission unless the text of a turn has its thinking and its tool calls."""
        if message.get("reasoning_content", "").strip() not in text:
            raise TemplateOmission("reasoning_content")
        for call in message.get("tool_calls", []):
            if call["function"]["name"] not in text:
                raise TemplateOmission("tool_calls")

    def _mark(
        self, text: "EncodedText", turns: list[TurnSpan], messages: Sequence[Message]
    ) -> Rendering:
        """Tokens of a text with the turns marked that it shows."""
        author = np.full(len(text.tokens), -1, np.int32)
        for turn in turns:
            start, end = text.find(turn.start), text.find(turn.end)
            if messages[turn.index]["role"] == "assistant":
                end = self._end_of_turn(text.tokens, start, end)
            author[start:end] = turn.index
        return Rendering(np.asarray(text.tokens, np.int32), author)

    def _end_of_turn(self, tokens: list[int], start: int, end: int) -> int:
        """End of an assistant turn behind its last special token; only white space may follow."""
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
    """Tokens of a rendered text, and where in them its characters are.

    The text is tokenized in pieces between control tokens, each once for all renderings of a
    conversation, so that the work is that of the conversation and not of all its prefixes.
    """

    def __init__(self, encoder: Encoder, text: str, mark: str, known: dict[str, list[int]]) -> None:
        """known: pieces that were tokenized before; grows."""
        self.encoder, self.mark = encoder, mark
        self.pieces = encoder.pieces(text)
        self.tokens: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        start = 0
        for piece in self.pieces:
            self._starts.append(start)
            self._counts.append(len(self.tokens))
            if piece not in known:
                known[piece] = encoder(piece, mark)
            self.tokens += known[piece]
            start += len(piece)

    def find(self, cut: int) -> int:
        """Tokens before the character `cut`; Retokenized where that is within a token."""
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
