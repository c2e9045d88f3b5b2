"""Which tokens are trained most often: the vocabulary of a draft that cannot say everything."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxtrain.data.counts import Progress
from jaxtrain.data.packing.tree import Forest, Tree, TreeGroup
from jaxtrain.data.sample import RowNote
from jaxtrain.data.sources.readers import IndexedReader, Items, MixturePart, StreamReader, is_stream


def count_trained(
    parts: Sequence[MixturePart],
    vocab_size: int,
    *,
    row_tokens: int,
    seed: int,
    most: int,
    num_workers: int = 0,
    log: Callable[[str], None] = lambda text: None,
) -> np.ndarray:
    """float64 [V]: how often each token is trained in at most `most` rows of each dataset, drawn
    by the seed, of a stream the first; with weights of datasets, by their share of the draws."""
    weighted = any(part.weight is not None for part in parts)
    counts = np.zeros(vocab_size)
    for part in parts:
        totals, rows = np.zeros(vocab_size, np.int64), 0
        total = None if is_stream(part.rows) else min(len(part.rows), most)
        progress = Progress(f"counting trained tokens of {part.name}", total, log)
        for items in progress.each(read_items(part, row_tokens, seed, most, num_workers)):
            add_counts(totals, items)
            rows += 1
        share = (1.0 if part.weight is None else part.weight) / max(rows, 1) if weighted else 1.0
        counts += share * totals
    return counts


def read_items(
    part: MixturePart, row_tokens: int, seed: int, most: int, num_workers: int
) -> Iterator[Items]:
    """Yield the tokenized items of up to `most` rows, each row once."""
    if is_stream(part.rows):
        reader = StreamReader([part], row_tokens=row_tokens, shuffle=False, once=True)
    else:
        reader = IndexedReader(
            [part],
            row_tokens=row_tokens,
            seed=seed,
            shuffle=len(part.rows) > most,
            num_epochs=1,
            num_workers=num_workers,
        )
    try:
        rows: Iterator[Items] = iter(lambda: next(reader, None), None)  # type: ignore[arg-type]
        yield from itertools.islice(rows, most)
    finally:
        reader.close()


def add_counts(counts: np.ndarray, items: Iterable[Tree | Forest | TreeGroup | RowNote]) -> None:
    """Add to int64 [V] the trained tokens of trees."""
    for item in items:
        if isinstance(item, Tree):
            for node in item.nodes:
                trained = np.zeros(len(node.tokens), bool)
                for weights in node.weights.values():
                    trained |= weights > 0
                if node.parent < 0:
                    trained[0] = False  # nothing predicts it
                np.add.at(counts, node.tokens[trained], 1)
        elif isinstance(item, Forest | TreeGroup):
            add_counts(counts, item.trees)


def keep_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """int32 [size] ids with the highest counts, ascending; of equals the smallest."""
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int32)
