"""Order of draws from a mixture of datasets: shuffles, epochs and shares, with random access.

Draw d belongs to epoch d // epoch_len. Without weights an epoch contains every row of every dataset
once. With weights an epoch is as long, but its draws are divided by weight, and an exhausted
dataset starts over, newly shuffled. The order is a function of (seed, epoch, dataset), so a cursor
is a single number.
"""

from collections.abc import Sequence

import numpy as np

from jaxtrain.errors import UserError


class Order:
    """Endless sequence of (dataset, row) pairs; `order[draw]` costs O(1) inside an epoch."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float | None] = (),
        *,
        seed: int = 0,
        shuffle: bool = True,
    ):
        """sizes: rows of each dataset. weights: without any, every row is drawn once per epoch."""
        self.sizes = tuple(sizes)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch_len = sum(sizes)
        self.counts: tuple[int, ...] | None = None
        if any(weight is not None for weight in weights):
            shares = [1.0 if weight is None else weight for weight in weights]
            self.counts = share_out(self.epoch_len, shares)
        self.pass_len = self.epoch_len
        """Draws after which every row of every dataset was drawn."""
        if self.counts is not None:
            pairs = zip(self.sizes, self.counts, strict=True)
            self.pass_len *= max(-(-size // count) for size, count in pairs)
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None
        self._passes: dict[int, tuple[int, np.ndarray]] = {}

    def __getitem__(self, draw: int) -> tuple[int, int]:
        epoch, slot = divmod(draw, self.epoch_len)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._plan_epoch(epoch))
        _, datasets, ranks = self._epoch
        dataset, rank = int(datasets[slot]), int(ranks[slot])
        if self.counts is None:
            return dataset, rank
        visit, position = divmod(epoch * self.counts[dataset] + rank, self.sizes[dataset])
        return dataset, self._row_of(dataset, visit, position)

    def visit(self, draw: int) -> int:
        """Return how often the row of a draw was drawn before."""
        epoch, slot = divmod(draw, self.epoch_len)
        if self.counts is None:
            return epoch
        self[draw]  # plans the epoch
        assert self._epoch is not None
        dataset, rank = int(self._epoch[1][slot]), int(self._epoch[2][slot])
        return (epoch * self.counts[dataset] + rank) // self.sizes[dataset]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_epoch": None, "_passes": {}}

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the dataset of each slot of the epoch, and its row or rank within the dataset."""
        counts = self.sizes if self.counts is None else self.counts
        datasets = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        ranks = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        if self.shuffle:
            slots = np.random.default_rng((self.seed, 0, epoch)).permutation(self.epoch_len)
        elif self.counts is None:
            return datasets, ranks
        else:
            share = np.repeat(np.asarray(counts, np.float64), counts)
            slots = np.argsort((ranks + 0.5) / share, kind="stable")
        return datasets[slots], ranks[slots]

    def _row_of(self, dataset: int, visit: int, position: int) -> int:
        if not self.shuffle:
            return position
        cached = self._passes.get(dataset)
        if cached is None or cached[0] != visit:
            rng = np.random.default_rng((self.seed, 1 + dataset, visit))
            cached = (visit, rng.permutation(self.sizes[dataset]))
            self._passes[dataset] = cached
        return int(cached[1][position])


def share_out(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return positive integers in proportion to `shares` that add up to `total`."""
    if total < len(shares):
        raise UserError(
            f"data.datasets: {len(shares)} weighted datasets have only {total} rows together;"
            " remove some or leave out their weights"
        )
    exact = np.asarray(shares, np.float64) * total / sum(shares)
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() < total:
        counts[np.argmax(exact - counts)] += 1
    while counts.sum() > total:
        counts[np.argmax(np.where(counts > 1, counts - exact, -np.inf))] -= 1
    return tuple(counts.tolist())
