"""Lines of a screen: cut and filled to a number of cells, framed, never obeying what is in them."""

import re
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from jaxtrain.text_safety import escape_control_chars

MOST_CHARACTERS = 20_000
"""Of one text of a stranger that is looked at for one screen."""


def flat(text: object) -> str:
    """A text of one line: spaces for line ends and tabs, nothing that a terminal would obey."""
    return re.sub(r"\s+", " ", escape_control_chars(str(text)[:MOST_CHARACTERS])).strip()


def fit(line: Text | str, width: int, style: str = "") -> Text:
    """A line of exactly `width` cells: cut with an ellipsis, or filled with spaces."""
    width = max(width, 0)
    text = line.copy() if isinstance(line, Text) else Text(line[: 4 * width + 16], style=style)
    if cell_len(text.plain) > width:
        text.truncate(max(width - 1, 0))
        text.append("…" if width else "")
    missing = width - cell_len(text.plain)
    if missing < 0:  # a wide character stood where the ellipsis is
        return Text(set_cell_size(text.plain, width))
    return text.append(" " * missing) if missing else text


def cut_left(text: str, width: int) -> str:
    """Return the end of a text in at most `width` cells, which distinguishes long names."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return "…" + text if width else ""


def wrap(text: str, width: int, most: int = 2000) -> list[str]:
    """A text in lines of at most `width` cells, broken at spaces where there are some; at most
    `most` lines, of which the last says how much is left out."""
    lines: list[str] = []
    width = max(width, 2)
    for line in escape_control_chars(text).expandtabs(4).split("\n"):
        while len(line) > width or cell_len(line) > width:
            end = _reach(line, width)
            space = line.rfind(" ", width // 2, end + 1)
            end = space if space > 0 else end
            lines.append(line[:end])
            line = line[end:].removeprefix(" ")
            if len(lines) > most:
                break
        lines.append(line)
        if len(lines) > most:
            return [*lines[: most - 1], f"... (a text of {len(text):,} characters)"]
    return lines


def _reach(line: str, width: int) -> int:
    """Characters of a line that fit into `width` cells."""
    end = min(len(line), width)
    while end > 1 and cell_len(line[:end]) > width:
        end -= 1
    return end


def box(
    lines: Sequence[Text | str],
    width: int,
    height: int,
    title: str = "",
    footer: str = "",
    style: str = "bright_black",
) -> list[Text]:
    """Lines in a frame of `width` x `height` cells, frame included; what is too much is cut."""
    inner = width - 2
    if inner < 1 or height < 2:
        return [Text(" " * max(width, 0)) for _ in range(max(height, 0))]
    title, footer = flat(title), flat(footer)
    top = fit(f" {title} " if title else "", min(cell_len(title) + 2 if title else 0, inner - 1))
    bottom = fit(
        f" {footer} " if footer else "", min(cell_len(footer) + 2 if footer else 0, inner - 1)
    )
    head = Text("╭─", style=style).append(top.plain, "bold")
    head.append("─" * (width - 3 - cell_len(top.plain)) + "╮", style)
    foot = Text("╰" + "─" * (width - 3 - cell_len(bottom.plain)), style=style)
    foot.append(bottom.plain, "bold").append("─╯", style)
    middle = []
    for row in range(height - 2):
        line = fit(lines[row] if row < len(lines) else "", inner)
        middle.append(Text("│", style=style).append_text(line).append("│", style))
    return [head, *middle, foot]


def beside(*parts: Sequence[Text]) -> list[Text]:
    """Blocks of lines of the same height as one, from left to right."""
    lines = []
    for row in zip(*parts, strict=True):
        line = Text()
        for part in row:
            line.append_text(part)
        lines.append(line)
    return lines


def bar(share: float | None, width: int) -> Text:
    """A share as a bar."""
    filled = 0 if share is None else round(min(max(share, 0.0), 1.0) * width)
    return Text("━" * filled, style="green").append("━" * (width - filled), "grey30")
