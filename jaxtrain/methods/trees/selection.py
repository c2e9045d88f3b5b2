"""Selection of rows for trees from a large set of trajectories, when data are opened."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from typing import Any, Literal

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.formats import read_number
from jaxtrain.data.sources.row_views import SelectedRows
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.rendering import read_row, reasoning_of

CHUNK = 2000
"""Rows per job of a scoring process."""


@dataclass(frozen=True)
class RowScore:
    """Properties of a row that need no tokenization."""

    estimate: float
    """Tokens of the final context by the row's usage columns; inf without them."""
    assistant_turns: int
    reasoning_turns: int
    num_turns: int
    """The column of that name, or 0."""
    usable: bool
    """True if its messages can be read."""

    @property
    def branching_score(self) -> int:
        """(turns with reasoning + 1) x turns, an estimate of the tokens that branches repeat."""
        return (self.reasoning_turns + 1) * max(self.num_turns, self.assistant_turns)


def score_row(row: Mapping[str, Any], fields: Mapping, roles: Mapping) -> RowScore:
    """Score a row; an unreadable one is marked instead of raising an error."""
    num_turns = int(read_number(row.get("num_turns")) or 0)
    try:
        messages = read_row(Row(row, fields, roles)).messages
    except MalformedRow:
        return RowScore(estimate_tokens(row), 0, 0, num_turns, False)
    spoken = [message for message in messages if message["role"] == "assistant"]
    thoughtful = sum(bool(reasoning_of(message)) for message in spoken)
    return RowScore(estimate_tokens(row), len(spoken), thoughtful, num_turns, True)


ESTIMATES = ("token_usage", "rlm_final_input_tokens", "rlm_final_output_tokens")
"""Columns that `estimate_tokens` reads."""


def estimate_tokens(row: Mapping[str, Any]) -> float:
    """token_usage.final_{input,output}_tokens, else rlm_final_..., added up; inf if not given."""
    usage = row.get("token_usage")
    total = 0.0
    for kind in ("input", "output"):
        count = usage.get(f"final_{kind}_tokens") if isinstance(usage, Mapping) else None
        tokens = read_number(count) or read_number(row.get(f"rlm_final_{kind}_tokens"))
        if tokens is None or tokens <= 0:
            return inf
        total += tokens
    return total


def select_rows(
    rows: Any,
    *,
    metric: Literal["none", "branching_score", "num_turns"],
    max_examples: int | None = None,
    max_estimate: int | None = None,
    workers: int = 0,
    fields: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    name: str = "the dataset",
) -> Any:
    """Return the selected rows, best first, with counts of rows left out by reason.

    branching_score selects only rows with reasoning; its ties keep the order of rows. Ties of
    num_turns are ordered by example_id or row number, descending. Raises UserError if no row
    remains.
    """
    left_out: Counter[str] = Counter()
    if metric == "none" and max_estimate is None:
        order = list(range(len(rows)))
    else:
        scores = list(_score_all(rows, workers, fields or {}, roles or {}))
        order = _order(rows, scores, metric, max_estimate, left_out)
    if max_examples is not None and len(order) > max_examples:
        left_out["beyond task.max_examples"] = len(order) - max_examples
        order = order[:max_examples]
    if not order:
        why = ", ".join(f"{number:,} {reason}" for reason, number in left_out.most_common())
        raise UserError(
            f"{name}: the selection leaves none of {len(rows)} rows ({why or 'there are none'});"
            " look at task.selection and task.filter_by_token_estimate"
        )
    return SelectedRows(rows, order, left_out)


def _order(
    rows: Any,
    scores: Sequence[RowScore],
    metric: str,
    max_estimate: int | None,
    left_out: Counter[str],
) -> list[int]:
    """Order rows by the metric; counts the others by reason in `left_out`."""
    selected = []
    for index, score in enumerate(scores):
        if max_estimate is not None and not score.estimate <= max_estimate:
            unknown = score.estimate == inf
            left_out["without token_usage" if unknown else "with too many tokens"] += 1
        elif metric == "branching_score" and not score.usable:
            left_out["that cannot be read"] += 1
        elif metric == "branching_score" and not score.reasoning_turns:
            left_out["without reasoning"] += 1
        else:
            selected.append(index)
    if metric == "branching_score":
        return sorted(selected, key=lambda i: (-scores[i].branching_score, i))
    if metric == "num_turns":
        return sorted(
            selected, key=lambda i: (scores[i].num_turns, _identity(rows[i], i)), reverse=True
        )
    return selected


def _identity(row: Mapping[str, Any], index: int) -> float:
    example_id = read_number(row.get("example_id"))
    return index if example_id is None else example_id


def _score_all(
    rows: Any, workers: int, fields: Mapping[str, str], roles: Mapping[str, str]
) -> Iterator[RowScore]:
    spans = [(i, min(i + CHUNK, len(rows))) for i in range(0, len(rows), CHUNK)]
    if workers == 0:
        for span in spans:
            yield from _score_span(rows, span, fields, roles)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_score_span, rows, span, fields, roles) for span in spans]
        for job in jobs:
            yield from job.result()


def _score_span(
    rows: Any, span: tuple[int, int], fields: Mapping[str, str], roles: Mapping[str, str]
) -> list[RowScore]:
    return [score_row(rows[index], fields, roles) for index in range(*span)]
