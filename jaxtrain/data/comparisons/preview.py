"""Preference data for people: a first look before any weight is read, and all of it with counts."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.comparisons.preference_row import ACCEPTED, detect_kind
from jaxtrain.data.comparisons.ranked import Ranked
from jaxtrain.data.formats import pick_rows
from jaxtrain.data.packing.rows import to_trees
from jaxtrain.data.preview import marked_text, plain_text
from jaxtrain.data.progress import Progress
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sources.readers import STREAM_ROWS, MixturePart, is_stream
from jaxtrain.data.tally import Counts, add_items, describe_controls, describe_counts, drops_of
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, shorten

USABLE = 0.1
"""Share of looked-at rows that must give a tree."""


class PreferenceReaderProtocol(Protocol):
    """See preferences.RankedReader."""

    dataset: DatasetConfig
    tokenizer: Any
    want: str
    sequence_len: int

    def __call__(self, row: dict[str, Any], origin: str) -> list[Ranked | Dropped]: ...


@dataclass(frozen=True)
class PreferenceProbe:
    """What a first look found."""

    path: str
    kind: str
    """pairs, labels or scores."""
    columns: tuple[str, ...]
    num_rows: int | None
    """None for a stream."""
    samples: tuple[Ranked, ...]
    """What the rows looked at became."""
    counts: Counts
    """What was dropped, and what sharing prompts saves: see tally.py."""
    told: str = ""
    """The same in words."""

    @property
    def dropped(self) -> dict[str, int]:
        """Comparisons and answers of no use, by reason."""
        return drops_of(self.counts)

    def __str__(self) -> str:
        size = "a stream" if self.num_rows is None else f"{self.num_rows:,} rows"
        columns = shorten(escape_control_chars(", ".join(map(str, self.columns))), 500)
        answers = sum(len(one.answers) for one in self.samples)
        made = sum(len(one.pairs) for one in self.samples)
        found = f"{made} pairs of {answers} answers" if made else f"{answers} labeled answers"
        line = f"{self.path}: {size} of {self.kind}, columns {columns}"
        return f"{line}\n  first look: " + "; ".join(filter(None, (found, self.told)))


def probe_rows(
    part: MixturePart, reader: PreferenceReaderProtocol, row_tokens: int
) -> PreferenceProbe:
    """Read up to 16 rows as training would; UserError when they are of another kind than the
    method wants, or hardly any gives a tree, with the reasons."""
    picked = list(pick_rows(part.rows))
    if not picked:
        raise UserError(f"{part.name} has no rows")
    members = [one for row, _ in picked for one in (row["group"] if "group" in row else [row])]
    columns = tuple(dict.fromkeys(key for row in members for key in row))
    kind = _find_kind(reader.dataset, columns, reader.want)
    samples, example, usable = [], {}, 0
    counts: Counts = Counter()
    for row, origin in picked:
        ranked = [one for one in reader(row, origin) if isinstance(one, Ranked)]
        items = to_trees(part.tokenize(row, origin), row_tokens)
        add_items(counts, items)
        for item in items:
            if isinstance(item, Dropped):
                example.setdefault(item.reason, item.origin)
        if not all(isinstance(item, Dropped) for item in items):
            usable += 1
            samples += ranked
    left_out = any(reason.startswith("chat template leaves out") for reason in example)
    if usable <= USABLE * len(picked) or left_out:
        reasons = "\n".join(
            f"  {count} x {reason} (first: {example[reason]})"
            for reason, count in list(drops_of(counts).items())[:5]
        )
        raise UserError(
            f"{part.name} ({kind}): {usable} of {len(picked)} rows looked at would train:\n"
            f"{reasons}"
        )
    num_rows = None if is_stream(part.rows) else len(part.rows)
    told = describe_counts(counts, reader.sequence_len, describe_controls([reader.dataset]))
    return PreferenceProbe(part.name, kind, columns, num_rows, tuple(samples), counts, told)


def _find_kind(dataset: DatasetConfig, columns: tuple[str, ...], want: str) -> str:
    """What the columns are; UserError with what was found and what is accepted."""
    if dataset.format != "auto":
        return f"format {dataset.format}"
    top = {wanted: found for wanted, found in dataset.fields.items() if "." not in wanted}
    for wanted, found in top.items():
        if found not in columns:
            raise UserError(
                f"{dataset.path}: fields names the column {found!r} (for {wanted}), but the "
                f"columns found are {', '.join(columns)}"
            )
    kind = detect_kind([*columns, *top])
    if kind is None:
        raise UserError(
            f"{dataset.path}: these are no preference data: the columns found are"
            f" {', '.join(columns)}\nAccepted columns:\n{ACCEPTED}\n"
            'Rename columns with fields, wanted = found: fields = {chosen = "good", '
            'rejected = "bad"}'
        )
    if kind == "labels" and want == "pairs" and not dataset.group_prompts:
        raise UserError(
            f"{dataset.path}: its rows have one answer with a label each, but the method compares"
            " answers to one prompt: choose one for labeled answers (loss kto), give data with"
            " chosen and rejected, or set group_prompts = true for the dataset, which compares the"
            " desirable answers to a prompt with the undesirable ones"
        )
    return kind


def show_rows(
    part: MixturePart,
    reader: PreferenceReaderProtocol,
    row_tokens: int,
    num_samples: int,
    console: Console,
) -> None:
    """The first prompts with their answers, and the counts of all rows; UserError when none of
    them gives a tree."""
    stream, shown, number = is_stream(part.rows), 0, 0
    began = time.monotonic()
    counts: Counts = Counter()
    rows = part.rows if stream else (part.rows[index] for index in range(len(part.rows)))
    log = lambda text: console.print(text, markup=False)  # noqa: E731
    total = None if stream else len(part.rows)
    progress = Progress(f"tokenizing {part.name}", total, log)
    looked_at = itertools.islice(rows, STREAM_ROWS if stream else None)
    for index, row in enumerate(progress.each(looked_at)):
        origin = f"{part.name} row {index}" if stream else part.origin(index)
        if shown < num_samples:
            for ranked in reader(row, origin):
                if isinstance(ranked, Ranked):
                    show_ranked(ranked, reader.tokenizer, console)
                    shown += 1
        items = to_trees(part.tokenize(row, origin), row_tokens)
        add_items(counts, items)
        number += 1
    speed = number / max(time.monotonic() - began, 1e-9)
    console.print(f"{part.name}: {number:,} rows ({speed:,.0f} rows/s)", markup=False)
    lines = [f"trees: {counts['trees']:,}", f"tokens: {counts['packed_tokens']:,}"]
    packed, flat = counts["packed_tokens"], counts["flat_tokens"]
    if flat > packed:
        saved = f"{1 - packed / flat:.0%} saved"
        lines.append(f"tokens without sharing prompts: {flat:,} ({saved})")
    if counts["controls"]:
        lines.append(f"control tokens spelled in texts: {counts['controls']:,}")
    lines += [f"dropped: {reason}: {n:,}" for reason, n in drops_of(counts).items()]
    console.print(escape_control_chars("\n".join(lines)), markup=False, soft_wrap=True)
    if not counts["trees"]:
        raise UserError(f"{part.name}: not a single row is left to train on (counts above)")


def show_ranked(ranked: Ranked, tokenizer: Any, console: Console) -> None:
    """Print a prompt and its answers, each with what it is and its trained tokens marked."""
    head = (
        f"{ranked.origin}: a prompt of {len(ranked.prompt)} tokens, {len(ranked.answers)} answers"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    prompt = Sample(ranked.prompt, np.zeros(len(ranked.prompt), np.float32))
    write = marked_text if console.is_terminal else lambda *what: Text(plain_text(*what))
    console.print(write(prompt, tokenizer), soft_wrap=True)
    for index, answer in enumerate(ranked.answers):
        trained = int(np.count_nonzero(answer.weights))
        line = f"{_place(ranked, index)}: {len(answer.tokens)} tokens, {trained} trained"
        console.print(Text(line, style="bold"), soft_wrap=True)
        console.print(write(Sample(answer.tokens, answer.weights), tokenizer), soft_wrap=True)


def _place(ranked: Ranked, index: int) -> str:
    """What an answer is: "chosen", "answer 2: better than 3, 4, worse than 1", "undesirable"."""
    if ranked.labels:
        return "desirable" if ranked.labels[index] else "undesirable"
    better = [pair for pair in ranked.pairs if pair.chosen == index]
    worse = [pair for pair in ranked.pairs if pair.rejected == index]
    if len(ranked.pairs) == 1:
        margin = f" (margin {better[0].margin:g})" if better and better[0].margin else ""
        return f"chosen{margin}" if better else "rejected"
    parts = [
        f"{word} than {', '.join(str(other + 1) for other in others)}"
        for word, others in (
            ("better", [pair.rejected for pair in better]),
            ("worse", [pair.chosen for pair in worse]),
        )
        if others
    ]
    return f"answer {index + 1}: " + ", ".join(parts)
