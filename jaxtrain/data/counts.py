"""Counts of rows, samples, drops by reason and tokens saved by sharing; and progress lines.

The counts are part of the data cursor, so that a resumed run continues them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jaxtrain.data.sample import Dropped
from jaxtrain.errors import UserError

Counts = Counter[str]
"""draws, lost_rows (draws that gave no sample), trees, "dropped:<reason>", packed_tokens and
flat_tokens (of all branches separately), controls (control tokens that texts spell)."""

PROBE = 64
"""Number of draws after which data that mostly do not train are refused."""
SHOWN_REASONS = 5
"""Reasons named in a line."""


def count_items(counts: Counts, items: Iterable[Any], pass_len: int | None) -> None:
    """Count one draw; UserError if a full pass gave nothing, or if most samples have no mask.

    items: drops, and trees, groups or objects with their `num_tokens` and perhaps `flat_tokens`.
    """
    add_items(counts, items)
    if pass_len is not None and counts["draws"] >= pass_len and not counts["trees"]:
        raise UserError(
            f"no example of the data trains: {describe_drops(counts)}; look at a few with"
            " `jaxtrain preprocess`"
        )
    if counts["draws"] == PROBE and counts["dropped:no trained token"] > PROBE // 2:
        raise UserError(
            f"most examples have no trained token ({describe_drops(counts)}): the masking does not"
            " fit the data; look at a few with `jaxtrain preprocess`, and at train_on of the"
            " dataset"
        )


def add_items(counts: Counts, items: Iterable[Any]) -> None:
    """Count the samples and drops of one row."""
    counts["draws"] += 1
    before = counts["trees"]
    for item in items:
        if isinstance(item, Dropped):
            counts[f"dropped:{item.reason}"] += 1
        else:
            counts["trees"] += 1
            counts["packed_tokens"] += item.num_tokens
            counts["flat_tokens"] += getattr(item, "flat_tokens", item.num_tokens)
            counts["controls"] += getattr(item, "controls", 0)
    counts["lost_rows"] += counts["trees"] == before


def drops_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return {reason: number}, the most frequent first."""
    drops = [(name, n) for name, n in counts.items() if name.startswith("dropped:") and n]
    drops.sort(key=lambda pair: -pair[1])
    return {name.removeprefix("dropped:"): number for name, number in drops}


def list_drops(counts: Mapping[str, int]) -> str:
    """ "39 x too long, 1 x no trained token"."""
    drops = list(drops_of(counts).items())
    shown = [f"{number:,} x {reason}" for reason, number in drops[:SHOWN_REASONS]]
    rest = sum(number for _, number in drops[SHOWN_REASONS:])
    return ", ".join(shown + ([f"{rest:,} for other reasons"] if rest else []))


def describe_drops(counts: Mapping[str, int]) -> str:
    """ "40 rows read, 39 x too long, 1 x no trained token"."""
    return ", ".join(filter(None, (f"{counts.get('draws', 0)} rows read", list_drops(counts))))


def describe_counts(counts: Mapping[str, int], sequence_len: int, controls: str) -> str:
    """Describe drops by reason, savings by sharing, and spelled control tokens in one line.

    "" if there is nothing to report. controls: treatment of control tokens ("stay text").
    """
    parts = []
    if drops_of(counts):
        advice = ""
        if any(reason.startswith("too long") for reason in drops_of(counts)):
            advice = f" (data.sequence_len is {sequence_len}, see also data.too_long)"
        parts.append(
            f"{counts.get('lost_rows', 0):,} of {counts.get('draws', 0):,} rows give nothing to"
            f" train on; dropped examples: {list_drops(counts)}; kept: {counts.get('trees', 0):,}"
            f"{advice}"
        )
    packed, flat = counts.get("packed_tokens", 0), counts.get("flat_tokens", 0)
    if flat > packed:
        parts.append(f"shared prefixes save {1 - packed / flat:.0%}: {packed:,} of {flat:,} tokens")
    if counts.get("controls"):
        parts.append(f"{counts['controls']:,} control tokens spelled in texts {controls}")
    return "; ".join(parts)


def describe_controls(datasets: Iterable[Any]) -> str:
    """Describe the treatment of control tokens that the texts of the datasets spell."""
    kinds = {dataset.special_tokens for dataset in datasets}
    if kinds == {"control"}:
        return "count as control tokens"
    return "stay text" if kinds == {"text"} else "become what each dataset says"


def count_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the counts for metrics.jsonl: totals since the start of the run."""
    metrics: dict[str, float] = {
        "data/rows": counts.get("draws", 0),
        "data/lost_rows": counts.get("lost_rows", 0),
        "data/examples": counts.get("trees", 0),
    }
    drops = drops_of(counts)
    metrics["data/dropped"] = sum(drops.values())
    for reason, number in drops.items():
        name = "_".join(reason.partition(":")[0].split()[:6])
        metrics[f"data/dropped/{name}"] = metrics.get(f"data/dropped/{name}", 0) + number
    packed, flat = counts.get("packed_tokens", 0), counts.get("flat_tokens", 0)
    if flat > packed:
        metrics["data/shared_prefix_share"] = 1 - packed / flat
    if counts.get("controls"):
        metrics["data/control_tokens"] = counts["controls"]
    return {name: float(number) for name, number in metrics.items()}


T = TypeVar("T")
EVERY_SECONDS = 10.0


class Progress:
    """Counts rows and logs the progress every ten seconds."""

    def __init__(self, activity: str, total: int | None, log: Callable[[str], None]):
        """activity: "tokenizing x.jsonl"; total: None where nobody knows."""
        self.what, self.total, self.log = activity, total, log
        self.done = 0
        self._start = self._last_log = time.monotonic()

    def count(self) -> None:
        """Count a row."""
        self.done += 1
        current = time.monotonic()
        if current - self._last_log >= EVERY_SECONDS:
            self._last_log = current
            self.log(self.describe(current - self._start))

    def each(self, rows: Iterable[T]) -> Iterator[T]:
        """Yield the rows and count them."""
        for row in rows:
            yield row
            self.count()

    def describe(self, seconds: float) -> str:
        """Return "tokenizing x.jsonl: 12,000 of 100,000 rows (12%), 1,900 rows/s, 46 s left"."""
        speed = self.done / max(seconds, 1e-9)
        if self.total is None:
            return f"{self.what}: {self.done:,} rows, {speed:,.0f} rows/s"
        seconds_left = (self.total - self.done) / max(speed, 1e-9)
        return (
            f"{self.what}: {self.done:,} of {self.total:,} rows ({self.done / self.total:.0%}),"
            f" {speed:,.0f} rows/s, {seconds_left:,.0f} s left"
        )
