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


def cut_left(text: str, width: int) -> str:
    """Return the end of a text in at most `width` cells, which distinguishes long names."""
    if cell_len(text) <= width:
        return text
    text = text[-width:]
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return "…" + text if width > 0 else ""


def fit(text: str, width: int) -> str:
    """A text of exactly `width` cells: cut with an ellipsis, or filled with spaces."""
    if cell_len(text) <= width:
        return set_cell_size(text, max(width, 0))
    return set_cell_size(text[: max(width, 1)], max(width - 1, 0)) + "…" * (width > 0)


def plain(value: float | None) -> str:
    """A value in as few characters as show it; no -0."""
    return "" if value is None else format_number(value) if value else "0"
