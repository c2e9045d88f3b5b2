"""Control tokens: what a chat template may write and people's text may not.

Text of people that spells a control token ("<|im_end|>" in a question about chat formats, or an
attack) is text: it becomes ordinary tokens, which the model reads as these letters. Only what the
template itself writes is control. To tell the two apart in a rendered conversation, the spelled
ones are replaced by marks before the template sees them, and written out again afterwards:

    protect        messages with "<|im_end|>" inside        -> with 9047...001...9047 in its place
    chat template                                           -> text: its own control tokens, marks
    encode         control tokens by their ids, marks as the letters that they stand for
"""

import re
import secrets
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Tokenizer

SpecialTokens = Literal["text", "control"]

PROBES = ("", "a", " a", "a ", "\n", " ", "A1")
"""What stands around a control token when its independence is looked at."""


class Protected(NamedTuple):
    """Values of a row whose spelled control tokens are marked."""

    value: Any
    mark: str
    """Digits that stand around each mark and nowhere else; "" where nothing had to be marked."""
    count: int
    """Control tokens that were spelled in the texts."""


class Encoder:
    """Texts to token ids with one tokenizer."""

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens = "text"):
        """special_tokens "control": what spells a control token is one, wherever it stands."""
        self.backend = tokenizer.backend_tokenizer
        self.special_tokens: SpecialTokens = special_tokens
        self.contents = find_control(tokenizer)
        self._order = sorted(self.contents, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._order)) or r"(?!)")
        self._beginnings = {text[:end] for text in self._order for end in range(1, len(text))}
        self._longest = max(map(len, self._order), default=0)
        self._apart: dict[str, bool] = {}
        self._plain: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plain": None}

    def count(self, text: str) -> int:
        """Control tokens that a text spells."""
        return sum(1 for _ in self._spelled.finditer(text))

    def protect(self, value: Any, mark: str = "") -> Protected:
        """A copy of nested lists and dicts of texts in which spelled control tokens are marked, and
        beginnings of them at the end of a text, which the next text might complete.

        mark: one of `make_mark`, for texts that are protected apart; else one that they lack.
        """
        texts = list(_texts(value))
        count = sum(map(self.count, texts))
        if self.special_tokens == "control" or not (count or any(map(self._begins, texts))):
            return Protected(value, "", count)
        number = 0o4736251734
        while not mark and any(f"9{number:o}" in text for text in texts):
            number += 1
        mark = mark or f"9{number:o}"  # 9 nowhere but in front: two marks cannot overlap

        def protect(text: str) -> str:
            numbered = lambda found: f"{mark}{self._order.index(found[0]) + 1:04}{mark}"  # noqa: E731
            marked = self._spelled.sub(numbered, text)
            return f"{marked}{mark}0000{mark}" if self._begins(text) else marked

        return Protected(_map_texts(value, protect), mark, count)

    def restore(self, text: str, mark: str) -> str:
        """A marked text as it was."""
        if not mark or mark not in text:
            return text
        spelled = ("", *self._order)
        return re.sub(f"{mark}(\\d{{4}}){mark}", lambda found: spelled[int(found[1])], text)

    def __call__(self, text: str, mark: str = "") -> list[int]:
        """Token ids of what a template wrote around protected values."""
        if not mark or mark not in text:
            # The Python wrapper gives the same ids, at several times the cost for a short text.
            return self.backend.encode(text, add_special_tokens=False).ids
        plain, names, ids = self._open_plain()
        named = self._spelled.sub(lambda found: names[found[0]], text)
        found = plain.encode(self.restore(named, mark), add_special_tokens=False).ids
        if not self.contents_ids.isdisjoint(found):  # a model that has them as words, too
            pieces = re.split(f"({mark}\\d{{4}}{mark})", named)
            found = [
                token
                for index, piece in enumerate(pieces)
                for token in (
                    self._letters(self.restore(piece, mark))
                    if index % 2
                    else plain.encode(piece, add_special_tokens=False).ids
                )
            ]
        return [ids.get(token, token) for token in found]

    def text(self, text: str) -> list[int]:
        """Token ids of a text of people, without any template."""
        protected = self.protect(text)
        return self(protected.value, protected.mark)

    def pieces(self, text: str) -> list[str]:
        """The text cut around those control tokens beside which it is tokenized independently."""
        pieces, start = [], 0
        for found in self._spelled.finditer(text):
            if self._stands_apart(found[0]):
                pieces += [text[start : found.start()], found[0]]
                start = found.end()
        return [piece for piece in (*pieces, text[start:]) if piece]

    @property
    def contents_ids(self) -> set[int]:
        """Ids of the control tokens."""
        return set(self.contents.values())

    def _begins(self, text: str) -> bool:
        """Whether a text ends in the beginning of a control token."""
        return any(
            text[-n:] in self._beginnings for n in range(1, min(self._longest, len(text)) + 1)
        )

    def _stands_apart(self, control: str) -> bool:
        """Whether a text around a control token is its two sides, tokenized alone."""
        if control not in self._apart:
            encode = lambda text: self.backend.encode(text, add_special_tokens=False).ids  # noqa: E731
            alone = {probe: encode(probe) for probe in PROBES}
            middle = [self.contents[control]]
            self._apart[control] = all(
                encode(before + control + after) == alone[before] + middle + alone[after]
                for before in PROBES
                for after in PROBES
            )
        return self._apart[control]

    def _letters(self, spelled: str) -> list[int]:
        """A spelled control token a letter at a time; one of a single letter has no other form."""
        plain = self._open_plain()[0]
        return [
            token
            for letter in spelled
            for token in plain.encode(letter, add_special_tokens=False).ids
            if token not in self.contents_ids
        ]

    def _open_plain(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer without control tokens; for each a name that stands for it there and that
        nobody can guess, and the id that it has."""
        if self._plain is None:
            plain = Tokenizer.from_str(self.backend.to_str())
            plain.encode_special_tokens = True
            known = self.backend.get_added_tokens_decoder()
            nonce, names, ids = secrets.token_hex(16), {}, {}
            for number, (content, token_id) in enumerate(self.contents.items()):
                names[content] = f"\ufdd0{nonce}{number}\ufdd1"
                as_it_was = known.get(token_id)
                flags = {
                    name: getattr(as_it_was, name, False)
                    for name in ("single_word", "lstrip", "rstrip")
                }
                plain.add_tokens([AddedToken(names[content], normalized=False, **flags)])
                ids[plain.token_to_id(names[content])] = token_id
            self._plain = plain, names, ids
        return self._plain


def make_mark() -> str:
    """A mark that no text holds by chance or by intent."""
    return f"9{secrets.randbits(60) | 1 << 60:o}"


def find_control(tokenizer: Any) -> dict[str, int]:
    """{content: id} of a tokenizer's control tokens."""
    found = {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**found, **{str(content): i for content, i in named if content and i is not None}}


_ENCODERS: "weakref.WeakKeyDictionary[Any, dict[str, Encoder]]" = weakref.WeakKeyDictionary()


def encoder_of(tokenizer: Any, special_tokens: SpecialTokens = "text") -> Encoder:
    """The tokenizer's encoder; made once."""
    kinds = _ENCODERS.setdefault(tokenizer, {})
    found = kinds.get(special_tokens)
    if found is None or found.contents != find_control(tokenizer):
        found = kinds[special_tokens] = Encoder(tokenizer, special_tokens)
    return found


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested lists and dicts, keys too."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
