"""Messages to tokens by the tokenizer's chat template, and the mask of what an assistant wrote.

The mask comes from incremental prefixes of the template. For an assistant turn i,

    prompt = render(messages[:i], generation prompt)     the model's input when it writes the turn
    done   = render(messages[:i+1])                      the same with the turn

so the turn is done minus prompt, including its end-of-turn token. A turn trains only in a rendering
that begins with both, so that training sees what inference will see. What follows a prompt is
tokenized apart from it, as a sampler draws it.

- A template that rewrites history (Qwen3 strips earlier thinking, Mistral's moves the system
  message on) gives several renderings of one conversation, each up to a turn. Each turn trains in
  exactly one.
- If the rendering of a turn does not begin with its prompt (a generation prompt that opens a
  thinking block, and a turn without one), the turn trains from the token where the two differ. If
  it rewrites what precedes the prompt, it trains behind the prompt.
- If the template writes no control token behind a turn, the turn ends with the one that begins the
  next message (GLM), or else with eos. An eos that it writes behind the last message alone, whose
  turn has ended before (Phi-3), is left out.
- An assistant's turn before which no user speaks, and which no prompt precedes, is context.
- Control tokens that texts of the data spell stay text: see control_tokens.py.
- If the template omits a part of the row: `TemplateOmission`, see omissions.py.
"""

import dataclasses
import functools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.chat.control_tokens import MASKED as MASKED
from jaxtrain.data.chat.control_tokens import (
    EncodedText,
    Encoder,
    Spans,
    SpecialTokens,
    encoder_of,
)
from jaxtrain.data.chat.control_tokens import RetokenizationError as RetokenizationError
from jaxtrain.data.chat.control_tokens import begin_text as begin_text
from jaxtrain.data.chat.control_tokens import encode as encode
from jaxtrain.data.chat.control_tokens import encode_text as encode_text
from jaxtrain.data.chat.control_tokens import eos_of as eos_of
from jaxtrain.data.chat.control_tokens import require_chat_template as require_chat_template
from jaxtrain.data.chat.omissions import Kwargs, check_omissions, write_thoughts_once
from jaxtrain.data.chat.omissions import TemplateOmission as TemplateOmission
from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import TemplateFailed as TemplateFailed
from jaxtrain.huggingface.chat_template import render as render_text
from jaxtrain.huggingface.chat_template import render_prefixes
from jaxtrain.huggingface.tokenizer import open_tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Rendering:
    """Token sequence of a conversation."""

    tokens: np.ndarray
    """int32 [n]."""
    author: np.ndarray
    """int32 [n]: index of the trained message that a token belongs to; -1 for context (headers,
    generation prompts, messages that do not train), MASKED for spans that do not."""
    controls: int = 0
    """Control tokens that the messages spell, counted with their first rendering."""


def context_spans(messages: Sequence[Message]) -> dict[int, list[tuple[int, int]]]:
    """Return {index of a message: (start, end) of the characters of its text that do not train}."""
    spans = {
        index: [
            (span["begin_offset"], span["end_offset"] + 1)
            for span in message.get("train_detail", ())
            if not span["train"]
        ]
        for index, message in enumerate(messages)
    }
    return {index: listed for index, listed in spans.items() if listed}


def load_tokenizer(name_or_path: str, chat_template: str | None = None) -> Any:
    """Load a transformers fast tokenizer from a folder, the Hub, or "builtin" (shipped here).

    chat_template: a named template or a file with one, which replaces the tokenizer's own;
    "builtin" is ChatML with tools and thinking. Raises UserError if there is no such tokenizer or
    only a slow one.
    """
    from jaxtrain.data.chat.named_templates import BUILTIN, set_template
    from jaxtrain.huggingface.generation import read_ends

    location = str(BUILTIN) if name_or_path == "builtin" else os.fspath(name_or_path)
    folder, names = Path(location), ("tokenizer_config.json", "tokenizer.json", "tekken.json")
    if folder.exists() and not any((folder / name).exists() for name in names):
        raise UserError(
            f"no tokenizer in {location}: expected tokenizer.json and tokenizer_config.json, or"
            ' tekken.json (key model.tokenizer; "builtin" is the one shipped here)'
        )
    if not folder.exists() and (location.startswith((".", "/", "~")) or location.count("/") > 1):
        raise UserError(f"tokenizer folder {location} does not exist (key model.tokenizer)")
    tokenizer = open_tokenizer(location)
    tokenizer.generation_ends = [i for i in read_ends(location) if 0 <= i < len(tokenizer)]
    # A tokenizer.json may request truncation or padding.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if chat_template is not None:
        set_template(tokenizer, chat_template)
    return tokenizer


class TurnEnds(NamedTuple):
    """Tokens that end an assistant's turn."""

    closing: frozenset[int]
    """Those that the template writes behind a turn."""
    following: frozenset[int]
    """Those that begin the next message, where the template closes no turn (GLM), or eos."""


CALL: dict[str, Any] = {"type": "function", "id": "probecall"}
CALL["function"] = {"name": "lookup", "arguments": {"key": "value"}}
PROBE = {"role": "user", "content": "Q"}
PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "assistant", "content": "ANSWER"}, {"role": "user", "content": "Q"}],
    [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "lookup", "tool_call_id": "probecall", "content": "RESULT"},
    ],
)
"""Turns of an assistant behind a question, an answer and a call, each with what may follow it."""

_TURN_ENDS: "weakref.WeakKeyDictionary[Any, tuple[Any, TurnEnds]]" = weakref.WeakKeyDictionary()


def turn_ends(tokenizer: Any) -> TurnEnds:
    """Return the tokens that end answers and tool calls in the chat template.

    Raises UserError for a template that refuses even a question with its answer.
    """
    state = (tokenizer.chat_template, len(tokenizer), tokenizer.eos_token)
    cached = _TURN_ENDS.get(tokenizer)
    if cached is not None and cached[0] == state:
        return cached[1]
    renderer, ends = Renderer(tokenizer), (set(), set())
    for probe in PROBES:
        for count in (1, 2):
            turns = [PROBE, *probe[:count]]
            try:
                [(text, spans)] = renderer.locate(turns, None, [1], None)
            except TemplateFailed as error:
                if probe is not PROBES[0] or count == 2:
                    continue
                raise UserError(
                    f"the chat template of {tokenizer.name_or_path} refuses a user's message and an"
                    f" answer ({error}); name another one as model.chat_template"
                ) from None
            except UserError:  # neither an end nor eos
                continue
            for span in spans:
                tokens = renderer.encoder(text[span.start : span.end])
                ends[span.follows].add(tokens[-1])
    result = TurnEnds(*map(frozenset, ends))
    _TURN_ENDS[tokenizer] = (state, result)
    return result


def end_of_turn_ids(tokenizer: Any, raw: bool = False) -> frozenset[int]:
    """Return the tokens that end an answer: eos, those that generation_config.json lists and,
    unless the text is `raw`, those with which the chat template ends an assistant's turns."""
    listed = getattr(tokenizer, "generation_ends", ())
    token_ids = {tokenizer.eos_token_id, *listed}
    if not raw and tokenizer.chat_template:
        ends = turn_ends(tokenizer)
        token_ids |= ends.closing | ends.following
    return frozenset(token for token in token_ids if token is not None)


def decode_answer(tokenizer: Any, tokens: Sequence[int], raw: bool = False) -> str:
    """Return what a model wrote: with its control tokens, but for the one that ended it."""
    ended = bool(tokens) and tokens[-1] in end_of_turn_ids(tokenizer, raw)
    return tokenizer.decode(tokens[:-1] if ended else tokens)


MAX_RENDERED = 2**27
"""Limit of characters times trained turns where each turn is rendered with all that precedes it."""
MAX_RENDERED_MESSAGES = 1000
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
    follows: bool = False
    """True if the turn ends with a token that does not belong to it."""


Located = list[tuple[str, list[TurnSpan]]]
"""Renderings with the turns that each of them trains."""


class Renderer:
    """Renders conversations with one tokenizer. Picklable."""

    def __init__(
        self, tokenizer: Any, special_tokens: SpecialTokens = "text", kwargs: Kwargs = None
    ) -> None:
        """special_tokens: meaning of control tokens that the messages spell. kwargs: further
        variables of the template."""
        require_chat_template(tokenizer)
        self.tokenizer, self.kwargs = tokenizer, dict(kwargs or {})
        self.encoder = encoder_of(tokenizer, special_tokens)

    @functools.cached_property
    def final_eos(self) -> str:
        """The eos token, if the template writes it behind the last message of a conversation alone,
        although a control token has ended the turn; else ""."""
        eos, probe = self.tokenizer.eos_token, [PROBE, *PROBES[0]]
        try:
            done, longer = (
                render_text(self.tokenizer, probe[:count], None, False, self.kwargs)
                for count in (2, 3)
            )
        except TemplateFailed:
            return ""
        turn = done.removesuffix(eos or "")
        ends = longer.startswith(turn) and not longer.startswith(done)
        return eos if ends and self.encoder.find_close(turn) is not None else ""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Any,
        trained: Sequence[int],
        kwargs: Kwargs = None,
        spans: Mapping[int, Spans] | None = None,
    ) -> list[Rendering]:
        """Return renderings that mark each trained message once, the longest first.

        trained: indices of the messages that train, of any role; an assistant's starts after the
        generation prompt. kwargs: the row's own variables of the template. spans: parts of trained
        messages that are MASKED. Raises TemplateFailed, RetokenizationError, TemplateOmission, and
        UserError if an assistant turn has no end.
        """
        kwargs = {**self.kwargs, **(kwargs or {})}
        messages = write_thoughts_once(self.tokenizer, messages)
        parts = {i: (messages[i]["content"], listed) for i, listed in (spans or {}).items()}
        (messages, tools, kwargs), mark, count = self.encoder.protect((messages, tools, kwargs))
        first, *later = self.render(messages, tools, trained, mark, kwargs, parts)
        return [Rendering(first.tokens, first.author, count), *later]

    def render(
        self,
        messages: Sequence[Message],
        tools: Any,
        trained: Sequence[int],
        mark: str,
        kwargs: Kwargs = None,
        spans: Mapping[int, tuple[str, Spans]] | None = None,
    ) -> list[Rendering]:
        """Render messages, tools and kwargs that are protected with `mark`; otherwise as
        `__call__`."""
        located = self.locate(messages, tools, trained, kwargs)

        def write(messages: Sequence[Message], tools: Any) -> list[str]:
            return [text for text, _ in self.locate(messages, tools, trained, kwargs)]

        checked = trained or [i for i, m in enumerate(messages) if m["role"] == "assistant"][-1:]
        texts = [text for text, _ in located]
        check_omissions(self.tokenizer, messages, tools, checked, kwargs, texts, write)
        encoded_pieces: dict[str, list[int]] = {}
        return [
            self._mark(text, turns, messages, mark, encoded_pieces, spans or {})
            for text, turns in located
        ]

    def locate(
        self, messages: Sequence[Message], tools: Any, trained: Sequence[int], kwargs: Kwargs
    ) -> Located:
        """Return the texts of `render` with the positions of their turns."""
        if len(trained) > FEW and (by_message := self.find_turns(messages, tools, trained, kwargs)):
            return [by_message]
        size = sum(len(message.get("content") or "") for message in messages)
        if size * len(trained) > MAX_RENDERED:
            raise TemplateFailed(f"turns times characters are more than {MAX_RENDERED:,}")
        if len(trained) > FEW and len(messages) > MAX_RENDERED_MESSAGES:
            raise TemplateFailed(
                f"more than {MAX_RENDERED_MESSAGES:,} messages for a chat template that does not"
                " write message by message"
            )
        conversation = _Conversation(
            self.tokenizer, self.encoder, messages, tools, kwargs, self.final_eos
        )
        turns = [conversation.find_turn(index) for index in trained]
        pending = [turn for turn in turns if turn is not None]
        if trained and not pending:
            raise TemplateFailed("chat template: nothing precedes the only turn that trains")
        ends = pending and pending[-1].index == len(messages) - 1
        text = pending[-1].done if ends else conversation.render(len(messages))
        located = []
        while True:
            shown = [turn for turn in pending if text.startswith(turn.done)]
            if shown or not trained:
                located.append((text, shown))
            pending = [turn for turn in pending if turn not in shown]
            if not pending:
                return located
            text = pending[-1].done

    def find_turns(
        self, messages: Sequence[Message], tools: Any, trained: Sequence[int], kwargs: Kwargs
    ) -> tuple[str, list[TurnSpan]] | None:
        """Locate the trained turns from two renderings: (full text, spans).

        None if the template does not write message by message, or shows a trained turn differently
        later on.
        """
        prefixes = render_prefixes(self.tokenizer, messages, tools, kwargs)
        if prefixes is None:
            return None
        if prefixes.text != render_text(self.tokenizer, messages, tools, False, kwargs):
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
            if is_assistant:
                close = self.encoder.find_close(text[start:end])
                if close is None:
                    return None
                end = start + close
            turns.append(TurnSpan(index, start, end, ""))
        return text, turns

    def _mark(
        self,
        text: str,
        turns: list[TurnSpan],
        messages: Sequence[Message],
        mark: str,
        encoded_pieces: dict[str, list[int]],
        spans: Mapping[int, tuple[str, Spans]],
    ) -> Rendering:
        """Encode a text and mark the tokens of its turns."""
        cuts = [turn.start for turn in turns if messages[turn.index]["role"] == "assistant"]
        masked = []
        for turn in (turn for turn in turns if turn.index in spans):
            content, listed = spans[turn.index]
            parts = self.encoder.locate(text, mark, (turn.start, turn.end), content, listed)
            masked += parts
            # The beginning of a continued turn is the model's input.
            cuts += [end for (_, end), (start, _) in zip(parts, listed, strict=True) if start < 0]
        encoded = EncodedText(self.encoder, text, mark, sorted(cuts), encoded_pieces)
        author = np.full(len(encoded.tokens), -1, np.int32)
        for turn in turns:
            author[encoded.find(turn.start) : encoded.find(turn.end)] = turn.index
        encoded.mask(author, masked)
        return Rendering(np.asarray(encoded.tokens, np.int32), author)


@dataclass(frozen=True)
class _Conversation:
    """Renderings of the beginnings of a conversation."""

    tokenizer: Any
    encoder: Encoder
    messages: Sequence[Message]
    tools: Any
    kwargs: Kwargs
    final_eos: str

    def render(self, count: int, generation: bool = False, *further: Message) -> str:
        """Render the first `count` messages and then `further`."""
        messages = [*self.messages[:count], *further]
        text = render_text(self.tokenizer, messages, self.tools, generation, self.kwargs)
        return text if generation else text.removesuffix(self.final_eos)

    def find_turn(self, index: int) -> TurnSpan | None:
        """Locate a message in the conversation up to it; None for a turn of the assistant that
        nothing precedes."""
        done = self.render(index + 1)
        if self.messages[index]["role"] != "assistant":
            before = self.render(index) if index else ""
            if not done.startswith(before):
                raise TemplateFailed("chat template: a message rewrites what precedes it")
            return TurnSpan(index, len(before), len(done), done)
        try:
            if index == 0:
                return None
            prompt = self.render(index, True)
        except TemplateFailed:
            if any(message["role"] == "user" for message in self.messages[:index]):
                raise
            return None
        if not done.startswith(prompt):
            start = self.encoder.count_common(prompt, done)
            before = self.render(index)
            if start == len(done) or start < len(before) or not done.startswith(before):
                start = self._find_start(index, prompt, done)
                done, start = prompt + done[start:], len(prompt)
        else:
            start = len(prompt)
        close = self.encoder.find_close(done[start:])
        if close is not None:
            return TurnSpan(index, start, start + close, done)
        done += self._find_next(index, done)
        return TurnSpan(index, start, len(done), done, True)

    def _find_start(self, index: int, prompt: str, done: str) -> int:
        """Find where a turn starts in a rendering that shows what precedes it otherwise than its
        prompt: behind the end of the prompt, from the last control token on."""
        content = self.messages[index].get("content") or ""
        variant = "%" if content.lstrip().startswith("#") else "#"
        changed = self.render(index, False, {"role": "assistant", "content": variant * 3})
        common = len(os.path.commonprefix([done, changed]))
        pieces = self.encoder.pieces(prompt)
        last = max((i for i, p in enumerate(pieces) if p in self.encoder.contents), default=None)
        opening = "" if last is None else "".join(pieces[last:])
        start = done.rfind(opening, 0, common) if opening else -1
        if start >= 0 and not done[start + len(opening) : common].strip():
            return start + len(opening)
        # As behind another question, which the turn rewrites nothing of (thoughts of gpt-oss).
        alone = dataclasses.replace(self, messages=[PROBE, self.messages[index]])
        question, answered = alone.render(1, True), alone.render(2)
        turn = answered[len(question) :]
        if not answered.startswith(question) or not turn or not done.endswith(turn):
            raise TemplateFailed("chat template: a turn rewrites what precedes it")
        return len(done) - len(turn)

    def _find_next(self, index: int, done: str) -> str:
        """Return the control token that ends a turn behind which the template writes none: the one
        that begins the next message, or else eos."""
        turn = self.messages[index]
        if index + 1 < len(self.messages):
            following = self.messages[index + 1]
        elif calls := turn.get("tool_calls"):
            following = {"role": "tool", "content": "R", "name": calls[-1]["function"]["name"]}
        else:
            following = {"role": "user", "content": "Q"}
        control = ""
        alone = dataclasses.replace(self, messages=[PROBE])  # no thought that a question removes
        bare = {"role": "assistant", "content": "x"}
        if calls := turn.get("tool_calls"):
            bare = {**bare, "content": "", "tool_calls": calls}
        for conversation, count, variant in ((self, index, turn), (alone, 1, bare)):
            try:
                ended = conversation.render(count, False, variant)
                text = conversation.render(count, False, variant, following)
            except TemplateFailed:
                continue
            if text.startswith(ended) and (control := self.encoder.find_open(text[len(ended) :])):
                break
        control = control or self.tokenizer.eos_token
        if not control:
            raise UserError(
                "the chat template does not end an assistant turn with a special token, so a model"
                f" would never learn to stop: the turn ends in {done[-20:]!r}, and the tokenizer"
                " names no eos token. Use another chat template (key model.chat_template)."
            )
        return control
