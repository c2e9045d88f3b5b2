"""Format of a model's images: how a picture becomes segments of patches, and the text around them.

The settings are those of a Hugging Face folder: `preprocessor_config.json`, or `image_processor` of
`processor_config.json`, and the patch sizes of `config.json`. Each family is a module beside this
one with a class of `ImageFormat`.
"""

import functools
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from jaxtrain.data.images.markers import Messages, has_pictures, render_pictures
from jaxtrain.errors import UserError
from jaxtrain.safe_io import parse_json, read_text

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FAMILIES = {
    "smolvlm": "smolvlm:TiledFormat",
    "idefics3": "smolvlm:TiledFormat",
    "gemma3": "gemma:SquareFormat",
    "gemma4": "gemma:BudgetFormat",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "qwen:WholeFormat"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen:WholeFormat"),
}
"""{model_type: module:class} of the families whose images are read."""
MAX_SETTINGS = 1 << 20
"""Bytes of a folder's JSON file."""
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Numbers of filters in Pillow and in the folders."""


class FormatSource(NamedTuple):
    """Everything that says what the images of a model look like."""

    config: Mapping[str, Any]
    """Keys of config.json."""
    settings: Mapping[str, Any] | None
    """Keys of the image processor; None for a model that config alone describes."""
    tokenizer: Any
    folder: str
    """Name of the folder, for messages."""

    @property
    def vision(self) -> Mapping[str, Any]:
        """Keys of the tower."""
        return self.config.get("vision_config") or {}


class Patches(NamedTuple):
    """Patches of a picture, segment by segment."""

    pixels: np.ndarray
    """uint8 [n, 3 p p]."""
    since: np.ndarray
    """int32 [n]: first patch of the segment, and so on as in batch.Images."""
    until: np.ndarray
    row_col: np.ndarray
    grid: np.ndarray


@dataclass(frozen=True)
class ImageFormat(ABC):
    """Pictures and placeholders of one model. Picklable."""

    served: ClassVar[bool] = True
    """False if vLLM would read other tokens or pixels than the trainer."""
    placeholder: str
    """What the chat template writes for an image; a control token."""
    token: int
    """Id of the token that stands for one feature."""
    patch: int
    """p, pixels of a patch's side."""
    merge: int
    """m: m * m patches become one feature."""
    rescale: float
    """Factor of pixels' values."""
    mean: tuple[float, float, float]
    """Of each channel, as the next one for normalization."""
    std: tuple[float, float, float]
    resample: int
    """Pillow's number of the filter that resizes pictures."""

    @classmethod
    @abstractmethod
    def read(cls, source: "FormatSource") -> "ImageFormat":
        """Read the settings of a model; UserError for those that are not followed. Without any,
        images get about the size that the tower takes."""

    @functools.cached_property
    def values(self) -> np.ndarray:
        """float32 [256, 3]: what the tower reads for each value of a pixel, by channel, to the bit
        what transformers computes for the pixel."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        return (scaled[:, None] - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)

    @abstractmethod
    def count(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the patches and features of a picture (width, height)."""

    @abstractmethod
    def expand(self, size: tuple[int, int]) -> str:
        """Return the text of a picture, with a placeholder for each feature."""

    @property
    def feature_text(self) -> str:
        """Text of `token`, with which `expand` writes each feature."""
        return self.placeholder

    def around(self, size: tuple[int, int]) -> tuple[str, str]:
        """Return the texts before the first and behind the last placeholder of a picture, without
        which it is not whole."""
        text = self.expand(size)
        return text.partition(self.placeholder)[0], text.rpartition(self.placeholder)[2]

    def resize(self, picture: "Picture") -> "Picture":
        """Return the picture at the size from which `segments` are cut, where resizing it again
        changes nothing."""
        return picture

    @abstractmethod
    def segments(self, picture: "Picture") -> list[np.ndarray]:
        """Return the resized pictures uint8 [height, width, 3] that the tower reads one by one."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the family's keys of preprocessor_config.json, as `read_format` and transformers
        take them."""

    def write(self, folder: Path) -> None:
        """Write preprocessor_config.json into a folder."""
        applied = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        settings = {
            **dict.fromkeys(applied, True),
            "rescale_factor": self.rescale,
            "image_mean": self.mean,
            "image_std": self.std,
            "resample": self.resample,
            **self.settings(),
        }
        text = json.dumps(settings, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")

    def has_pictures(self, messages: Messages) -> bool:
        """Return True if any message holds an image."""
        return has_pictures(messages)

    def render(self, messages: Messages, render: Callable[[Messages], str]) -> str:
        """Render messages with images: see markers.render_pictures."""
        return render_pictures(messages, render, self.placeholder, self.expand)

    def cut(self, picture: "Picture") -> Patches:
        """Cut a picture in RGB into patches."""
        parts = [self._cut_segment(pixels) for pixels in self.segments(picture)]
        starts = np.cumsum([0, *(len(part.pixels) for part in parts)]).astype(np.int32)
        moved = [
            part._replace(since=part.since + start, until=part.until + start)
            for part, start in zip(parts, starts, strict=False)
        ]
        return Patches(*(np.concatenate(arrays) for arrays in zip(*moved, strict=True)))

    def _cut_segment(self, pixels: np.ndarray) -> Patches:
        """Cut a segment into patches, block by block of m * m."""
        p, m = self.patch, self.merge
        height, width, _ = pixels.shape
        rows, cols = height // p, width // p
        blocks = pixels[: rows * p, : cols * p].reshape(rows // m, m, p, cols // m, m, p, 3)
        flat = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * cols, 3 * p * p)
        places = np.moveaxis(np.indices((rows, cols), np.int32), 0, -1)
        places = places.reshape(rows // m, m, cols // m, m, 2).transpose(0, 2, 1, 3, 4)
        n = rows * cols
        return Patches(
            np.ascontiguousarray(flat),
            np.zeros(n, np.int32),
            np.full(n, n, np.int32),
            np.ascontiguousarray(places.reshape(n, 2)),
            np.broadcast_to(np.array([rows, cols], np.int32), (n, 2)),
        )


class ResizedFormat(ImageFormat):
    """A format whose pictures stay whole: each is resized by its shape, and every patch of the
    result is read."""

    @abstractmethod
    def fit(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height of a resized picture."""

    @override
    def count(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = self.fit(size)
        patches = (width // self.patch) * (height // self.patch)
        return patches, patches // self.merge**2


def read_format(
    folder: Path | None, config: Mapping[str, Any], tokenizer: Any
) -> ImageFormat | None:
    """Read the format of a model's images; None for a family whose images are not read, and, with
    a line on stderr, for a folder without settings.

    folder: the model's; None for one that config alone describes, whose images are resized to what
    its tower takes. Raises UserError for settings that cannot be followed.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    settings = read_settings(folder) if folder is not None else None
    if settings == {}:  # no reason to refuse a run on text alone
        print(
            f"{folder} has no preprocessor_config.json or processor_config.json, which says how its"
            " images are resized: rows with images are left out",
            file=sys.stderr,
            flush=True,
        )
        return None
    module, _, name = family.partition(":")
    kind = getattr(importlib.import_module(f"jaxtrain.data.images.{module}"), name)
    source = str(folder or "model.architecture")
    try:
        return kind.read(FormatSource(config, settings, tokenizer, source))
    except UserError:
        raise
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{source}: a setting of its image processor has a value of the wrong type ({error});"
            " take preprocessor_config.json from where the model was published"
        ) from None


def read_settings(folder: Path) -> Mapping[str, Any]:
    """Read the settings of a folder's image processor; {} if it has none."""
    processor = _read(folder / "processor_config.json").get("image_processor")
    return processor if isinstance(processor, dict) else _read(folder / "preprocessor_config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path, MAX_SETTINGS))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object")
    return value


def read_scale(
    settings: Mapping[str, Any], folder: str
) -> tuple[float, tuple[float, float, float], tuple[float, float, float]]:
    """Return rescale_factor, image_mean and image_std of settings that apply them."""
    require(settings, {"do_convert_rgb": True, "do_rescale": True, "do_normalize": True}, folder)
    mean, std = (
        tuple(float(number) for number in settings.get(name) or (0.5, 0.5, 0.5))
        for name in ("image_mean", "image_std")
    )
    if len(mean) != 3 or len(std) != 3 or not all(std):
        raise UserError(f"{folder}: image_mean and image_std need a number for each channel")
    return float(settings.get("rescale_factor", 1 / 255)), mean, std


def require(settings: Mapping[str, Any], allowed: Mapping[str, Any], folder: str) -> None:
    """Raise UserError for a setting with another value than the only one that is followed."""
    for key, value in allowed.items():
        if settings.get(key, value) != value:
            raise UserError(
                f"{folder}: its image processor sets {key} to {json.dumps(settings[key])}; only"
                f" {json.dumps(value)} is read"
            )


def require_token(tokenizer: Any, text: str, folder: str, expected: int | None = None) -> int:
    """Return the id of a placeholder; UserError unless it is a control token, and the one that
    config.json names, if it does."""
    from jaxtrain.data.chat.control_tokens import find_control

    token = find_control(tokenizer).get(text)
    if token is None:
        raise UserError(
            f"the tokenizer of {folder} has no control token {text!r}, which stands for an image"
        )
    if expected not in (None, token):
        raise UserError(
            f"{folder}: image_token_id is {expected}, but the tokenizer's {text!r} is {token}"
        )
    return token
