"""The verb `preprocess`: what the data becomes, before anything is trained on it."""

import time

import numpy as np
from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig, TreeTask
from jaxtrain.core.assemble import find_tokenizer
from jaxtrain.data.formats import make_tokeniser
from jaxtrain.data.pipeline import open_part, open_source, probe_dataset, row_tokens
from jaxtrain.data.preview import Counts, show_counts, show_sample
from jaxtrain.data.sample import Sample
from jaxtrain.data.sources import open_rows
from jaxtrain.data.tree_preview import describe_part
from jaxtrain.errors import UserError

STREAM_ROWS = 1000
"""Rows of a streamed dataset that are looked at."""


def preprocess(config: Config, num_samples: int) -> None:
    """Tokenise every row, count what was dropped and why, show samples and how rows fill up."""
    if config.task.kind == "rl":
        raise UserError(
            'preprocess shows training examples, which task.kind "rl" draws while it runs; use'
            " --dry-run, and look at samples.jsonl of a short run"
        )
    console = Console()
    tokenizer = find_tokenizer(config.model)
    for dataset in [*config.data.datasets, *config.data.eval_datasets]:
        found = probe_dataset(dataset, config.data, tokenizer, config.task)
        console.print(str(found), style="bold", markup=False)
        if isinstance(config.task, TreeTask):
            part = open_part(dataset, config.data, tokenizer, config.task)
            text = describe_part(part, tokenizer, num_samples)
            console.print(text, markup=False, soft_wrap=True)
            continue
        count_dataset(dataset, config, tokenizer, num_samples, console)
    show_packing(config, tokenizer, console)


def count_dataset(
    dataset: DatasetConfig, config: Config, tokenizer, num_samples: int, console: Console
) -> None:
    """Tokenise one dataset; print its first samples and its counts."""
    tokenise = make_tokeniser(dataset, tokenizer, config.data.sequence_len, config.data.too_long)
    rows, counts, shown = open_rows(dataset), Counts(), 0
    began, num_rows = time.monotonic(), 0
    for index, row in enumerate(rows):
        if dataset.streaming and index == STREAM_ROWS:
            console.print(f"(the first {STREAM_ROWS} rows of a stream)")
            break
        results = tokenise(row, f"{dataset.path} row {index}")
        counts.add(results)
        num_rows += 1
        for result in results:
            if isinstance(result, Sample) and shown < num_samples:
                show_sample(result, tokenizer, console)
                shown += 1
    speed = num_rows / max(time.monotonic() - began, 1e-9)
    show_counts(counts, f"{dataset.path} ({speed:,.0f} rows/s)", console)
    if not counts.lengths:
        raise UserError(f"{dataset.path}: not a single sample is left to train on (counts above)")


def show_packing(config: Config, tokenizer, console: Console, num_batches: int = 20) -> None:
    """How full the first batches' rows are."""
    source = open_source(
        config.data,
        tokenizer,
        seed=config.run.seed,
        rows_per_microstep=config.data.micro_batch_size,
        microsteps=1,
        num_epochs=1.0 if config.run.num_epochs else None,
        task=config.task,
    )
    batches = [round_[0] for _, round_ in zip(range(num_batches), source, strict=False)]
    counters = source.counters()
    source.close()
    documents = np.mean([count_roots(batch) for batch in batches])
    console.print(
        f"packing of the first {len(batches)} batches: {config.data.micro_batch_size} rows of"
        f" {row_tokens(config.data, config.task)} tokens,"
        f" {counters['packing_efficiency']:.1%} filled,"
        f" {documents:.1f} samples a batch"
    )


def count_roots(batch: Batch) -> int:
    """Trees in a host batch: roots that are not padding."""
    index = np.arange(batch.prev.shape[-1])
    return int(((batch.prev < 0) & (batch.until > index + 1)).sum())
