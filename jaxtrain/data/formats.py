"""The five formats of a row, the columns that each needs, and custom formats.

| format            | columns                                | from the tokenizer              |
|-------------------|----------------------------------------|---------------------------------|
| chat              | messages (or conversations)            | chat template                   |
| prompt_completion | prompt (or question, instruction with  | chat template if messages       |
|                   | input, input), completion (or output)  |                                 |
| alpaca            | instruction, output, input, system     | chat template if as_chat        |
| input_output      | segments: [{text, train}]              |                                 |
| completion        | text                                   | eos; split at sequence_len      |

Each row becomes Samples, or a Dropped with a reason that is counted. Beside messages, prompts and
instructions stand system, history, tools and chat_template_kwargs (chat/rows.py); plain texts with
one of these are written by the chat template.

A custom format is a function of (row, tokenizer, dataset): an entry point in group
jaxtrain.formats,
"package.module:function" or "file.py:function". `row` is a dict whose `fields` are renamed,
`dataset` the entry of data.datasets. The function returns

- a row of one of the formats above, which is then read as that format, or
- a list of (token ids, weights), one pair per sample, one weight per token, 0 for context. Rules
for
  length, first tokens and samples without weight are applied afterwards, as for all formats.

It raises ValueError with the reason to drop a row; any other error ends the run.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from string import Formatter
from typing import Any, Literal

from jaxtrain import plugins
from jaxtrain.config.data import FORMATS, DatasetConfig
from jaxtrain.data.chat.messages import ACCEPTED, MalformedRow
from jaxtrain.data.chat.rows import CONTEXT, MESSAGES
from jaxtrain.data.chat.rows import PROMPTS as PROMPTS
from jaxtrain.errors import UserError

COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": tuple((name,) for name in MESSAGES),
    "input_output": (("segments",),),
    "prompt_completion": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
    "completion": (("text",),),
}
"""The columns that each format needs, in order of preference when several fit."""
QUESTIONS = ("prompt", "question", "instruction", "input")
"""Columns of a prompt beside an answer."""
ANSWERS = ("completion", "output")
OTHER_PAIRS = tuple((question, answer) for question in QUESTIONS for answer in ANSWERS)
"""Columns of prompt_completion under other readers' names, where no format fits."""

OPTIONAL = {*CONTEXT, "input", "loss_mask"}
"""Columns that a format reads if present."""

Kind = Literal["pairs", "labels", "scores"]

CHOSEN = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chatgpt", "llama2-13b-chat"),
)
LABELS = ("label", "kto_tag", "completion_decision")
MANY = ("completions", "answers", "responses", "generations")
"""Columns of preference rows."""


def detect_format(columns: Iterable[str], fields: Mapping[str, str] | None = None) -> str | None:
    """Return the name of the first format whose columns are all present, or None.

    fields: {name in the format: column of the data}, as in data.datasets[].fields.
    """
    names = set(columns)
    names |= {name for name, column in (fields or {}).items() if column in names}
    for name, alternatives in (*COLUMNS.items(), ("prompt_completion", OTHER_PAIRS)):
        if any(names >= set(needed) for needed in alternatives):
            return name
    return None


def detect_kind(columns: Iterable[str]) -> Kind | None:
    """Return the kind of rows with these columns, or None."""
    names = set(columns)
    if any(names >= set(columns_of_pair) for columns_of_pair in CHOSEN):
        return "pairs"
    prompt_names = names & set(PROMPTS)
    if names & set(LABELS) and (names & {*MESSAGES} or prompt_names and names & {*ANSWERS}):
        return "labels"
    if prompt_names and names & set(MANY):
        return "scores"
    return None


def accepted_columns() -> str:
    """Return one line per format with the columns that it needs."""
    lines = []
    for name, alternatives in COLUMNS.items():
        lines.append(f"  {name}: " + " or ".join(" + ".join(needed) for needed in alternatives))
    return "\n".join(lines)


def check_fields(dataset: DatasetConfig, columns: tuple[str, ...]) -> dict[str, str]:
    """Return the columns that are renamed or written; UserError if `fields` or `column_formats`
    names one that is not there."""
    renamed = {name: column for name, column in dataset.fields.items() if "." not in name}
    for name, column in renamed.items():
        if column not in columns:
            raise UserError(
                f"{dataset.path}: fields names the column {column!r} (for {name}), but the "
                f"columns found are {', '.join(columns)}"
            )
    available = {*columns, *renamed}
    for name, formats in dataset.column_formats.items():
        formats = [formats] if isinstance(formats, str) else formats
        needed = [{column for _, column, _, _ in Formatter().parse(text)} for text in formats]
        missing = [sorted(names - available - {None}) for names in needed]  # type: ignore[operator]
        if all(missing):
            raise UserError(
                f"{dataset.path}: column_formats writes {name} from {missing[-1][0]!r}, but the"
                f" columns found are {', '.join(columns)}"
            )
        renamed[name] = columns[0]
    return renamed


def require_format(dataset: DatasetConfig, columns: tuple[str, ...]) -> str:
    """Return the format that reads these columns; UserError names those found and accepted."""
    renamed = check_fields(dataset, columns)
    if dataset.format not in FORMATS:
        return dataset.format  # a custom format checks its columns itself
    name = detect_format(columns, renamed)
    if dataset.format != "auto":
        names = set(columns) | set(renamed)
        others = OTHER_PAIRS if dataset.format == "prompt_completion" else ()
        if any(names >= set(needed) for needed in (*COLUMNS[dataset.format], *others)):
            return dataset.format
        name = None
    if name is None:
        if detect_kind(columns) in ("pairs", "labels"):
            raise UserError(
                f"{dataset.path}: these are preference data (columns {', '.join(columns)}), which"
                ' task.kind "preference" trains; to train the good answers alone, name their'
                ' columns: fields = {completion = "chosen"}'
            )
        problem = "no format fits" if dataset.format == "auto" else f"not {dataset.format}"
        raise UserError(
            f"{dataset.path}: {problem}: the columns found are {', '.join(columns)}\n"
            f"Accepted columns, by format:\n{accepted_columns()}\n"
            'Rename columns with fields, wanted = found: fields = {prompt = "question", '
            'completion = "answer"}'
        )
    return name


def check_names(dataset: DatasetConfig, allowed: Sequence[str] | None) -> None:
    """Raise UserError for names in `fields` or `roles` that nothing reads.

    allowed: names that `fields` may assign; None: any.
    """
    for name in [*dataset.fields, *dataset.column_formats]:
        if allowed is not None and name not in allowed:
            near = difflib.get_close_matches(name, allowed, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise UserError(
                f"{dataset.path}: fields renames to {name!r}, which no format reads{hint} "
                f"(wanted = found; wanted is one of {', '.join(allowed)})"
            )
    for alias, role in dataset.roles.items():
        if role not in ACCEPTED:
            raise UserError(
                f"{dataset.path}: roles turns {alias!r} into {role!r}, which is no role "
                f"(found = wanted; wanted is one of {', '.join(ACCEPTED)})"
            )


def find_custom_format(dataset: DatasetConfig) -> Any:
    """Return the function that reads the dataset's rows; None for a built-in format."""
    if dataset.format in FORMATS:
        return None
    key = f"{dataset.path}: format"
    return plugins.find("formats", dataset.format, dict.fromkeys(FORMATS), key=key)


def call_custom_format(
    read: Any, row: dict[str, Any], tokenizer: Any, dataset: DatasetConfig
) -> Any:
    """Apply a custom format to a row. Raises MalformedRow with its reason to drop the row, and
    UserError for any other failure."""
    try:
        return read(row, tokenizer, dataset)
    except UserError:
        raise
    except ValueError as error:
        raise MalformedRow(str(error)) from None
    except plugins.FAILURES as error:  # plugin code may raise anything
        raise UserError(f"format {dataset.format!r}: {plugins.describe(error)}") from error


def read_number(value: Any) -> float | None:
    """Return a finite number, also one written as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None
