"""The names of docs/metrics.md, for tests of runs: what a run logged must have a row there."""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
ALWAYS = {"step", "time"}
PLACES = {"NAME": ".+", "SET": "[^/]+", "POLICY": "[^/]+", "REASON": ".+", "N": "[0-9]+"}
"""What stands for other words in the names of rows."""


@cache
def list_names() -> list[str]:
    """Names and patterns in the first column of all tables, as they are written."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@cache
def _pattern() -> re.Pattern[str]:
    words = "|".join(PLACES)
    forms = [
        "".join(PLACES.get(part, re.escape(part)) for part in re.split(rf"\b({words})\b", name))
        for name in list_names()
    ]
    return re.compile("|".join(forms))


def is_known(name: str) -> bool:
    """Return whether a row has this name, such as loss or, of a held-out set, eval/1/NAME."""
    bare = re.sub(r"^eval/([0-9]+/)?", "", name)
    return name in ALWAYS or any(_pattern().fullmatch(entry) for entry in (name, bare))


def require_rows(folder: Path, besides: Iterable[str] = ()) -> None:
    """Fail where metrics.jsonl of a run has a name without a row in docs/metrics.md, but for those
    `besides`: a test's own."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)} - set(besides)
    unknown = sorted(name for name in names if not is_known(name))
    assert not unknown, f"docs/metrics.md has no row for {unknown}: add one"
