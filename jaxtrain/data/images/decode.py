"""Untrusted bytes to upright RGB pictures, by Pillow within bounds.

A picture is what transformers' image processors get: turned by its EXIF orientation, the first
frame of an animation, transparency over white, then 8 bits of red, green and blue.
"""

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.errors import UserError
from jaxtrain.safe_io import read_bytes
from jaxtrain.text_safety import shorten

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_BYTES = 1 << 26
"""Limit of a file."""
MAX_PIXELS = 1 << 26
"""Limit of width times height, of which the header is asked before anything is decoded."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read; some others of Pillow's start programs or are rarely tested."""
THUMBNAIL = 96
"""Pixels of a thumbnail's longer side."""


def read_file(path: Path) -> bytes:
    """Return the bytes of a file; raises MalformedRow with a short reason."""
    try:
        return read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise MalformedRow("an image is absent") from None
    except ValueError as error:
        raise MalformedRow(f"an image {error}") from None
    except OSError as error:
        raise MalformedRow(f"an image cannot be read: {error.strerror or error}") from None


def measure(data: bytes) -> tuple[int, int]:
    """Return the width and height of an upright picture; raises MalformedRow unless all of it can
    be decoded.

    A JPEG is decoded at an eighth of its size, which finds missing parts at a fraction of the time.
    """
    with _open(data) as picture:
        width, height = picture.size
        picture.draft("RGB", (max(width // 8, 1), max(height // 8, 1)))
        _load(picture)
        try:
            turned = picture.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        except Exception as error:  # a parser of untrusted bytes may raise anything
            raise _unreadable(error) from None
    return (height, width) if turned else (width, height)


def decode(data: bytes, side: int | None = None) -> "Picture":
    """Return a picture in RGB; raises MalformedRow. side: pixels that it needs along each side,
    which make a large JPEG cheaper to decode; None: all of them."""
    with _open(data) as picture:
        from PIL import Image, ImageOps  # after _open, which says how to install it

        if side is not None:
            picture.draft("RGB", (side, side))
        _load(picture)
        try:
            upright = ImageOps.exif_transpose(picture)
            if "A" in upright.getbands() or upright.info.get("transparency") is not None:
                layer = upright.convert("RGBA")
                white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                upright = Image.alpha_composite(white, layer)
            return upright.convert("RGB")
        except Exception as error:  # a parser of untrusted bytes may raise anything
            raise _unreadable(error) from None


def make_thumbnail(source: Path | bytes) -> str | None:
    """Return a JPEG of at most THUMBNAIL x THUMBNAIL pixels as a data URL; None for a file that can
    no longer be read."""
    try:
        data = source if isinstance(source, bytes) else read_file(source)
        picture = decode(data, THUMBNAIL)
    except MalformedRow:
        return None
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _open(data: bytes) -> "Picture":
    """Open a picture and check its size, without decoding it."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            'images need Pillow, which is not installed: pip install "jaxtrain[vision]"'
        ) from None
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise MalformedRow(TOO_LARGE) from None
    except Image.UnidentifiedImageError:
        raise MalformedRow(f"an image is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # a parser of untrusted bytes may raise anything
        raise _unreadable(error) from None
    if picture.width * picture.height > MAX_PIXELS:
        picture.close()
        raise MalformedRow(TOO_LARGE)
    if not picture.width or not picture.height:
        raise MalformedRow("an image has no pixels")
    return picture


TOO_LARGE = f"an image has more than {MAX_PIXELS:,} pixels"


def _load(picture: "Picture") -> None:
    try:
        picture.load()
    except Exception as error:  # a parser of untrusted bytes may raise anything
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> MalformedRow:
    reason = shorten(str(error).partition("\n")[0], 80) or type(error).__name__
    return MalformedRow(f"an image cannot be decoded: {reason}")
