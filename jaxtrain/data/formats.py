"""Rows to samples: the five formats of a row, and a first look at a dataset.

| format            | columns                                | from the tokenizer              |
|-------------------|----------------------------------------|---------------------------------|
| chat              | messages (or conversations), tools     | chat template                   |
| prompt_completion | prompt, completion, system             | chat template if messages       |
| alpaca            | instruction, output, input, system     | chat template if as_chat        |
| input_output      | segments: [{text, train}]              |                                 |
| completion        | text                                   | eos; split at sequence_len      |

A row becomes Samples, or a Dropped that says why and is counted.

Any other format is a function from outside (an entry point in group jaxtrain.formats,
"package.module:function" or "file.py:function") of (row, tokenizer, dataset), the last being the
entry of data.datasets. Of a row, a dict whose `fields` are renamed, it returns

- a row of one of the formats above, which then goes the way of that format, or
- a list of (token ids, weights), one pair a sample: a weight a token, 0 where it is context. Rules
  for length, first tokens and samples without weight are applied afterwards, as for all formats.

It raises ValueError with the reason for a row to leave out; any other error ends the run.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.data import FORMATS, DataConfig, DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.comparisons.preference_row import detect_kind
from jaxtrain.data.packing.rows import to_trees
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sources.columns import COLUMNS, accepted_columns, detect_format
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.tally import Counts, add_items, describe_controls, describe_counts
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, shorten

NUM_ROWS = 16
"""Rows looked at, spread over the dataset."""
USABLE = 0.1
"""Share of looked-at rows that must give a sample."""


def make_row_tokenizer(
    dataset: DatasetConfig,
    tokenizer: Any,
    sequence_len: int,
    too_long: str,
    trees: bool = False,
) -> Callable[[dict[str, Any], str], list[Sample | Tree | Dropped]]:
    """A picklable function (row, origin) -> samples and drops, for one dataset.

    too_long: drop | truncate | error, for samples of more than sequence_len tokens. trees: samples
    of one conversation that begin alike become trees, of that many tokens at most. The function
    raises UserError only for what makes every row fail (no chat template, no end-of-turn token)
    and for a long sample under "error".
    """
    return RowTokenizer(dataset, tokenizer, sequence_len, too_long, trees)


@dataclass(frozen=True)
class Probe:
    """What a first look found."""

    path: str
    """The dataset's path."""
    format: str
    """Format of its rows."""
    columns: tuple[str, ...]
    """Columns found."""
    num_rows: int | None
    """Rows of the dataset; None for a stream."""
    samples: tuple[Sample | Tree, ...]
    """What the rows looked at became."""
    dropped: dict[str, int]
    """And those that would not train, by reason."""
    counts: Counts
    """The same in numbers, with what sharing prefixes saves: see tally.py."""
    told: str = ""
    """What of it people should know."""

    def __str__(self) -> str:
        size = "a stream" if self.num_rows is None else f"{self.num_rows:,} rows"
        columns = shorten(escape_control_chars(", ".join(map(str, self.columns))), 500)
        line = f"{self.path}: {size}, format {self.format}, columns {columns}"
        return f"{line}\n  first look: {self.told}" if self.told else line


def probe(dataset: DatasetConfig, tokenizer: Any, data: DataConfig, trees: bool = False) -> Probe:
    """Read up to 16 rows and tokenize them as training would.

    Raises UserError when no format fits, naming the columns found and those accepted, when hardly
    any row gives a sample, naming the reasons, and when the chat template leaves out parts of one.
    """
    rows = open_rows(dataset)
    picked = list(pick_rows(rows))
    if not picked:
        raise UserError(f"{dataset.path} has no rows")
    columns = tuple(dict.fromkeys(key for row, _ in picked for key in row))
    name = _format(dataset, columns)
    tokenize = make_row_tokenizer(dataset, tokenizer, data.sequence_len, data.too_long, trees)
    samples, dropped, usable, example = [], Counter(), 0, {}
    counts: Counts = Counter()
    for row, origin in picked:
        results = tokenize(row, origin)
        add_items(counts, to_trees(results, data.sequence_len))
        for result in results:
            if isinstance(result, Dropped):
                dropped[result.reason] += 1
                example.setdefault(result.reason, result.origin)
            else:
                samples.append(result)
        usable += not all(isinstance(result, Dropped) for result in results)
    left_out = any(reason.startswith("chat template leaves out") for reason in dropped)
    if usable <= USABLE * len(picked) or left_out:
        reasons = "\n".join(
            f"  {count} x {reason} (first: {example[reason]}){_advice(reason, dataset, data)}"
            for reason, count in dropped.most_common(5)
        )
        raise UserError(
            f"{dataset.path} (format {name}): {usable} of {len(picked)} rows looked at would "
            f"train:\n{reasons}"
        )
    num_rows = len(rows) if hasattr(rows, "__len__") else None
    told = describe_counts(counts, data.sequence_len, describe_controls([dataset]))
    return Probe(dataset.path, name, columns, num_rows, tuple(samples), dict(dropped), counts, told)


def pick_rows(rows: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Up to 16 rows with their origins: evenly spread, or the first of a stream."""
    if not hasattr(rows, "__len__"):
        for number, row in enumerate(itertools.islice(iter(rows), NUM_ROWS), 1):
            yield row, f"row {number}"
        return
    count = min(len(rows), NUM_ROWS)
    for index in sorted({place * len(rows) // count for place in range(count)}):
        yield rows[index], rows.origin(index)


def _format(dataset: DatasetConfig, columns: tuple[str, ...]) -> str:
    """The format that reads these columns; UserError with what was found and what is accepted."""
    top = {wanted: found for wanted, found in dataset.fields.items() if "." not in wanted}
    for wanted, found in top.items():
        if found not in columns:
            raise UserError(
                f"{dataset.path}: fields names the column {found!r} (for {wanted}), but the "
                f"columns found are {', '.join(columns)}"
            )
    if dataset.format not in FORMATS:
        return dataset.format  # one from outside, which knows its columns itself
    name = detect_format(columns, top)
    if dataset.format != "auto":
        names = set(columns) | set(top)
        if any(names >= set(needed) for needed in COLUMNS[dataset.format]):
            return dataset.format
        name = None
    if name is None:
        if detect_kind(columns) in ("pairs", "labels"):
            raise UserError(
                f"{dataset.path}: these are preference data (columns {', '.join(columns)}), which"
                ' task.kind "preference" trains; to train the good answers alone, name their'
                ' columns: fields = {completion = "chosen"}'
            )
        wanted = "no format fits" if dataset.format == "auto" else f"not {dataset.format}"
        raise UserError(
            f"{dataset.path}: {wanted}: the columns found are {', '.join(columns)}\n"
            f"Accepted columns, by format:\n{accepted_columns()}\n"
            'Rename columns with fields, wanted = found: fields = {prompt = "question", '
            'completion = "answer"}'
        )
    return name


def _advice(reason: str, dataset: DatasetConfig, data: DataConfig) -> str:
    if reason == "too long":
        return f": raise data.sequence_len ({data.sequence_len}) or set data.too_long = truncate"
    if reason == "no trained token" and dataset.train_on == "per_message":
        return ': train_on = "per_message" needs messages with train = true'
    if reason == "no trained token":
        return f": train_on = {dataset.train_on!r} found nothing to train on in them"
    if reason.startswith("chat template leaves out"):
        return ': choose a template that writes it (model.chat_template; "builtin" does)'
    if reason.startswith("turn is tokenized"):
        return ": the chat template lets tokens merge across turns; use another one"
    return ""
