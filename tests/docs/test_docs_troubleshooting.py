"""The page about messages quotes messages that exist."""

import ast
import re

from tests.docs.blocks import ROOT

OF_OTHERS = {"RESOURCE_EXHAUSTED", "stopped: ..."}
"""Messages of XLA, and the head of all messages with exit code 1."""


def test_quoted_messages_exist():
    texts = [
        text for path in (ROOT / "jaxtrain").rglob("*.py") for text in list_texts(path.read_text())
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, flags=re.M)
    assert len(quoted) > 20
    for message in quoted:
        parts = message.split("...")
        pattern = re.compile(".*?".join(map(re.escape, parts)))
        holders = (text for text in texts if parts[0] in text)
        assert message in OF_OTHERS or any(map(pattern.search, holders)), (
            f"nothing prints {message!r}"
        )


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
