"""Handwritten digits as questions about pictures: the 1,797 of scikit-learn, 8 x 8 pixels each.

They are the test set of Optical Recognition of Handwritten Digits (Alpaydin and Kaynak 1998, UCI
Machine Learning Repository, doi:10.24432/C50P49). Split train has the first 1,500, test the last
297. A row is a chat with one picture, a PPM file in the row itself, and has the column `answer`
besides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxtrain.data.sources.shapes import write_ppm
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

SIDE = 8
"""Pixels of a digit's side."""
MAX_INK = 16
"""Largest value of a pixel; 0 is paper."""
SPLITS = {"train": slice(0, 1500), "test": slice(1500, 1797)}
QUESTION = "Which digit is this?"


@dataclass(frozen=True)
class DigitRows:
    """Rows with messages and answer."""

    num_rows: int | None = None
    """The first rows of the split; None: all."""
    split: str = "train"
    size: int = 48
    """Pixels of a picture's side, a multiple of 8: pixels are repeated."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(
                f"builtin:digits has no split {self.split!r}: choose one of {', '.join(SPLITS)}"
            )
        if type(self.size) is not int or not SIDE <= self.size <= 1024 or self.size % SIDE:
            raise UserError(
                f"builtin:digits: size is {show(self.size)}, not a multiple of {SIDE} up to 1024"
            )
        rows = SPLITS[self.split]
        most = rows.stop - rows.start
        count = self.num_rows
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise UserError(
                f"builtin:digits: num_rows is {show(count)}; split {self.split} has 1 to {most}"
            )

    @cached_property
    def _digits(self) -> tuple[np.ndarray, np.ndarray]:
        """Ink float64 [n, 8, 8] and the digits int64 [n] of the split."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError(
                "builtin:digits needs scikit-learn, which is not installed:"
                ' pip install "jaxtrain[digits]"'
            ) from None
        data: Any = load_digits()
        images, targets = (part[SPLITS[self.split]] for part in (data.images, data.target))
        return images[: self.num_rows], targets[: self.num_rows]

    def __len__(self) -> int:
        return len(self._digits[1])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Build a row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        images, targets = self._digits
        gray = 255 - np.rint(images[index] * 255 / MAX_INK).astype(np.uint8)
        gray = gray.repeat(self.size // SIDE, 0).repeat(self.size // SIDE, 1)
        picture = {"bytes": write_ppm(np.repeat(gray[:, :, None], 3, axis=2))}
        user = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
        answer = str(targets[index])
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "answer": answer}

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"builtin:digits {self.split} row {index}"
