"""Previews of comparisons: a first look before any weight is read, and all of them for
`preprocess`; see data/preview.py."""

from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.comparisons.preference_row import require_kind
from jaxtrain.data.comparisons.ranked import Ranked
from jaxtrain.data.counts import (
    Counts,
    add_items,
    describe_controls,
    describe_counts,
    describe_unread,
    drops_of,
)
from jaxtrain.data.preview import (
    Probe,
    RowClock,
    check_usable,
    describe_size,
    join_columns,
    note_lines,
    pick_rows,
    print_images,
    print_marked,
)
from jaxtrain.data.sample import Dropped, RowNote, Sample, to_trees
from jaxtrain.data.sources.readers import MixturePart, is_stream
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars


class RankedReaderProtocol(Protocol):
    """Reader of preference rows: comparisons.preferences.RankedReader."""

    dataset: DatasetConfig
    tokenizer: Any
    want: str
    sequence_len: int

    def __call__(self, row: dict[str, Any], origin: str) -> list[Ranked | RowNote]: ...


def probe_preferences(part: MixturePart, reader: RankedReaderProtocol, row_tokens: int) -> Probe:
    """Read up to 16 rows as training would.

    Raises UserError if they are of another kind than the method needs, or if hardly any row gives
    a tree, naming the reasons.
    """
    picked = pick_rows(part.rows, part.name)
    members = [member for row, _ in picked for member in row.get("group", [row])]
    columns = tuple(dict.fromkeys(key for row in members for key in row))
    kind = require_kind(reader.dataset, columns, reader.want)
    samples, firsts, usable = [], {}, 0
    counts = Counts()
    for row, origin in picked:
        ranked = [item for item in reader(row, origin) if isinstance(item, Ranked)]
        items = to_trees(part.tokenize(row, origin), row_tokens)
        add_items(counts, items)
        for item in items:
            if isinstance(item, Dropped):
                firsts.setdefault(item.reason, item.origin)
        if not all(isinstance(item, RowNote) for item in items):
            usable += 1
            samples += ranked
    dropped = drops_of(counts)
    check_usable(f"{part.name} ({kind})", usable, len(picked), dropped, firsts)
    num_rows = None if is_stream(part.rows) else len(part.rows)
    num_answers = sum(len(ranked.answers) for ranked in samples)
    num_pairs = sum(len(ranked.pairs) for ranked in samples)
    compared = f"{num_pairs} pairs of {num_answers} answers"
    parts = [compared if num_pairs else f"{num_answers} labeled answers"]
    parts.append(describe_counts(counts, reader.sequence_len, describe_controls([reader.dataset])))
    line = f"{part.name}: {describe_size(num_rows)} of {kind}, columns {join_columns(columns)}"
    summary = f"{line}\n  first look: " + "; ".join(filter(None, parts))
    unread = describe_unread(counts)
    return Probe(part.name, num_rows, tuple(samples), summary, dropped, kind, columns, unread)


def show_preferences(
    part: MixturePart,
    reader: RankedReaderProtocol,
    row_tokens: int,
    num_samples: int,
    console: Console,
) -> None:
    """Print the first prompts with their answers, and the counts of all rows."""
    clock, printed = RowClock(), 0
    counts = Counts()
    for row, origin in clock.read(part, console):
        if printed < num_samples:
            for item in reader(row, origin):
                if isinstance(item, Ranked):
                    show_ranked(item, reader.tokenizer, console)
                    printed += 1
        add_items(counts, to_trees(part.tokenize(row, origin), row_tokens))
    console.print(f"{part.name}: {clock.num_rows:,} rows ({clock.speed:,.0f} rows/s)", markup=False)
    lines = [f"trees: {counts['trees']:,}", f"tokens: {counts['packed_tokens']:,}"]
    packed, flat = counts["packed_tokens"], counts["flat_tokens"]
    if flat > packed:
        saved = f"{1 - packed / flat:.0%} saved"
        lines.append(f"tokens without sharing prompts: {flat:,} ({saved})")
    if counts["controls"]:
        lines.append(f"control tokens spelled in texts: {counts['controls']:,}")
    lines += note_lines(counts)
    console.print(escape_control_chars("\n".join(lines)), markup=False, soft_wrap=True)
    if not counts["trees"]:
        raise UserError(f"{part.name}: not a single row is left to train on (counts above)")


def show_ranked(ranked: Ranked, tokenizer: Any, console: Console) -> None:
    """Print a prompt and its answers with their ranks, trained tokens marked."""
    head = (
        f"{ranked.origin}: a prompt of {len(ranked.prompt)} tokens, {len(ranked.answers)} answers"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    prompt = Sample(ranked.prompt, np.zeros(len(ranked.prompt), np.float32))
    print_marked(prompt, tokenizer, console)
    print_images(() if ranked.images is None else ranked.images.images, console)
    for index, answer in enumerate(ranked.answers):
        trained = int(np.count_nonzero(answer.weights))
        line = f"{_describe_rank(ranked, index)}: {len(answer.tokens)} tokens, {trained} trained"
        console.print(Text(line, style="bold"), soft_wrap=True)
        print_marked(Sample(answer.tokens, answer.weights), tokenizer, console)


def _describe_rank(ranked: Ranked, index: int) -> str:
    """Return "chosen", "answer 2: better than 3, 4, worse than 1", "undesirable" or the like."""
    if ranked.labels:
        return "desirable" if ranked.labels[index] else "undesirable"
    beaten = [pair.rejected for pair in ranked.pairs if pair.chosen == index]
    winners = [pair.chosen for pair in ranked.pairs if pair.rejected == index]
    if len(ranked.pairs) == 1:
        margin = ranked.pairs[0].margin
        return ("chosen" + (f" (margin {margin:g})" if margin else "")) if beaten else "rejected"
    parts = [
        f"{word} than {', '.join(str(answer + 1) for answer in answers)}"
        for word, answers in (("better", beaten), ("worse", winners))
        if answers
    ]
    return f"answer {index + 1}: " + ", ".join(parts)
