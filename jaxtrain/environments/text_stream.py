"""Text of an answer as its tokens come: what can be shown now, and will not change.

    tokens ─> whole characters ─> held back: what may become a stop text or a tool call ─> shown

The pieces of a stream join to the text of the whole answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.environments.tool_calls import OPENED, ToolCall, split_calls

CALL_MARKS = {"hermes": ("<tool_call>",), "mistral": ("[TOOL_CALLS]",), "llama3": ()}
"""Texts with which a call begins; in Llama's format a call is the whole turn."""
BARE_CALL = ("{", "<|python_tag|>")


class Detokenizer:
    """Decodes token by token: the pieces join to the decoded whole."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self._tokens: list[int] = []
        # Tokens before `_read` are shown. They are decoded once more from `_context` on, since
        # tokenizers write a word differently at a text's start.
        self._context = self._read = 0

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Return the text that these tokens add, without a character that is not complete yet
        unless it is the end."""
        self._tokens += tokens
        shown = self.decode(self._tokens[self._context : self._read])
        text = self.decode(self._tokens[self._context :])
        if len(text) <= len(shown) or (text.endswith("\ufffd") and not final):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(shown) :]


class TextStream:
    """Text of one answer, without what ends it."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        ends: Sequence[int] = (),
        stops: Sequence[str] = (),
        family: str = "",
        opened: bool = False,
    ):
        """ends: tokens that end it. stops: texts that end it. family: format in which it may call
        tools, a key of tool_calls.FAMILIES; "": it may not. opened: its prompt opens a thought,
        which is shown."""
        self._detokenizer = Detokenizer(decode)
        self.ends, self.stops, self.family, self.opened = ends, stops, family, opened
        self.text = ""
        """All of it so far, shown or not."""
        self._shown = 0
        self.stop: str | None = None
        """The stop text that has ended it."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return what can be shown now of text that these tokens add."""
        self._extend(tokens)
        return self._show(self._find_safe())

    def finish(
        self, tokens: Sequence[int] = (), tools: Sequence[Any] = ()
    ) -> tuple[str, list[ToolCall]]:
        """Return (what is left to be shown, tool calls) of an answer that ends with these
        tokens; `text` is then its content without the calls."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.ends else tokens
        self._extend(tokens, final=True)
        calls: list[ToolCall] = []
        if self.family:
            self.text, calls = split_calls(self.text, self.family, tools)
        return self._show(len(self.text)), calls

    def _extend(self, tokens: Sequence[int], final: bool = False) -> None:
        if self.stop is not None:
            return
        start = len(self.text)
        self.text += self._detokenizer.push(tokens, final)
        if self.opened and (final or len(self.text.lstrip()) >= len(OPENED)):
            self.opened = False
            if not self.text.lstrip().startswith(OPENED):
                self.text = f"{OPENED}\n{self.text}"
        hits = []
        for stop in self.stops:
            # A stop text may have begun in what came before.
            position = self.text.find(stop, max(0, start - len(stop)))
            if position >= 0:
                hits.append((position, stop))
        if hits:
            position, self.stop = min(hits)
            self.text = self.text[:position]

    def _find_safe(self) -> int:
        """Return the number of characters that no later token can take back."""
        if self.stop is not None and not self.family:
            return len(self.text)
        if self.opened:
            return 0
        marks = CALL_MARKS.get(self.family, ())
        if self.family and not marks and self._shown == 0:
            text = self.text.lstrip()
            if any(mark.startswith(text) or text.startswith(mark) for mark in BARE_CALL):
                return 0
        for mark in marks:
            if (position := self.text.find(mark, max(0, self._shown - len(mark)))) >= 0:
                return position
        held = max((overlap(self.text, mark) for mark in (*marks, *self.stops)), default=0)
        return len(self.text) - held

    def _show(self, end: int) -> str:
        new, self._shown = self.text[self._shown : end], max(self._shown, end)
        return new


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` with which `mark` begins."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
