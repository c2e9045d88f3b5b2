"""Counts of rows, samples, notes by reason and tokens saved by sharing; and progress lines.

Each row of a file counts once, however often it is drawn. The counts are part of the data cursor,
so that a resumed run continues them.
"""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from jaxtrain.data.sample import Dropped, RowNote, Unread
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars


class Counts(Counter[str]):
    """draws, of these rows (each row of a file once); of the rows: lost_rows (without a sample),
    trees, "dropped:<reason>", "unread:<column or key>", packed_tokens and flat_tokens (of all
    branches separately), controls (control tokens that texts spell)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.firsts: dict[str, str] = {}
        """Origin of the first example that was dropped for a reason."""

    def state(self) -> dict[str, Any]:
        """Return JSON-able entries of a cursor, for `restore`."""
        return {"counts": dict(self), "firsts": dict(self.firsts)}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "Counts":
        """Return the counts of a cursor; older ones counted draws alone."""
        counts = cls(state["counts"])
        if counts["draws"]:
            counts.setdefault("rows", counts["draws"])
        counts.firsts = dict(state.get("firsts", {}))
        return counts


PROBE = 64
"""Number of draws after which data that mostly do not train are refused."""
SHOWN_REASONS = 5
"""Reasons named in a line."""


def count_items(
    counts: Counts, items: Iterable[Any], pass_len: int | None, repeated: bool = False
) -> None:
    """Count one draw; UserError if a full pass gave nothing, or if most samples have no mask.

    items: notes, and trees, groups or objects with their `num_tokens` and perhaps `flat_tokens`.
    repeated: its row was counted before.
    """
    if repeated:
        counts["draws"] += 1
    else:
        add_items(counts, items)
    # With weights the draw that ends the pass may be a repeated one.
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
    """Count the samples and notes of one row."""
    counts["draws"] += 1
    counts["rows"] += 1
    before = counts["trees"]
    for item in items:
        if isinstance(item, RowNote):
            kind = "unread" if isinstance(item, Unread) else "dropped"
            counts[f"{kind}:{item.reason}"] += 1
            if isinstance(item, Dropped):
                counts.firsts.setdefault(item.reason, item.origin)
        else:
            counts["trees"] += 1
            counts["packed_tokens"] += item.num_tokens
            counts["flat_tokens"] += getattr(item, "flat_tokens", item.num_tokens)
            counts["controls"] += getattr(item, "controls", 0)
    counts["lost_rows"] += counts["trees"] == before


def drops_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return {reason: number}, the most frequent first."""
    return _numbers(counts, "dropped:")


def unread_of(counts: Mapping[str, int]) -> dict[str, int]:
    """Return {column or key: number of rows in which nothing reads it}."""
    return _numbers(counts, "unread:")


def _numbers(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    numbers = [(name, n) for name, n in counts.items() if name.startswith(prefix) and n]
    numbers.sort(key=lambda pair: -pair[1])
    return {name.removeprefix(prefix): number for name, number in numbers}


def list_drops(counts: Mapping[str, int]) -> str:
    """ "39 x too long, 1 x malformed row: columns tools and functions differ (x.jsonl line 3)"."""
    drops = list(drops_of(counts).items())
    firsts = getattr(counts, "firsts", {})
    shown = []
    for reason, number in drops[:SHOWN_REASONS]:
        named = reason.startswith(("malformed", "chat template"))
        first = firsts.get(reason) if named else None
        shown.append(f"{number:,} x {reason}" + (f" (first: {first})" if first else ""))
    rest = sum(number for _, number in drops[SHOWN_REASONS:])
    return ", ".join(shown + ([f"{rest:,} for other reasons"] if rest else []))


def describe_drops(counts: Mapping[str, int]) -> str:
    """ "40 rows read, 39 x too long, 1 x no trained token"."""
    return ", ".join(filter(None, (f"{counts.get('rows', 0)} rows read", list_drops(counts))))


def describe_unread(counts: Mapping[str, int], known: Container[str] = ()) -> str:
    """ "not read: column 'source' (40 rows), message key 'id' (12 rows)"; "" if there is nothing.

    known: names that were reported before.
    """
    names = [
        f"{escape_control_chars(name)} ({number:,} row{'s' if number > 1 else ''})"
        for name, number in unread_of(counts).items()
        if name not in known
    ]
    return f"not read: {', '.join(names)}" if names else ""


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
            f"{counts.get('lost_rows', 0):,} of {counts.get('rows', 0):,} rows give nothing to"
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
        "data/rows": counts.get("rows", 0),
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
