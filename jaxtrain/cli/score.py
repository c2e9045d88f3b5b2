"""The verb `score`: each row of a dataset with what a model says of it, as lines of JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.cli.processes import read_dataset
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.cli.scoring import Numbers, Scoring, ScoringRow


def run_score(argv: list[str]) -> None:
    """Score the rows of a dataset: answers of a pair, completions, the steps of an answer; with
    --top-k: what a teacher finds likeliest."""
    parser = Parser("jaxtrain score", description=run_score.__doc__)
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        help="a run's output_dir, a Hugging Face or PEFT folder, or a Hub id",
    )
    parser.add_argument("data", type=os.path.expanduser, help="a file, a folder or a Hub id")
    parser.add_argument(
        "overrides", nargs="*", help="dataset.split=test, model.compute_dtype=bfloat16 and the like"
    )
    parser.add_argument(
        "--output", type=expand_path, required=True, help="jsonl: each row with its scores"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="rows per device in a forward pass (default 8)"
    )
    parser.add_argument("--prefix", default="", help="put before the names of the new keys")
    parser.add_argument(
        "--top-k",
        type=int,
        help="instead of scores the K likeliest tokens of a language model with their log-probs, in"
        ' the place of each answer token: data for task.kind "distillation"',
    )
    args = parser.parse_intermixed_args(argv)
    score_command(args)


CHUNK = 256
"""Rows that are read, computed and written together."""


def score_command(args: argparse.Namespace) -> None:
    """Run the verb; raises UserError for unusable input before any weight is loaded."""
    from jaxtrain.api import Model
    from jaxtrain.cli.scoring import make_scoring, score_items
    from jaxtrain.data.counts import Counts, add_items, describe_drops
    from jaxtrain.data.sample import Dropped
    from jaxtrain.data.sources.dataset import open_rows
    from jaxtrain.runs.run_files import open_output, require_rows_file

    require_rows_file(args.output, args.overwrite)
    if os.path.exists(args.data) and args.output.exists():
        if os.path.samefile(args.output, args.data):
            raise UserError(f"--output {args.output} is the file to be read; name another one")
    dataset_words = [word for word in args.overrides if word.startswith("dataset.")]
    dataset = read_dataset(args.data, dataset_words)
    rows = open_rows(dataset)
    if args.batch_size < 1:
        raise UserError(f"score: --batch-size {args.batch_size} must be at least 1")
    model = Model(args.model, [w for w in args.overrides if w not in dataset_words])
    scoring = make_scoring(model, dataset, args)
    counts, written = Counts(), 0
    with open_output(args.output) as file:
        for chunk in chunks(rows, dataset.path, CHUNK):
            items = []
            for row, origin in chunk:
                item = scoring.read(row, origin)
                add_items(counts, [item if isinstance(item, Dropped) else item.tree])
                if not isinstance(item, Dropped):
                    items.append(item)
            item_numbers = (
                score_items(model, items, scoring.compute, args.batch_size) if items else []
            )
            for item, numbers in zip(items, item_numbers, strict=True):
                file.write(f"{make_line(scoring, item, numbers, args.prefix)}\n".encode())
            written += len(items)
        if not written:
            raise UserError(f"{args.data}: no row could be scored: {describe_drops(counts)}")
    num_dropped = counts["draws"] - written
    drops = f"; {num_dropped:,} left out: {describe_drops(counts)}" if num_dropped else ""
    print(f"{written:,} rows in {args.output}{drops}")


def make_line(scoring: Scoring, item: ScoringRow, numbers: Numbers, prefix: str) -> str:
    """The row as a line of JSON; UserError where its keys are taken or numbers are none."""
    import numpy as np

    for values in numbers.values():
        if np.issubdtype(values.dtype, np.floating) and np.isnan(values).any():
            raise UserError(
                f"{item.tree.origin or 'a row'}: the model's scores are not numbers (NaN); its"
                " weights are damaged, or model.compute_dtype is too narrow for them"
            )
    keys = {f"{prefix}{name}": value for name, value in scoring.describe(item, numbers).items()}
    if taken := sorted(keys.keys() & item.row.keys()):
        raise UserError(
            f"the rows have a column {taken[0]!r} already; give the new ones another name with"
            " --prefix TEXT"
        )
    return json.dumps({**item.row, **keys}, default=str)


def chunks(rows: Any, name: str, size: int) -> Iterator[tuple[tuple[Mapping[str, Any], str], ...]]:
    """(row, where it stands) of a dataset or a stream, `size` at a time."""
    from jaxtrain.data.counts import Progress

    total = len(rows) if hasattr(rows, "__len__") else None
    progress = Progress(f"scoring {name}", total, print)
    named = getattr(rows, "origin", None)
    if total is None:
        numbered = ((row, f"{name} row {index}") for index, row in enumerate(rows))
    else:
        where = named or (lambda index: f"{name} row {index}")
        numbered = ((rows[index], where(index)) for index in range(total))
    iterator = progress.each(numbered)
    while chunk := tuple(islice(iterator, size)):
        yield chunk
