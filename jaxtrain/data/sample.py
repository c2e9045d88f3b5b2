"""What tokenization hands to packing: a token sequence with its loss weights, or a reason."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One tokenized example."""

    tokens: np.ndarray
    """int32 [n] token ids."""
    weights: np.ndarray
    """float32 [n] loss weight of each token; 0 is context, 1 an ordinary trained token."""
    origin: str = ""
    """Where it came from, for messages: "train.jsonl row 17"."""
    controls: int = 0
    """Control tokens that its texts spell: see control.py."""


@dataclass(frozen=True)
class Dropped:
    """An example that does not train, and why; counted, never silent."""

    reason: str
    """Short and countable: "too long", "no trained token", ..."""
    origin: str = ""
    """Where it came from, for messages."""
