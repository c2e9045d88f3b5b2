"""Built-in rewards of benchmarks: a letter of several choices, and instructions that can be checked
(Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models")."""

import re
from collections.abc import Sequence
from typing import Any

from jaxtrain.environments.rewards.texts import (
    Completion,
    column,
    compile_pattern,
    text_of,
    without_thinking,
)
from jaxtrain.errors import UserError

LETTERS = (
    r"answer is:?[ *]*\$?\(?([A-J])\b",
    r"(?i:answer)[ *]*:[ *]*\$?\(?([A-J])\b",
    r"\\boxed\{(?:\\text\{)?\(?([A-J])\b",
)
"""Where a letter stands as the answer: the first pattern that occurs, at its first place."""


def choice(
    completions: Sequence[Completion],
    patterns: Sequence[str] = LETTERS,
    column_name: str = "answer",
    **columns: Sequence[Any],
) -> list[float]:
    """Score 1 if the letter that the answer names equals the column's, else 0."""
    compiled = [compile_pattern(pattern, "choice") for pattern in patterns]
    if any(pattern.groups != 1 for pattern in compiled):
        raise UserError("reward 'choice': each of options.patterns needs one group, the letter")
    answers = column(columns, column_name, "choice")
    return [
        float(find_letter(without_thinking(text_of(completion)), compiled) == str(answer).upper())
        for completion, answer in zip(completions, answers, strict=True)
    ]


def find_letter(text: str, patterns: Sequence[re.Pattern[str]]) -> str | None:
    """Return the letter that a text names as its answer; None if there is none."""
    matches = (pattern.search(text) for pattern in patterns)
    return next((match[1].upper() for match in matches if match), None)


def ifeval(
    completions: Sequence[Completion],
    level: str = "prompt",
    loose: bool = False,
    **columns: Sequence[Any],
) -> list[float]:
    """Score by the rules of IFEval, as lm-evaluation-harness checks them.

    level "prompt": 1 if all instructions are followed; "instruction": share of those that are.
    loose: the best of the answer without its first line, its last, both, and without asterisks.
    """
    if level not in ("prompt", "instruction"):
        raise UserError(f"reward 'ifeval': options.level {level!r} must be prompt or instruction")
    try:
        from lm_eval.tasks.ifeval.utils import process_results
    except ImportError as error:
        raise UserError(
            f"reward 'ifeval' needs the rules of lm-evaluation-harness ({error}):"
            " pip install 'jaxtrain[lm-eval]'"
        ) from None
    names = ("prompt", "instruction_id_list", "kwargs")
    rows = zip(*(column(columns, name, "ifeval") for name in names), strict=True)
    scope = "prompt" if level == "prompt" else "inst"
    key = f"{scope}_level_{'loose' if loose else 'strict'}_acc"

    def judge(completion: Completion, row: tuple[Any, ...]) -> float:
        document = {"key": 0, **dict(zip(names, row, strict=True))}
        try:
            followed = process_results(document, [without_thinking(text_of(completion))])[key]
        except LookupError as error:
            if isinstance(error, KeyError | IndexError):
                raise UserError(
                    f"reward 'ifeval': a row does not name instructions of IFEval: {error!r:.80}"
                ) from None
            raise UserError(
                "reward 'ifeval' counts sentences by data of nltk: run `python -m nltk.downloader"
                " punkt_tab`, or set NLTK_DATA to a folder that has them"
            ) from None
        marks = followed if isinstance(followed, list) else [followed]
        return sum(marks) / len(marks)

    return [judge(*pair) for pair in zip(completions, rows, strict=True)]
