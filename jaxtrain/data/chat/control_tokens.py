"""Control tokens: a chat template may write them, texts of the data may not; a config may add some.

A text that spells a control token ("<|im_end|>" in a question about chat formats, or in an attack)
becomes ordinary tokens, which the model reads as these letters. Only the template itself writes
control tokens. To distinguish the two in a rendered conversation, spelled ones are replaced by
marks before the template sees them, and written out again afterwards:

    protect        messages with "<|im_end|>" inside        -> with 9047...001...9047 in its place
    chat template                                           -> text: its own control tokens, marks
    encode         control tokens by their ids, marks as the letters that they stand for
"""

import bisect
import itertools
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from jaxtrain.errors import UserError
from jaxtrain.huggingface.chat_template import TemplateFailed
from jaxtrain.text_safety import show

SpecialTokens = Literal["text", "control"]
Spans = Sequence[tuple[int, int]]
"""(start, end) of characters."""
MASKED = -2
"""Author of a token of a message that trains, in a part that does not."""

PROBES = ("", "a", " a", "a ", "\n", " ", "A1")
"""Texts put around a control token to test whether it is tokenized independently of them."""


class Protected(NamedTuple):
    """Values of a row with marks in place of spelled control tokens."""

    value: Any
    mark: str
    """Digits around each mark that occur nowhere else; "" if nothing had to be marked."""
    count: int
    """Control tokens that were spelled in the texts."""


class Encoder:
    """Texts to token ids with one tokenizer."""

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens = "text"):
        """special_tokens "control": a text that spells a control token writes one."""
        from jaxtrain.data.chat.words import WordEncoder  # not for runs on token ids

        self.backend = tokenizer.backend_tokenizer
        self._encode = WordEncoder(self.backend)
        self.special_tokens: SpecialTokens = special_tokens
        self.contents = find_control(tokenizer)
        self._order = sorted(self.contents, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, self._order)) or r"(?!)")
        self._beginnings = {text[:end] for text in self._order for end in range(1, len(text))}
        self._initials = {text[0] for text in self._order}
        self._initial = re.compile("|".join(map(re.escape, sorted(self._initials))) or r"(?!)")
        self._longest = max(map(len, self._order), default=0)
        self._apart: dict[str, bool] = {}
        self._plain: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plain": None}

    def count(self, text: str) -> int:
        """Count the control tokens that a text spells."""
        return sum(1 for _ in self._spelled.finditer(text))

    def protect(self, value: Any, mark: str = "") -> Protected:
        """Copy nested lists and dicts of texts, marking the control tokens that they spell.

        The beginning of a control token at the end of a text is marked too, because the next text
        might complete it. mark: from `make_mark`, for texts that are protected separately; by
        default a number that does not occur in them.
        """
        texts = list(_texts(value))
        suspects = [text for text in texts if self._initial.search(text)]
        count = sum(map(self.count, suspects))
        if self.special_tokens == "control" or not (count or any(map(self._begins, suspects))):
            return Protected(value, "", count)
        number = 0o4736251734
        while not mark and any(f"9{number:o}" in text for text in texts):
            number += 1
        mark = mark or f"9{number:o}"  # octal has no 9 except in front: marks cannot overlap

        def protect(text: str) -> str:
            numbered = lambda match: f"{mark}{self._order.index(match[0]) + 1:04}{mark}"  # noqa: E731
            marked = self._spelled.sub(numbered, text)
            return f"{marked}{mark}0000{mark}" if self._begins(text) else marked

        return Protected(_map_texts(value, protect), mark, count)

    def restore(self, text: str, mark: str) -> str:
        """Return the original of a marked text."""
        if not mark or mark not in text:
            return text
        spelled = ("", *self._order)
        return re.sub(f"{mark}(\\d{{4}}){mark}", lambda match: spelled[int(match[1])], text)

    def __call__(self, text: str, mark: str = "") -> list[int]:
        """Encode a text that a template wrote around protected values."""
        if not mark or mark not in text:
            return self._encode(text)
        plain, names, ids = self._open_plain()
        named = self._spelled.sub(lambda match: names[match[0]], text)
        token_ids = plain.encode(self.restore(named, mark), add_special_tokens=False).ids
        # Some vocabularies contain a control token as an ordinary word as well. Encoding the
        # spelled ones a letter at a time keeps their ids out.
        if not self.contents_ids.isdisjoint(token_ids):
            pieces = re.split(f"({mark}\\d{{4}}{mark})", named)
            token_ids = [
                token
                for index, piece in enumerate(pieces)
                for token in (
                    self._letters(self.restore(piece, mark))
                    if index % 2
                    else plain.encode(piece, add_special_tokens=False).ids
                )
            ]
        return [ids.get(token, token) for token in token_ids]

    def text(self, text: str) -> list[int]:
        """Encode a text of the data without a template."""
        protected = self.protect(text)
        return self(protected.value, protected.mark)

    def pieces(self, text: str) -> list[str]:
        """Cut a text around the control tokens whose two sides are tokenized independently."""
        pieces, start = [], 0
        for match in self._spelled.finditer(text):
            if self._stands_apart(match[0]):
                pieces += [text[start : match.start()], match[0]]
                start = match.end()
        return [piece for piece in (*pieces, text[start:]) if piece]

    def find_close(self, text: str) -> int | None:
        """Return the end of the last control token of a text, which only white space may follow;
        None if there is none."""
        for control in self._order:
            start = text.rfind(control)
            if start >= 0 and not text[start + len(control) :].strip():
                return start + len(control)
        return None

    def find_open(self, text: str) -> str:
        """Return the control token that a text begins with; "" if it begins with none."""
        return next((control for control in self._order if text.startswith(control)), "")

    def count_common(self, text: str, compared: str, mark: str = "") -> int:
        """Count the characters of the longest common beginning that ends between two tokens of
        `text`."""
        start = 0
        for piece, second in itertools.zip_longest(
            self.pieces(text), self.pieces(compared), fillvalue=""
        ):
            if piece == second:
                start += len(piece)
                continue
            end = 0 if piece in self.contents else len(os.path.commonprefix([piece, second]))
            tokens = self(piece, mark)
            while end and (head := self(piece[:end], mark)) != tokens[: len(head)]:
                end -= 1
            return start + end
        return start

    def locate(
        self, text: str, mark: str, turn: tuple[int, int], content: str, spans: Spans
    ) -> Spans:
        """Return spans of a message's content as characters of `text`, which a template wrote; one
        that starts before the content starts with the turn. Raises TemplateFailed if the turn, from
        character to character, does not hold the content."""

        def protect(part: str) -> str:
            if not mark:
                return part
            # A mark behind the end of a text stands for nothing in it.
            return self.protect(part, mark).value.removesuffix(f"{mark}0000{mark}")

        begin = text.rfind(protect(content.strip()), *turn)
        if begin < 0:
            raise TemplateFailed("chat template: a text that trains in part is changed")
        lead = len(content) - len(content.lstrip())

        def find(cut: int) -> int:
            # Texts lose what stands around them.
            shown = begin + len(protect(content[lead : max(cut, lead)]))
            return turn[0] if cut < 0 else min(shown, turn[1])

        return [(find(start), find(end)) for start, end in spans]

    @property
    def contents_ids(self) -> set[int]:
        """Ids of the control tokens."""
        return set(self.contents.values())

    def _begins(self, text: str) -> bool:
        """Return True if a text ends with the beginning of a control token."""
        if self._initials.isdisjoint(text[-self._longest :]):
            return False
        return any(
            text[-n:] in self._beginnings for n in range(1, min(self._longest, len(text)) + 1)
        )

    def _stands_apart(self, control: str) -> bool:
        """Return True if the texts around a control token are tokenized independently of it."""
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
        """Encode a spelled control token a letter at a time; drops a letter that is one itself."""
        plain = self._open_plain()[0]
        return [
            token
            for letter in spelled
            for token in plain.encode(letter, add_special_tokens=False).ids
            if token not in self.contents_ids
        ]

    def _open_plain(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Return the tokenizer without control tokens, an unguessable stand-in for each of them,
        and the ids that the stand-ins map to."""
        if self._plain is None:
            plain = Tokenizer.from_str(self.backend.to_str())
            plain.encode_special_tokens = True
            added_tokens = self.backend.get_added_tokens_decoder()
            nonce, names, ids = secrets.token_hex(16), {}, {}
            for number, (content, token_id) in enumerate(self.contents.items()):
                names[content] = f"\ufdd0{nonce}{number}\ufdd1"
                as_it_was = added_tokens.get(token_id)
                flags = {
                    name: getattr(as_it_was, name, False)
                    for name in ("single_word", "lstrip", "rstrip")
                }
                plain.add_tokens([AddedToken(names[content], normalized=False, **flags)])
                ids[plain.token_to_id(names[content])] = token_id
            self._plain = plain, names, ids
        return self._plain


class RetokenizationError(Exception):
    """A turn is tokenized differently once the next turn follows."""


class EncodedText:
    """Tokens of a rendered text, with a map from characters to tokens.

    The text is encoded in pieces between control tokens, each once for all renderings of a
    conversation, so that the work grows with the conversation and not with all its prefixes. A cut,
    where the model begins to write, ends a piece if tokens would merge across it otherwise.
    """

    def __init__(
        self,
        encoder: Encoder,
        text: str,
        mark: str,
        cuts: Sequence[int],
        encoded_pieces: dict[str, list[int]],
    ) -> None:
        """cuts: characters before each. encoded_pieces: cache of encoded pieces; new ones are added
        to it."""
        self.encoder, self.mark, self._encoded = encoder, mark, encoded_pieces
        self.text = text
        self.pieces: list[str] = []
        self.tokens: list[int] = []
        self._starts: list[int] = []
        self._counts: list[int] = []
        start = 0
        for piece in encoder.pieces(text):
            end = start + len(piece)
            for cut in cuts:
                if start < cut < end and not self._is_border(piece, cut - start):
                    self._add(piece[: cut - start], start)
                    start, piece = cut, piece[cut - start :]
            self._add(piece, start)
            start = end

    def _encode(self, piece: str) -> list[int]:
        if piece not in self._encoded:
            self._encoded[piece] = self.encoder(piece, self.mark)
        return self._encoded[piece]

    def _add(self, piece: str, start: int) -> None:
        self.pieces.append(piece)
        self._starts.append(start)
        self._counts.append(len(self.tokens))
        self.tokens += self._encode(piece)

    def _is_border(self, piece: str, cut: int) -> bool:
        """Return True if no token of a piece extends over a cut. Raises RetokenizationError if one
        does and the parts alone are no other tokens of the same text, as with tokenizers that begin
        every text with a space."""
        head, tokens = self.encoder(piece[:cut], self.mark), self._encode(piece)
        if head == tokens[: len(head)]:
            return True
        decode = self.encoder.backend.decode
        parts = [*head, *self._encode(piece[cut:])]
        if decode(parts, skip_special_tokens=False) != decode(tokens, skip_special_tokens=False):
            raise _retokenized(self.encoder, head)
        return False

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
            raise _retokenized(self.encoder, head)
        return count + len(head)

    def mask(self, author: np.ndarray, spans: Spans) -> None:
        """Set `author` [n] to MASKED for the tokens that spans of `text` touch."""

        def border(cut: int, step: int) -> int:
            while True:
                try:
                    return self.find(cut)
                except RetokenizationError:
                    cut += step

        for start, end in spans:
            author[border(start, -1) : border(end, 1)] = MASKED


def _retokenized(encoder: Encoder, head: list[int]) -> RetokenizationError:
    around = encoder.backend.decode(head[-5:], skip_special_tokens=False)
    return RetokenizationError(f"tokens change after {around!r} when the next turn follows")


def make_mark() -> str:
    """Draw a mark that occurs in no text, by chance or by intent."""
    return f"9{secrets.randbits(60) | 1 << 60:o}"


def find_control(tokenizer: Any) -> dict[str, int]:
    """Return {content: id} of a tokenizer's control tokens."""
    controls = {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**controls, **{str(content): i for content, i in named if content and i is not None}}


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


_ENCODERS: "weakref.WeakKeyDictionary[Any, dict[str, Encoder]]" = weakref.WeakKeyDictionary()


def encoder_of(tokenizer: Any, special_tokens: SpecialTokens = "text") -> Encoder:
    """Return the tokenizer's encoder, built once."""
    kinds = _ENCODERS.setdefault(tokenizer, {})
    encoder = kinds.get(special_tokens)
    if encoder is None or encoder.contents != find_control(tokenizer):
        encoder = kinds[special_tokens] = Encoder(tokenizer, special_tokens)
    return encoder


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and dicts, keys included."""
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


def begin_text(tokenizer: Any, encoder: Encoder, text: str) -> list[int]:
    """Encode the beginning of a text of the data, with bos if the tokenizer adds one."""
    ids = encoder.text(text)
    bos = tokenizer.bos_token_id
    habit = encode(tokenizer, "", special=True)
    return [bos, *ids] if bos is not None and habit[:1] == [bos] and ids[:1] != [bos] else ids


def require_chat_template(tokenizer: Any) -> None:
    """Raise UserError unless the tokenizer can render messages."""
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, which chat data needs: "
            "name a file with one as model.chat_template, or another model.tokenizer"
        )


def eos_of(tokenizer: Any) -> int:
    """Return the id of the token that ends plain text; UserError for a tokenizer without one."""
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} names no eos token, which plain text "
            "must end with: set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def add_tokens(
    tokenizer: Any,
    added: Sequence[str] = (),
    special: Sequence[str] = (),
    roles: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Add tokens to a tokenizer in place and return those that are new.

    added: ordinary tokens, spelled as in texts. special: control tokens, which only templates
    write. roles: {attribute of the tokenizer, such as "eos_token": control token}.
    """
    roles = roles or {}
    controls = [*special, *roles.values()]
    vocabulary = tokenizer.get_vocab()
    for token in (*added, *controls):
        if not token.strip():
            raise UserError(
                f"model.added_tokens or model.special_tokens: {show(token)} is no token"
            )
    if overlap := set(added) & set(controls):
        raise UserError(
            f"{show(min(overlap))} is in model.added_tokens and a control token; a token that texts"
            " spell is no control token"
        )
    new = tuple(dict.fromkeys(token for token in (*added, *controls) if token not in vocabulary))
    for tokens, is_control in ((controls, True), (added, False)):
        tokenizer.add_tokens(
            [AddedToken(token, special=is_control, normalized=False) for token in tokens],
            special_tokens=is_control,
        )
    for role, token in roles.items():
        setattr(tokenizer, role, token)
    return new


def rows_needed(tokenizer: Any, rows: int) -> int:
    """Return the embedding rows for a tokenizer, at least `rows`.

    The new number is divisible by the same power of 2 as the old one, up to 64, so that the table
    shards over devices as before.
    """
    size = len(tokenizer)
    if size <= rows:
        return rows
    step = next(step for step in (64, 32, 16, 8, 4, 2, 1) if rows % step == 0)
    return -(-size // step) * step
