"""The page about messages quotes messages that exist."""

import ast
import functools
import re

from tests.docs.blocks import ROOT

OF_OTHERS = {"RESOURCE_EXHAUSTED", "stopped: ..."}
"""Messages of XLA, and the head of all messages with exit code 1."""


def test_quoted_messages_exist():
    sources = {path: path.read_text() for path in (ROOT / "jaxtrain").rglob("*.py")}
    texts = functools.cache(lambda path: list_texts(sources[path]))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, flags=re.M)
    assert len(quoted) > 20
    for message in set(quoted) - OF_OTHERS:
        parts = message.split("...")
        pattern = re.compile(".*?".join(map(re.escape, parts)))
        # First where it is likely: most modules need not be parsed.
        starts = [part.strip()[:12] for part in parts if part.strip()]
        paths = sorted(sources, key=lambda path: -sum(start in sources[path] for start in starts))
        exists = any(pattern.search(text) for path in paths for text in texts(path))
        assert exists, f"nothing prints {message!r}"


def list_texts(source: str) -> list[str]:
    """Return every text of a module; values within one stand as {}."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return [text.replace("\n", " ") for text in texts]
