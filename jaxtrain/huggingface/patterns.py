"""Regular expressions of a tokenizer.json, refused if a text can make them run without bound.

The Rust library matches by backtracking: (a+)+b takes twice as long for each further a, and cannot
be interrupted. So patterns are analyzed, not tried. Refused are: a repetition without a small bound
of something with varying length or several ways to match; more than MAX_REPEATS such repetitions
along one way through the pattern (each may raise the time by a power of the length); back
references, recursion, and unknown syntax. Possessive repetitions (a++) and atomic groups (?>...)
never backtrack and count as one way.

This bounds the exponent, not the time: accepted patterns may still be quadratic in a long run of
spaces.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten

SMALL = 16
"""A repetition of at most so many is none to fear."""
MAX_REPEATS = 4
MAX_PATTERN = 20_000
MAX_DEPTH = 50
PARTS = ("normalizer", "pre_tokenizer", "decoder")


def check_patterns(backend: Any, source: str) -> None:
    """Raise UserError if a pattern of a tokenizers.Tokenizer may take time without bound."""
    for name in PARTS:
        part = getattr(backend, name)
        if part is None:
            continue
        try:
            settings = json.loads(part.__getstate__())
        except Exception:  # a part written in Python, which has no pattern of a file
            continue
        for pattern in _list_patterns(settings):
            try:
                check_pattern(pattern)
            except ValueError as reason:
                raise UserError(
                    f"the tokenizer {source}: {name} of tokenizer.json has the regular expression"
                    f" {shorten(pattern)}, {reason}, so that a text may take forever. Rewrite it"
                    " (possessive repetitions and atomic groups are fine), or use another tokenizer"
                ) from None


def check_pattern(pattern: str) -> None:
    """Raise ValueError with the reason if a pattern is one that the module refuses."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"which has more than {MAX_PATTERN} characters")
    reader = _Reader(pattern)
    way = reader.alternatives(0)
    if reader.at < len(pattern):
        raise ValueError(f"whose ) at place {reader.at} closes nothing")
    if way.repeats > MAX_REPEATS:
        raise ValueError(f"which repeats {way.repeats} things in a row")


def _list_patterns(part: Any) -> list[str]:
    """List the regular expressions in the JSON form of a part, in order."""
    if isinstance(part, list):
        return [pattern for item in part for pattern in _list_patterns(item)]
    if not isinstance(part, dict):
        return []
    direct = [part["Regex"]] if isinstance(part.get("Regex"), str) else []
    return direct + [nested for value in part.values() for nested in _list_patterns(value)]


@dataclass(frozen=True)
class _Ways:
    """The ways in which an expression may match."""

    repeats: int = 0
    """Unbounded repetitions along one way through it."""
    varies: bool = False
    """Whether it may match in several ways: of other lengths, or by other alternatives."""
    letter: str | None = None
    """The one plain character that it is."""


_REPEAT = re.compile(r"\*|\+|\?|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\?(?:[:=!>]|<[=!]|<[A-Za-z_]\w*>|#|[imxs-]*[:)])")
_CODE = re.compile(
    r"\\[pP]\{\^?[\w \-=]*\}|\\x\{[0-9A-Fa-f ]+\}|\\x[0-9A-Fa-f]{1,2}|\\u[0-9A-Fa-f]{4}"
)


class _Reader:
    """A parser of Oniguruma's syntax as far as tokenizers use it."""

    def __init__(self, pattern: str):
        self.text, self.at = pattern, 0

    def alternatives(self, depth: int) -> _Ways:
        """Parse up to the closing parenthesis or the end."""
        if depth > MAX_DEPTH:
            raise ValueError(f"which is nested deeper than {MAX_DEPTH}")
        ways = [self.sequence(depth)]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            ways.append(self.sequence(depth))
        if len(ways) == 1:
            return ways[0]
        # Single characters that all differ are as good as a class of them.
        letters = {way.letter for way in ways}
        plain = None not in letters and len(letters) == len(ways)
        return _Ways(max(way.repeats for way in ways), not plain)

    def sequence(self, depth: int) -> _Ways:
        parts: list[_Ways] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom(depth)))
        if len(parts) == 1:
            return parts[0]
        return _Ways(sum(part.repeats for part in parts), any(part.varies for part in parts))

    def repeated(self, ways: _Ways) -> _Ways:
        """Parse the quantifiers behind an atom."""
        while match := _REPEAT.match(self.text, self.at):
            start, self.at = self.at, match.end()
            least, most = _bounds(match)
            suffix = self.text[self.at : self.at + 1]
            # Behind {n,m} a + is a further repetition, as in Ruby.
            possessive = suffix == "+" and match[0][0] != "{"
            if possessive or suffix == "?":
                self.at += 1
            if possessive:
                ways = _Ways()
            elif most is None or most > SMALL:
                if ways.varies or ways.repeats:
                    raise ValueError(
                        f"which at place {start} repeats without a small bound what itself matches"
                        " in several ways"
                    )
                ways = _Ways(1, True)
            else:
                ways = _Ways(ways.repeats * most, ways.varies or least != most)
        return ways

    def atom(self, depth: int) -> _Ways:
        text, start = self.text, self.at
        match text[start]:
            case "(":
                return self.group(depth)
            case "[":
                self.character_class(depth)
                return _Ways()
            case "\\":
                return self.escape()
            case letter:
                self.at += 1
                return _Ways(letter=None if letter in ".^$" else letter)

    def group(self, depth: int) -> _Ways:
        start = self.at
        self.at += 1
        kind = ""
        if self.text[self.at : self.at + 1] == "?":
            match = _GROUP.match(self.text, self.at)
            if match is None:
                raise ValueError(
                    f"whose group at place {start} is of a kind that is not known here"
                )
            kind, self.at = match[0], match.end()
            if kind == "?#":
                self.at = self.text.find(")", self.at)
                if self.at < 0:
                    raise ValueError(f"whose comment at place {start} does not end")
                self.at += 1
                return _Ways()
            if kind.endswith(")"):
                return _Ways()  # (?i): options for what follows
        ways = self.alternatives(depth + 1)
        if self.text[self.at : self.at + 1] != ")":
            raise ValueError(f"whose ( at place {start} is not closed")
        self.at += 1
        if kind == "?>":
            return _Ways()
        # What is looked at is matched in one way, once it is; on its way it counts.
        return _Ways(ways.repeats) if kind in ("?=", "?!", "?<=", "?<!") else ways

    def character_class(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"which is nested deeper than {MAX_DEPTH}")
        start = self.at
        self.at += 2 if self.text[start + 1 : start + 2] == "^" else 1
        first = True
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == "]" and not first:
                self.at += 1
                return
            first = False
            if self.text.startswith("[:", self.at) and (end := self.text.find(":]", self.at)) > 0:
                self.at = end + 2
            elif letter == "[":
                self.character_class(depth + 1)
            elif letter == "\\":
                self.escape()
            else:
                self.at += 1
        raise ValueError(f"whose [ at place {start} is not closed")

    def escape(self) -> _Ways:
        if match := _CODE.match(self.text, self.at):
            self.at = match.end()
            return _Ways()
        code = self.text[self.at + 1 : self.at + 2]
        if not code or code in "123456789kgXR" or code in "pP":
            raise ValueError(
                f"whose \\{code} at place {self.at} refers to what was matched or is not known here"
            )
        self.at += 2
        return _Ways(letter=None if code.isalnum() else code)


def _bounds(match: re.Match[str]) -> tuple[int, int | None]:
    """Return (least, most) of a quantifier; None: no bound."""
    if match[0] in "*+?":
        return (match[0] == "+", 1 if match[0] == "?" else None)
    low, comma, high = match[1], match[2], match[3]
    if not low and not high:
        return 1, 1  # {} and {,} are plain characters
    return int(low or 0), (int(high) if high else None) if comma else int(low)
