"""The code blocks of the pages people read: README.md and docs/."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = ("docs/reference/", "docs/command_line.md")
SHELL = ("", "sh", "bash", "{code-cell}")


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    language: str
    tags: str
    """What stands behind the language, such as {test}."""
    text: str
    prints: tuple[str, ...] = ()
    """Lines that its commands print, of the comments `<!-- prints: ... -->` right below it."""

    @property
    def place(self) -> str:
        """page:line."""
        return f"{self.page}:{self.line}"


def list_pages() -> list[Path]:
    """README and every page of docs/ that people have written."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in pages if not str(page.relative_to(ROOT)).startswith(GENERATED)]


def list_blocks() -> Iterator[Block]:
    """Return every code block in order."""
    for page in list_pages():
        name = str(page.relative_to(ROOT))
        actual = re.finditer(
            r"^( *)```(\S*) *([^\n]*)\n(.*?)^\1```", page.read_text(), flags=re.M | re.S
        )
        for block in actual:
            line = page.read_text()[: block.start()].count("\n") + 1
            below = re.match(r"(?:\s*<!-- prints: .*? -->)*", page.read_text()[block.end() :])
            prints = re.findall(r"<!-- prints: (.*?) -->", below[0]) if below else []
            yield Block(name, line, block[2], block[3], block[4], tuple(prints))


def list_inline() -> Iterator[Block]:
    """Trainings within sentences and tables, such as those of the README's figures."""
    for page in list_pages():
        text = page.read_text()
        actual_values = r"`((?:jaxtrain|python -m jaxtrain\.main) --config configs/[^`\[\]]+)`"
        for actual in re.finditer(actual_values, text):
            line = text[: actual.start()].count("\n") + 1
            yield Block(str(page.relative_to(ROOT)), line, "sh", "", " ".join(actual[1].split()))


def list_commands(block: Block) -> Iterator[list[str]]:
    """The command lines of ours in a block of shell, each as words behind `jaxtrain`."""
    if block.language not in SHELL:
        return
    for line in re.sub(r" *\\\n\s*", " ", block.text).splitlines():
        line = re.sub(r"^\s*([$!]\s*)?(\w+=\S+\s+)*(nohup\s+)?", "", line)
        actual_values = re.match(
            r"(?:\S*/)?jaxtrain\s|\S*python\S*\s+-m\s+jaxtrain\.main\s", line + " "
        )
        if actual_values and "..." not in re.sub(r'"[^"]*"', "", line.partition("#")[0]):
            words = shlex.split(line[actual_values.end() :], comments=True)
            yield [word for word in words if word not in ("&", ">", "|")]
