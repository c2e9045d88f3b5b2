"""Text for people: a sample with its trained tokens marked, and the counts of a dataset."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.data.packing.tree import Forest, Node, Tree, TreeGroup, split_branches
from jaxtrain.data.packing.workload import describe_tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.text_safety import escape_control_chars

TRAINED = "bold green"
CONTEXT = "dim"
OPEN, CLOSE = "⟦", "⟧"
"""Marks around a trained stretch where there are no colors."""


class Counts:
    """Running counts of what tokenization gave."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}
        self.lengths: list[int] = []
        self.trained: list[int] = []
        self.packed = self.controls = 0

    def add(self, results: Iterable[Sample | Tree | Forest | TreeGroup | Dropped]) -> None:
        """Count the samples of one or more rows, and what was dropped."""
        for result in results:
            if isinstance(result, Dropped):
                self.dropped[result.reason] = self.dropped.get(result.reason, 0) + 1
            elif isinstance(result, Sample):
                self.lengths.append(len(result.tokens))
                self.trained.append(int(np.count_nonzero(result.weights)))
                self.packed += len(result.tokens)
                self.controls += result.controls
            elif isinstance(result, Tree):
                self.lengths += result.branch_lengths()
                self.trained.append(sum(_count_trained(node) for node in result.nodes))
                self.packed += result.num_tokens
                self.controls += result.controls

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, in the order they are shown."""
        lines = [("samples", f"{len(self.lengths):,}")]
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            lines.append((f"dropped: {escape_control_chars(reason)}", f"{count:,}"))
        if not self.lengths:
            return lines
        flat, total, trained = sum(self.lengths), self.packed, sum(self.trained)
        lines.append(("tokens", f"{total:,}"))
        if flat > total:
            saved = f"{flat:,} ({1 - total / flat:.0%} saved)"
            lines.append(("  without sharing what samples begin with", saved))
        if self.controls:
            lines.append(("control tokens spelled in texts", f"{self.controls:,}"))
        lines.append(("trained tokens", f"{trained:,} ({trained / total:.1%})"))
        low, middle, high = np.percentile(self.lengths, [50, 90, 99], method="nearest")
        lines.append(("tokens a sample", f"{min(self.lengths):,} to {max(self.lengths):,}"))
        lines.append(("  half / 90% / 99% have at most", f"{low:,} / {middle:,} / {high:,}"))
        return lines


def count(results: Iterable[Sample | Dropped]) -> Counts:
    """Counts of many results."""
    counts = Counts()
    counts.add(results)
    return counts


def counts_table(counts: Counts, title: str) -> Table:
    """The counts as a rich table; printed to a file it is plain text."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in counts.rows():
        table.add_row(name, value)
    return table


def stretches(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """The sample's text, cut where trained tokens begin and end: (text, trained)."""
    trained = sample.weights > 0
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    return [
        (
            escape_control_chars(tokenizer.decode(sample.tokens[start:end].tolist())),
            bool(trained[start]),
        )
        for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        if end > start
    ]


def marked_text(sample: Sample, tokenizer: Any) -> Text:
    """The sample for a terminal: trained stretches bold green, context dim."""
    text = Text()
    for piece, trained in stretches(sample, tokenizer):
        text.append(piece, style=TRAINED if trained else CONTEXT)
    return text


def plain_text(sample: Sample, tokenizer: Any) -> str:
    """The sample without colors: trained stretches between ⟦ and ⟧."""
    return "".join(
        f"{OPEN}{piece}{CLOSE}" if trained else piece
        for piece, trained in stretches(sample, tokenizer)
    )


def _count_trained(node: Node) -> int:
    return int(np.count_nonzero(np.any([values != 0 for values in node.weights.values()], axis=0)))


def show_sample(sample: Sample | Tree, tokenizer: Any, console: Console) -> None:
    """Print a sample with a line that says what is marked, in color on a terminal; of samples that
    share a beginning the outline of their tree, and one of them whole."""
    if isinstance(sample, Tree):
        console.print(Text(describe_tree(sample, tokenizer.decode)), soft_wrap=True)
        tokens, weights = split_branches(sample)[0]
        weight = next(iter(weights.values()))
        sample = Sample(tokens, weight.astype(np.float32), f"{sample.origin}, one branch")
    trained = int(np.count_nonzero(sample.weights))
    style = "bold green" if console.is_terminal else f"between {OPEN} and {CLOSE}"
    head = f"{sample.origin}: {len(sample.tokens)} tokens, {trained} trained ({style})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    if console.is_terminal:
        console.print(marked_text(sample, tokenizer), soft_wrap=True)
    else:
        console.print(Text(plain_text(sample, tokenizer)), soft_wrap=True)


def show_counts(counts: Counts, title: str, console: Console) -> None:
    """Print the counts."""
    console.print(counts_table(counts, title))
