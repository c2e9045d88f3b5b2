"""Generated pictures with questions about them: squares, discs and triangles of four colors.

    count   How many red squares are there?           0 to max_count, equally often
    color   Which color is the disc?                  one shape of that kind, others around it
    place   Where is the blue triangle?               top left, top right, bottom left, bottom right

A picture is `size` pixels wide and high and has 4 x 4 places. Row i depends only on the options,
the split and i. It is a chat with one picture, a PPM file in the row itself, and has the columns
`answer` and `question` besides.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

COLORS = {
    "red": (220, 30, 30),
    "green": (20, 160, 40),
    "blue": (30, 60, 220),
    "yellow": (230, 200, 20),
}
SHAPES = ("square", "disc", "triangle")
QUESTIONS = ("count", "color", "place")
SPLITS = ("train", "test")
SIDE = 4
"""Places in each direction."""
MAX_ROWS = 2**24
BOUNDS = {"num_rows": (1, MAX_ROWS), "seed": (0, 2**62), "size": (16, 1024), "max_count": (1, 8)}


@dataclass(frozen=True)
class ShapeRows:
    """Rows with messages, answer and question."""

    num_rows: int = 20_000
    seed: int = 0
    split: str = "train"
    size: int = 48
    """Pixels of a picture's side."""
    max_count: int = 4
    questions: tuple[str, ...] = QUESTIONS

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(
                f"builtin:shapes has no split {self.split!r}: choose one of {', '.join(SPLITS)}"
            )
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise UserError(
                    f"builtin:shapes: {name} is {show(value)}, not a whole number between {low} and"
                    f" {high}"
                )
        questions = self.questions
        if (
            not isinstance(questions, list | tuple)
            or not questions
            or not set(questions) <= set(QUESTIONS)
        ):
            raise UserError(
                f"builtin:shapes: questions is {show(questions)}; it lists some of"
                f" {', '.join(QUESTIONS)}"
            )

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.num_rows))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Build a row."""
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        chance = random.Random(f"{self.seed} {self.split} {index} shapes")
        question = chance.choice(self.questions)
        text, answer, drawn = getattr(self, f"_{question}")(chance)
        picture = {"bytes": write_ppm(draw(drawn, self.size))}
        user = [{"type": "image", "image": picture}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "answer": answer, "question": question}

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"builtin:shapes {self.split} row {index}"

    def _count(self, chance: random.Random) -> tuple[str, str, "Drawn"]:
        color, shape = target = chance.choice([*COLORS]), chance.choice(SHAPES)
        number = chance.randint(0, self.max_count)
        distractors = [
            (c, s)
            for c in COLORS
            for s in SHAPES
            if (c, s) != target and (c == color or s == shape)
        ]
        shown = [target] * number + chance.choices(distractors, k=chance.randint(0, 4))
        return f"How many {color} {shape}s are there?", str(number), _arrange(chance, shown)

    def _color(self, chance: random.Random) -> tuple[str, str, "Drawn"]:
        color, shape = chance.choice([*COLORS]), chance.choice(SHAPES)
        distractors = [(c, s) for c in COLORS for s in SHAPES if s != shape]
        shown = [(color, shape), *chance.choices(distractors, k=chance.randint(0, 5))]
        return f"Which color is the {shape}?", color, _arrange(chance, shown)

    def _place(self, chance: random.Random) -> tuple[str, str, "Drawn"]:
        color, shape = target = chance.choice([*COLORS]), chance.choice(SHAPES)
        distractors = [(c, s) for c in COLORS for s in SHAPES if (c, s) != target]
        drawn = _arrange(chance, [target, *chance.choices(distractors, k=chance.randint(0, 5))])
        (row, col), *_ = drawn
        corner = (
            f"{'top' if row < SIDE // 2 else 'bottom'} {'left' if col < SIDE // 2 else 'right'}"
        )
        return f"Where is the {color} {shape}?", corner, drawn


Drawn = dict[tuple[int, int], tuple[str, str]]
"""{(row, column): (color, shape)}."""


def _arrange(chance: random.Random, shown: list[tuple[str, str]]) -> Drawn:
    places = chance.sample([(row, col) for row in range(SIDE) for col in range(SIDE)], len(shown))
    return dict(zip(places, shown, strict=True))


def draw(drawn: Drawn, size: int) -> np.ndarray:
    """Draw shapes on white: uint8 [size, size, 3]."""
    pixels = np.full((size, size, 3), 255, np.uint8)
    cell = size // SIDE
    # Coordinates of a place's pixels, -1 to 1 over the shape, which leaves a border around it.
    y, x = (np.indices((cell, cell)) - (cell - 1) / 2) / (cell * 0.42)
    masks = {
        "square": (abs(x) <= 0.9) & (abs(y) <= 0.9),
        "disc": x**2 + y**2 <= 1,
        "triangle": (y <= 0.9) & (abs(x) <= (y + 1) / 2),
    }
    for (row, col), (color, shape) in drawn.items():
        area = pixels[row * cell : (row + 1) * cell, col * cell : (col + 1) * cell]
        area[masks[shape]] = COLORS[color]
    return pixels


def write_ppm(pixels: np.ndarray) -> bytes:
    """Return a PPM file of uint8 [height, width, 3], which has the same bytes everywhere."""
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
