"""Make untrusted text safe to show: no control characters, and never more than a page.

All untrusted text that is printed, logged or put into a message passes through here: model answers,
rows, file names, server replies. A terminal would execute escape sequences in them, and marks that
reverse the direction of writing would disguise the content.
"""

import base64
import re
import reprlib
from typing import Any
from urllib.parse import unquote, urlsplit

MESSAGE = 1_900
"""Characters of a message; a prefix and a final line still fit into 2,000."""

UNSEEN = re.compile(
    r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e"
    r"\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""C0 and C1 except tab and line ends, bidirectional marks, lone surrogates."""


HIDDEN = "<not-saved>"
"""What stands in a saved config for a secret."""
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,2})([^/\s@]+)@")
_QUERY = re.compile(
    r"([?&](?:api[_-]?key|key|token|access_token|auth|password|secret|sig|signature)=)([^&#\s]+)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(\b\w*(?:api_?key|password|passwd|secret|authorization|access_token|hf_token)['\"]?"
    r"\s*[=:]\s*\\?['\"])([^'\"]+)",
    re.IGNORECASE,
)
REFERENCE = re.compile(r"(?:\$\{(\w+)\}|\$(\w+)|env:(\w+))\Z")


def redact_text(text: str) -> str:
    """Return a text with HIDDEN for the users, passwords and keys of URLs in it, and for the quoted
    values of keys like api_key."""
    text = URL.sub(lambda match: f"{match[1]}{_hide_value(match[2])}@", text)
    for pattern in (_QUERY, _ASSIGNED):
        text = pattern.sub(lambda match: f"{match[1]}{_hide_value(match[2])}", text)
    return text


def split_login(url: str) -> tuple[str, str | None]:
    """Return (a URL without the user and password in it, the value of an Authorization header that
    they make; None without any)."""
    base = urlsplit(url)
    login, separator, host = base.netloc.rpartition("@")
    if not separator:
        return url, None
    user, _, password = login.partition(":")
    encoded = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return base._replace(netloc=host).geturl(), f"Basic {encoded}"


def _hide_value(value: str) -> str:
    return value if REFERENCE.match(value) else HIDDEN


def escape_control_chars(text: str) -> str:
    """Return the text with control characters escaped, as \\x1b; line ends become "\\n"."""
    return UNSEEN.sub(_escape_match, text).replace("\r\n", "\n")


def shorten(text: str, longest: int = MESSAGE) -> str:
    """Cut the middle out of a text longer than `longest` characters and count what is missing. (The
    end stays, because a message ends with what to do.)"""
    if len(text) <= longest:
        return text
    tail = longest // 4
    head = longest - tail - 48
    return f"{text[:head]} ... ({len(text) - head - tail:,} characters left out) ... {text[-tail:]}"


def show(value: Any, longest: int = 100) -> str:
    """Return a value for a message: its repr if that is short, else its beginning and its size."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        if len(value) <= longest:
            return escape_control_chars(repr(value))
        start = escape_control_chars(repr(value[: longest // 2]))
        return f"{start}... (a text of {len(value):,} characters)"
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    text = escape_control_chars(_SHORT.repr(value))
    if len(text) <= longest:
        return text
    size = f" of {len(value):,}" if hasattr(value, "__len__") else ""
    return f"{text[: longest // 2]}... ({name_type(value)}{size})"


def name_type(value: Any) -> str:
    """Return a readable name for the type of a value from a file: "a list", "a text", "null"."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        tuple: "a list",
        dict: "a table",
        type(None): "null",
        bytes: "bytes",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _escape_match(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class _Short(reprlib.Repr):
    """repr of a value of any size in little time and space."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 6, 6, 6
        self.maxstring = self.maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python itself refuses to write out more than 4,300 digits.
        if abs(x) < 10**40:
            return repr(x)
        return f"{'-' if x < 0 else ''}1e{int((abs(x).bit_length() - 1) * 0.30103)} or more"


_SHORT = _Short()
