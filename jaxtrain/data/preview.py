"""Previews of a dataset: a first look before any weight is read, and all of it for `preprocess`.

| rows                       | first look          | preprocess         | one example     |
|----------------------------|---------------------|--------------------|-----------------|
| sequences (sequences.py)   | probe_samples       | show_samples       | show_sample     |
| trees                      | probe_trees         | show_trees         | show_tree       |

Those of comparisons are in comparisons/preview.py.
"""

import functools
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.counts import (
    Counts,
    Progress,
    add_items,
    describe_controls,
    describe_counts,
    describe_unread,
    drops_of,
    unread_of,
)
from jaxtrain.data.formats import require_format
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.tree import Forest, Image, Node, Tree, TreeGroup
from jaxtrain.data.packing.workload import describe_tree, describe_workload
from jaxtrain.data.sample import Dropped, RowNote, Sample, Unread, to_trees
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import STREAM_ROWS, MixturePart, is_stream
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, shorten, show

NUM_ROWS = 16
"""Rows of a first look."""
MIN_USABLE = 0.1
"""Share of these rows that must give something to train on."""
MAX_IMAGES = 16
"""Images of a sample that are shown."""
TRAINED, CONTEXT = "bold green", "dim"
OPEN, CLOSE = "⟦", "⟧"
"""Marks around trained text where there are no colors."""


@dataclass(frozen=True)
class Probe:
    """Result of a first look at a dataset; str() is what the user reads."""

    path: str
    num_rows: int | None
    """Rows of the dataset; None for a stream."""
    samples: tuple[Any, ...]
    """Samples, trees or `Ranked` of the rows read."""
    summary: str
    """Line about the dataset, and one about the first look if there is something to note."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Examples of these rows that do not train, by reason."""
    format: str = ""
    """Format of the rows, or kind of the comparisons."""
    columns: tuple[str, ...] = ()
    unread: str = ""
    """Columns and keys that nothing reads, with the number of these rows; "" if there are none."""

    def __str__(self) -> str:
        return self.summary


# Sequences


def probe_samples(
    dataset: DatasetConfig,
    tokenizer: Any,
    data: DataConfig,
    trees: bool = False,
    read_elsewhere: Container[str] = (),
) -> Probe:
    """Read up to 16 rows and tokenize them as training would.

    read_elsewhere: columns that another reader of the rows reads.

    Raises UserError if no format fits, naming the columns found and those accepted; if hardly any
    row gives a sample, naming the reasons; and if the chat template leaves out parts of a row.
    """
    rows = open_rows(dataset)
    picked = pick_rows(rows, dataset.shown_path)
    columns = tuple(dict.fromkeys(key for row, _ in picked for key in row))
    name = require_format(dataset, columns)
    tokenize = RowTokenizer(dataset, tokenizer, data.sequence_len, data.too_long, trees)
    samples, usable, example = [], 0, {}
    counts = Counts()
    for row, origin in picked:
        items = tokenize(row, origin)
        add_items(counts, to_trees(items, data.sequence_len))
        kept_items = [item for item in items if not isinstance(item, RowNote)]
        samples += kept_items
        usable += bool(kept_items)
        for item in items:
            if isinstance(item, Dropped):
                example.setdefault(item.reason, []).append(item.origin)
    dropped = {reason: len(origins) for reason, origins in example.items()}
    firsts = {reason: origins[0] for reason, origins in example.items()}
    advise = lambda reason: _advise(reason, dataset, data)  # noqa: E731
    check_usable(
        f"{dataset.shown_path} (format {name})", usable, len(picked), dropped, firsts, advise
    )
    num_rows = len(rows) if hasattr(rows, "__len__") else None
    size = describe_size(num_rows)
    line = f"{dataset.shown_path}: {size}, format {name}, columns {join_columns(columns)}"
    note = describe_counts(counts, data.sequence_len, describe_controls([dataset]))
    summary = f"{line}\n  first look: {note}" if note else line
    unread = describe_unread(counts, read_elsewhere)
    return Probe(
        dataset.shown_path, num_rows, tuple(samples), summary, dropped, name, columns, unread
    )


def _advise(reason: str, dataset: DatasetConfig, data: DataConfig) -> str:
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


class SampleCounts:
    """Numbers of the table that `preprocess` prints."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.dropped: Counter[str] = Counter()
        self.firsts: dict[str, str] = {}
        """Origin of the first example that was dropped for a reason."""
        self.unread: Counter[str] = Counter()
        self.lengths: list[int] = []
        self.trained: list[int] = []
        self.packed = self.controls = 0
        self.add(items)

    def add(self, items: Iterable[Sample | Tree | Forest | TreeGroup | RowNote]) -> None:
        """Count what rows became."""
        for item in items:
            if isinstance(item, Unread):
                self.unread[item.reason] += 1
            elif isinstance(item, RowNote):
                self.dropped[item.reason] += 1
                self.firsts.setdefault(item.reason, item.origin)
            elif isinstance(item, Sample):
                self.lengths.append(len(item.tokens))
                self.trained.append(int(np.count_nonzero(item.weights)))
                self.packed += len(item.tokens)
                self.controls += item.controls
            elif isinstance(item, Tree):
                self.lengths += item.branch_lengths()
                self.trained.append(sum(_count_trained(node) for node in item.nodes))
                self.packed += item.num_tokens
                self.controls += item.controls

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values in the order in which they are printed."""
        lines = [("samples", f"{len(self.lengths):,}")]
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            first = f" (first: {self.firsts[reason]})" if reason.startswith("malformed") else ""
            lines.append((f"dropped: {escape_control_chars(reason + first)}", f"{count:,}"))
        for name, count in self.unread.most_common():
            lines.append((f"not read: {escape_control_chars(name)}", f"{count:,}"))
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


def show_samples(part: MixturePart, tokenizer: Any, num_samples: int, console: Console) -> None:
    """Tokenize a dataset; print its first samples and a table of counts."""
    counts, printed = SampleCounts(), 0
    clock = RowClock()
    for row, origin in clock.read(part, console):
        items = part.tokenize(row, origin)
        counts.add(items)
        for item in items:
            if isinstance(item, Sample | Tree) and printed < num_samples:
                show_sample(item, tokenizer, console)
                printed += 1
    if is_stream(part.rows) and clock.num_rows == STREAM_ROWS:
        console.print(f"(the first {STREAM_ROWS} rows of a stream)")
    print_pairs(f"{part.name} ({clock.speed:,.0f} rows/s)", counts.rows(), console)
    if not counts.lengths:
        raise UserError(f"{part.name}: not a single sample is left to train on (counts above)")


def print_pairs(title: str, pairs: Iterable[tuple[str, str]], console: Console) -> None:
    """Print names and values as a table, without those that have no value."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in pairs:
        if value:
            table.add_row(name, value)
    console.print(table)


def show_sample(sample: Sample | Tree, tokenizer: Any, console: Console) -> None:
    """Print a sample with its trained tokens marked, in color on a terminal.

    For samples that share a beginning, print the outline of their tree and one branch in full.
    """
    images = list_images(sample)
    if isinstance(sample, Tree):
        decode = functools.partial(decode_short, tokenizer)
        console.print(Text(describe_tree(sample, decode)), soft_wrap=True)
        branch = list_branches(sample)[0]
        weights = next(iter(branch.weights.values())).astype(np.float32)
        sample = Sample(branch.tokens, weights, f"{sample.origin}, one branch")
    trained = int(np.count_nonzero(sample.weights))
    style = "bold green" if console.is_terminal else f"between {OPEN} and {CLOSE}"
    head = f"{sample.origin}: {len(sample.tokens)} tokens, {trained} trained ({style})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    print_marked(sample, tokenizer, console)
    print_images(images, console)


@dataclass(frozen=True)
class ShownImage:
    """Image of a printed sample: a line on a terminal, which a page replaces by a thumbnail."""

    number: int
    image: Image

    def __rich__(self) -> Text:
        width, height = self.image.size
        source = self.image.source
        name = "in the row" if isinstance(source, bytes) else show(str(source), 200)
        return Text(f"image {self.number}: {width}x{height}, {name}", style="dim")


def list_images(sample: Sample | Tree) -> tuple[Image, ...]:
    """Return the images of a sample, each once, in the order of their first places."""
    parts = sample.nodes if isinstance(sample, Tree) else [sample]
    placed = [part.images.images for part in parts if part.images is not None]
    return tuple(dict.fromkeys(itertools.chain.from_iterable(placed)))


def print_images(images: Sequence[Image], console: Console) -> None:
    """Print a line for each of the first MAX_IMAGES images."""
    for number, image in enumerate(images[:MAX_IMAGES], 1):
        console.print(ShownImage(number, image))
    if len(images) > MAX_IMAGES:
        console.print(Text(f"and {len(images) - MAX_IMAGES:,} more images", style="dim"))


def print_marked(sample: Sample, tokenizer: Any, console: Console) -> None:
    if console.is_terminal:
        console.print(marked_text(sample, tokenizer), soft_wrap=True)
    else:
        console.print(Text(plain_text(sample, tokenizer)), soft_wrap=True)


def marked_text(sample: Sample, tokenizer: Any) -> Text:
    """Render a sample for a terminal: trained text bold green, context dim."""
    text = Text()
    for piece, trained in _cut_at_masks(sample, tokenizer):
        text.append(piece, style=TRAINED if trained else CONTEXT)
    return text


def plain_text(sample: Sample, tokenizer: Any) -> str:
    """Render a sample without colors: trained text between ⟦ and ⟧."""
    return "".join(
        f"{OPEN}{piece}{CLOSE}" if trained else piece
        for piece, trained in _cut_at_masks(sample, tokenizer)
    )


def _cut_at_masks(sample: Sample, tokenizer: Any) -> list[tuple[str, bool]]:
    """Cut the sample's text where trained tokens begin and end: (text, trained)."""
    trained = sample.weights > 0
    cuts = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    return [
        (
            escape_control_chars(decode_short(tokenizer, sample.tokens[start:end].tolist())),
            bool(trained[start]),
        )
        for start, end in zip(cuts[:-1], cuts[1:], strict=True)
        if end > start
    ]


def decode_short(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode tokens, with a number in place of each run of an image's tokens."""
    text = tokenizer.decode(tokens)
    form = getattr(tokenizer, "image_format", None)
    if form is None:
        return text
    feature = form.feature_text
    runs = f"(?:{re.escape(feature)}){{2,}}"
    return re.sub(runs, lambda run: f"{feature} x {len(run[0]) // len(feature)} ", text)


def _count_trained(node: Node) -> int:
    return int(np.count_nonzero(np.any([values != 0 for values in node.weights.values()], axis=0)))


# Trees


def probe_trees(part: MixturePart) -> Probe:
    """Build the trees of the first 16 rows; UserError names the reasons if none of them trains."""
    trees, counts = [], Counts()
    for row, origin in itertools.islice(part.numbered_rows(), NUM_ROWS):
        items = part.tokenize(row, origin)
        add_items(counts, items)
        trees += list_trees(items)
    if not trees:
        drops = list_drops(drops_of(counts), counts.firsts)
        raise UserError(f"{part.name}: none of the rows looked at gives a tree:\n{drops}")
    num_rows = None if is_stream(part.rows) else len(part.rows)
    branches = [tree.num_branches for tree in trees]
    summary = (
        f"{part.name}: {describe_size(num_rows)}, the first {len(branches)} trees have"
        f" {sum(branches) / len(branches):.1f} branches on average"
    )
    if part.left_out:
        counted = ", ".join(f"{number:,} rows {reason}" for reason, number in part.left_out.items())
        summary += f"; the selection left out {counted}"
    unread = describe_unread(counts)
    return Probe(part.name, num_rows, tuple(trees), summary, drops_of(counts), unread=unread)


def describe_trees(part: MixturePart, tokenizer: Any, num_samples: int = 1) -> str:
    """Describe a dataset: outlines of its first trees, the workload of all, and what was dropped
    or not read."""
    clock, trees, counts = RowClock(), [], Counts()
    for row, origin in clock.read(part):
        items = part.tokenize(row, origin)
        add_items(counts, items)
        trees += list_trees(items)
    lines = []
    for tree in trees[:num_samples]:
        lines += [describe_tree(tree, tokenizer.decode), ""]
    lines.append(f"{part.name}: {clock.num_rows:,} rows ({clock.speed:,.0f} rows/s)")
    if trees:
        lines.append(describe_workload(trees))
    lines += [f"left out by the selection: {why}: {n:,}" for why, n in part.left_out.items()]
    return "\n".join([*lines, *note_lines(counts)])


def show_trees(part: MixturePart, tokenizer: Any, num_samples: int, console: Console) -> None:
    """Print what `describe_trees` returns."""
    text = describe_trees(part, tokenizer, num_samples)
    console.print(escape_control_chars(text), markup=False, soft_wrap=True)


def show_tree(tree: Tree, tokenizer: Any, console: Console) -> None:
    """Print the outline of a tree."""
    text = describe_tree(tree, tokenizer.decode)
    console.print(escape_control_chars(text), markup=False, soft_wrap=True)


def list_trees(items: Iterable[Any]) -> list[Any]:
    """Return the trees of a row, those of groups too."""
    return [
        tree
        for item in items
        if not isinstance(item, RowNote)
        for tree in (item.trees if isinstance(item, TreeGroup) else [item])
    ]


def note_lines(counts: Counts) -> list[str]:
    """Return a line for each reason of drops, and for what was not read."""
    lines = []
    for reason, number in drops_of(counts).items():
        first = f" (first: {counts.firsts[reason]})" if reason.startswith("malformed") else ""
        lines.append(f"dropped: {reason}: {number:,}{first}")
    return lines + [f"not read: {name}: {number:,}" for name, number in unread_of(counts).items()]


# Rows, and the texts that all three kinds share


class RowClock:
    """Reads all rows of a dataset, or the first STREAM_ROWS of a stream, and measures the speed."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._start = time.monotonic()

    def read(
        self, part: MixturePart, console: Console | None = None
    ) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield (row, origin); with a console, print the progress there."""
        stream = is_stream(part.rows)
        log = lambda text: console and console.print(text, markup=False)  # noqa: E731
        progress = Progress(f"tokenizing {part.name}", None if stream else len(part.rows), log)
        rows = itertools.islice(part.numbered_rows(), STREAM_ROWS if stream else None)
        for row, origin in progress.each(rows):
            self.num_rows += 1
            yield row, origin

    @property
    def speed(self) -> float:
        """Rows per second since the start."""
        return self.num_rows / max(time.monotonic() - self._start, 1e-9)


def pick_rows(rows: Any, name: str) -> list[tuple[dict[str, Any], str]]:
    """Pick up to 16 rows with their origins: evenly spread, or the first of a stream."""
    if is_stream(rows):
        first_rows = itertools.islice(iter(rows), NUM_ROWS)
        picked = [(row, f"row {number}") for number, row in enumerate(first_rows, 1)]
    else:
        count = min(len(rows), NUM_ROWS)
        indices = sorted({step * len(rows) // count for step in range(count)})
        picked = [(rows[index], rows.origin(index)) for index in indices]
    if not picked:
        raise UserError(f"{name} has no rows")
    return picked


def check_usable(
    title: str,
    usable: int,
    total: int,
    dropped: Mapping[str, int],
    firsts: Mapping[str, str],
    advise: Callable[[str], str] = lambda reason: "",
) -> None:
    """Raise UserError if hardly any row trains, or if the chat template leaves out parts of one."""
    omitted = any(reason.startswith("chat template leaves out") for reason in dropped)
    if usable <= MIN_USABLE * total or omitted:
        raise UserError(
            f"{title}: {usable} of {total} rows looked at would train:\n"
            f"{list_drops(dropped, firsts, advise)}"
        )


def list_drops(
    dropped: Mapping[str, int],
    firsts: Mapping[str, str],
    advise: Callable[[str], str] = lambda reason: "",
) -> str:
    """List the five most frequent reasons with the first row of each, one per line."""
    return "\n".join(
        f"  {count} x {reason} (first: {firsts[reason]}){advise(reason)}"
        for reason, count in Counter(dropped).most_common(5)
    )


def describe_size(num_rows: int | None) -> str:
    return "a stream" if num_rows is None else f"{num_rows:,} rows"


def join_columns(columns: tuple[str, ...]) -> str:
    return shorten(escape_control_chars(", ".join(map(str, columns))), 500)
