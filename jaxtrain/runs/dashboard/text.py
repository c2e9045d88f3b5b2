"""Untrusted text in the cells of a terminal: one line, cut, without what a terminal would obey."""

import re

from rich.cells import cell_len, set_cell_size

from jaxtrain.runs.console import format_number
from jaxtrain.text_safety import escape_control_chars

MAX_CHARACTERS = 20_000
"""Characters of an untrusted text that are read for one line."""


def flat(text: object) -> str:
    """A text of one line: spaces for line ends and tabs, nothing that a terminal would obey."""
    return re.sub(r"\s+", " ", escape_control_chars(str(text)[:MAX_CHARACTERS])).strip()


def cut_middle(text: str, width: int) -> str:
    """Return a text in at most `width` cells: its first third and its end, which
    distinguish long names."""
    if cell_len(text) <= width:
        return text
    third = max((width - 1) // 3, 0)
    head, tail = text[:third], text[-width:]
    while cell_len(head) > third:
        head = head[:-1]
    while tail and cell_len(head) + cell_len(tail) > width - 1:
        head, tail = (head, tail[1:]) if len(tail) > 1 or not head else ("", tail)
    return f"{head}…{tail}" if width > 0 else ""


def fit(text: str, width: int) -> str:
    """A text of exactly `width` cells: cut with an ellipsis, or filled with spaces."""
    if cell_len(text) <= width:
        return set_cell_size(text, max(width, 0))
    return set_cell_size(text[: max(width, 1)], max(width - 1, 0)) + "…" * (width > 0)


def plain(value: float | None) -> str:
    """A value in as few characters as show it; no -0."""
    return "" if value is None else format_number(value) if value else "0"
