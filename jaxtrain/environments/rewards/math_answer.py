"""Built-in reward `math`: mathematical equality with the column's answer, by math-verify."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from jaxtrain.environments.rewards.texts import Completion, column, text_of, without_thinking
from jaxtrain.errors import UserError

PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}\s+[A-Za-z]{2,}")
"""Two consecutive words: a worked solution, not an expression."""
GSM8K = re.compile(r"####\s*(\S[^\n]*?)\s*\Z")
"""The last line of GSM8K's solutions."""


def math(
    completions: Sequence[Completion], column_name: str = "answer", **columns: Sequence[Any]
) -> list[float | None]:
    """Score 1 if the final answer equals the gold answer, else 0; None if gold cannot be parsed.

    Gold may be a bare expression, LaTeX, or a worked solution, also with GSM8K's "#### 42".
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise UserError(
            "reward 'math' needs the package math-verify: pip install 'jaxtrain[rewards]'"
        ) from None
    # It warns that nothing ends a call that hangs; the caller's hard timeout does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answers = column(columns, column_name, "math")

    def read(text: str) -> list[Any]:
        # math-verify's own timeout works in main threads only.
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def read_gold(answer: Any) -> list[Any]:
        text = str(answer).rsplit("####", 1)[-1].strip()
        marked = "$" in text.replace("\\$", "") or "boxed" in text or PROSE.search(text)
        return read(text) if marked else read(rf"\boxed{{{text}}}") or read(text)

    gold: dict[str, list[Any]] = {}
    scores: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        key = str(answer)
        if key not in gold:
            gold[key] = read_gold(answer)
        text = without_thinking(text_of(completion))
        line = GSM8K.search(text)  # whose solutions may end in a sentence before it
        final_answer = read(line[1] if line and "boxed" not in text else text)
        equal = bool(gold[key]) and verify(gold[key], final_answer, timeout_seconds=None)
        scores.append(float(equal) if gold[key] else None)
    return scores
