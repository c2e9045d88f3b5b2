"""Whether prompts and answers fit: the row that is trained, and the window of the model."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.errors import UserError

LOOKED_AT = 64


def some_rows(rows: Any, most: int) -> Iterator[Any]:
    """At most so many rows, evenly spread over all."""
    count = min(len(rows), most)
    return (rows[place * len(rows) // count] for place in range(count))


def measure_prompts(rows: Any, env: Any) -> list[int]:
    """Tokens of some prompts of an environment that can tell beforehand; [] for others."""
    read = getattr(env, "read", None)
    if read is None:
        return []
    found = []
    for row in some_rows(rows, LOOKED_AT):
        try:
            found.append(len(read(row)[1]))
        except UserError:  # a row that cannot be played is told, and counted, when it is played
            continue
    return found


def explain_lengths(prompts: Sequence[int], new: int, row: int, window: int, name: str) -> str:
    """A sentence about prompts of these lengths that leave no room, or too little, for `new` drawn
    tokens; empty where all fit. UserError where no answer fits behind any of them.

    row: data.sequence_len. window: the longest row of the model. name: of the dataset.
    """
    room, key = min((row, "data.sequence_len"), (window, "the longest row of the model"))
    none = sum(length >= room for length in prompts)
    short = sum(length < room < length + new for length in prompts)
    if not none + short:
        return ""
    longest = max(prompts)
    advice = (
        f"prompt and sampling.max_new_tokens ({new}) together need {longest + new} tokens there,"
        f" and {key} is {room}; raise data.sequence_len, lower sampling.max_new_tokens, or leave"
        " out long prompts"
    )
    if none == len(prompts):
        raise UserError(f"{name}: all of {len(prompts)} prompts looked at fill a row: {advice}")
    parts = [f"{none} leave no room for an answer and fail"] if none else []
    parts += [f"{short} have their answers cut off earlier, or left out"] if short else []
    return f"warning: {name}: of {len(prompts)} prompts looked at {', '.join(parts)}: {advice}"
