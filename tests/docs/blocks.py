"""The code blocks of the pages people read: README.md and docs/."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = {"docs/reference/tree.md", "docs/reference/config.md", "docs/command_line.md"}
SHELL = ("", "sh", "bash", "{code-cell}")


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    language: str
    tags: str
    """What stands behind the language, such as {test}."""
    text: str

    @property
    def place(self) -> str:
        """page:line."""
        return f"{self.page}:{self.line}"


def list_pages() -> list[Path]:
    """README and every page of docs/ that people have written."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in pages if str(page.relative_to(ROOT)) not in GENERATED]


def list_blocks() -> Iterator[Block]:
    """Return every code block in order."""
    for page in list_pages():
        name = str(page.relative_to(ROOT))
        found = re.finditer(
            r"^( *)```(\S*) *([^\n]*)\n(.*?)^\1```", page.read_text(), flags=re.M | re.S
        )
        for block in found:
            line = page.read_text()[: block.start()].count("\n") + 1
            yield Block(name, line, block[2], block[3], block[4])


def list_inline() -> Iterator[Block]:
    """Trainings within sentences and tables, such as those of the README's figures."""
    for page in list_pages():
        text = page.read_text()
        ours = r"`((?:jaxtrain|python -m jaxtrain\.main) --config configs/[^`\[\]]+)`"
        for found in re.finditer(ours, text):
            line = text[: found.start()].count("\n") + 1
            yield Block(str(page.relative_to(ROOT)), line, "sh", "", " ".join(found[1].split()))


def list_commands(block: Block) -> Iterator[list[str]]:
    """The command lines of ours in a block of shell, each as words behind `jaxtrain`."""
    if block.language not in SHELL:
        return
    for line in re.sub(r" *\\\n\s*", " ", block.text).splitlines():
        line = re.sub(r"^\s*([$!]\s*)?(\w+=\S+\s+)*(nohup\s+)?", "", line)
        ours = re.match(r"(?:\S*/)?jaxtrain\s|\S*python\S*\s+-m\s+jaxtrain\.main\s", line + " ")
        if ours and "..." not in re.sub(r'"[^"]*"', "", line.partition("#")[0]):
            words = shlex.split(line[ours.end() :], comments=True)
            yield [word for word in words if word not in ("&", ">", "|")]
