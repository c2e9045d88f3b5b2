"""Texts to token ids from a memory of words, in half the time of one tokenizer call a text or less.

A byte-level BPE cuts a text by a pattern before it merges, so most of its borders are fixed by the
two characters around them, such as a space behind a letter. A text is cut there, and the ids of its
words are remembered. Each kind of border is used only for tokenizers of which two tests show that
it changes nothing:

- no entry of the vocabulary stands across such a border, so no merge does
- around every such pair of characters, texts have the tokens of their two sides
"""

import functools
import itertools
import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer

SYMBOL = r"!-&(-/:-@\[-`{-~"
"""ASCII signs but the apostrophe, which begins English endings."""
PRINTABLE = "!-~"
SPACE = "\u0120"
"""Letter that stands for a space in vocabularies of byte-level BPE."""
MAX_WORD, MAX_WORDS = 24, 1 << 17
"""Limits of the characters of a word that is remembered, and of the number of words."""
LONG_TEXTS = 512
"""Texts encoded as a whole before the tests, which take as long as these: fewer would not pay."""
TESTED = (
    "059"
    + "adelmrstvz"
    + "ADELMRSTVZ"
    + "".join(chr(number) for number in range(33, 127) if not chr(number).isalnum())
)
"""ASCII signs of the tests: all but the letters and digits that no pattern of words names."""


class Border(NamedTuple):
    """Kind of border between two characters."""

    before: str
    """Characters that end a word, as a set of a pattern."""
    after: str
    between: str = ""
    """Character between the two; it belongs to the second word if it is a space, to the first if it
    is a line break."""

    @property
    def pattern(self) -> str:
        if self.between == "\n":
            return f"(?<=[{self.before}]\n)(?=[{self.after}])"
        return f"(?<=[{self.before}])(?={self.between}[{self.after}])"

    @property
    def token(self) -> str:
        """Pattern of a vocabulary's entry that stands across the border."""
        if self.between == "\n":
            return f"\u010a[{self.after}]"
        return f"[{self.before}]{SPACE if self.between else f'[{self.after}]'}"


SPACES = Border(PRINTABLE, PRINTABLE, " ")
INNER = (
    Border(PRINTABLE, PRINTABLE, "\n"),
    Border("0-9", "0-9"),
    Border("0-9", SYMBOL),
    Border("0-9", "A-Za-z"),
    Border("A-Za-z", "0-9"),
    Border("A-Za-z", SYMBOL),
    Border(SYMBOL, "0-9"),
)
"""Borders within what stands between two spaces."""
ENDS = ("", "x", "'s", "'", "1", "..", "Q")
"""What the tests put around the two characters."""


class _Memory(dict[str, list[int]]):
    """Ids of texts, each encoded once."""

    def __init__(self, encode: Any):
        self.encode = encode

    def __missing__(self, text: str) -> list[int]:
        ids = self.encode(text)
        if len(text) <= MAX_WORD:
            if len(self) >= MAX_WORDS:
                self.clear()
            self[text] = ids
        return ids


class WordEncoder:
    """Callable: text -> ids, as the tokenizer gives without the tokens that it adds at the ends."""

    def __init__(self, backend: Tokenizer):
        self.backend, self.countdown = backend, LONG_TEXTS
        self.cuts: tuple[re.Pattern[str], re.Pattern[str]] | None = None
        self.added = re.compile(r"(?!)")
        self.pieces, self.words = _Memory(self.encode_whole), _Memory(self._word)

    def __getstate__(self) -> dict[str, Any]:
        return {"backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def encode_whole(self, text: str) -> list[int]:
        # The Python wrapper gives the same ids, at several times the cost for a short text.
        return self.backend.encode(text, add_special_tokens=False).ids

    def __call__(self, text: str) -> list[int]:
        if len(text) <= MAX_WORD:
            return [*self.pieces[text]]
        if self.countdown:
            self.countdown -= 1
            if not self.countdown:
                self.cuts = find_cuts(self.backend)
                contents = self.backend.get_added_tokens_decoder().values()
                names = [re.escape(token.content) for token in contents]
                self.added = re.compile("|".join(names) or r"(?!)")
        if self.cuts is None or self.added.search(text):
            return self.encode_whole(text)
        first, *rest = self.cuts[0].split(text)
        words = map(self.words.__getitem__, rest)
        return [*self._cut(first), *itertools.chain.from_iterable(words)]

    def _word(self, word: str) -> list[int]:
        return self._cut(" " + word)

    def _cut(self, text: str) -> list[int]:
        assert self.cuts is not None
        pieces = map(self.pieces.__getitem__, self.cuts[1].split(text))
        return [*itertools.chain.from_iterable(pieces)]


def find_cuts(backend: Tokenizer) -> tuple[re.Pattern[str], re.Pattern[str]] | None:
    """Return the patterns of spaces to cut at, and of borders within words, that change no ids;
    None if there are none."""
    tokenizer = json.loads(backend.to_str())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    kinds = [tokenizer["normalizer"], tokenizer["pre_tokenizer"]]
    normalizer, splitter = ((kind or {}).get("type") for kind in kinds)
    steps = kinds[1]["pretokenizers"] if splitter == "Sequence" else [kinds[1] or {}]
    if (
        (model.get("type"), model.get("dropout")) != ("BPE", None)
        or normalizer not in (None, "NFC")
        or (steps[-1].get("type"), steps[-1].get("add_prefix_space")) != ("ByteLevel", False)
    ):
        return None
    vocabulary = "\n".join(model["vocab"].keys() - {token["content"] for token in added})

    def holds(border: Border) -> bool:
        return not re.search(border.token, vocabulary) and _is_fixed(backend, border)

    if not holds(SPACES):
        return None
    inner = "|".join(border.pattern for border in INNER if holds(border))
    return re.compile(f"(?<=[{PRINTABLE}]) (?=[{PRINTABLE}])"), re.compile(inner or r"(?!)")


def _is_fixed(backend: Tokenizer, border: Border) -> bool:
    """Return True if texts around every pair of characters have the tokens of their two sides."""
    behind, ahead = ("\n", "") if border.between == "\n" else ("", border.between)
    befores, afters = (re.findall(f"[{signs}]", TESTED) for signs in border[:2])

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    sides = functools.cache(encode)
    for i, before in enumerate(befores):
        for j, after in enumerate(afters):  # each pair with two of the ends
            first = f"{ENDS[(i + j) % len(ENDS)]}{before}{behind}"
            second = f"{ahead}{after}{ENDS[(i + 2 * j) % len(ENDS)]}"
            if encode(first + second) != sides(first) + sides(second):
                return False
    return True
