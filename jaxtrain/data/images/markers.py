"""Markers of images in the contents of messages, and how a chat template is given these.

While a row is read, an image is a marker in the text of its message, which holds its hash and size:
messages with different images differ as their texts do, and all that handles texts handles images.
The template gets parts of type "image"; what it writes for one becomes the text of that image.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.huggingface.chat_template import TemplateFailed

PICTURE = f"\ufdd0{secrets.token_hex(8)}:"
"""Beginning of a marker, which no text can spell because nobody can guess it."""
PICTURES = re.compile(rf"{PICTURE}[0-9a-f]*:(\d+)x(\d+)\ufdd1")

Messages = Sequence[Mapping[str, Any]]


def mark_picture(key: str, size: tuple[int, int]) -> str:
    """Return the marker of an image. key: its hash; size: its width and height."""
    return f"{PICTURE}{key}:{size[0]}x{size[1]}\ufdd1"


def show_pictures(text: str) -> str:
    """Return a text for people, with the size of each image in place of its marker."""
    return PICTURES.sub(r"[image \1x\2]", text)


def has_pictures(messages: Messages) -> bool:
    """Return True if any message holds an image."""
    return any(PICTURE in (message.get("content") or "") for message in messages)


def render_pictures(
    messages: Messages,
    render: Callable[[Messages], str],
    placeholder: str,
    expand: Callable[[tuple[int, int]], str],
) -> str:
    """Render messages with images.

    render: renders messages whose contents are texts or lists of parts. placeholder: what the
    template writes for an image. expand: makes the text of one of its size. Raises TemplateFailed
    unless the template writes all images.
    """
    sizes, shown = [], []
    for message in messages:
        content, start, parts = message.get("content") or "", 0, []
        for match in PICTURES.finditer(content):
            parts += [_text(content[start : match.start()]), {"type": "image"}]
            sizes.append((int(match[1]), int(match[2])))
            start = match.end()
        parts = [part for part in [*parts, _text(content[start:])] if part.get("text") != ""]
        shown.append({**message, "content": parts} if start else message)
    first, *later = render(shown).split(placeholder)
    if len(later) != len(sizes):
        raise TemplateFailed(
            f"chat template: {len(sizes)} images, but it writes {len(later)} placeholders"
        )
    return first + "".join(expand(size) + text for size, text in zip(sizes, later, strict=True))


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
