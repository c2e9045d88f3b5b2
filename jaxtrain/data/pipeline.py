"""From the config's datasets to a Source: the doorway between section data and steps.py.

With a tree task the rows go through builders.py instead of formats.py; everything behind is the
same.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.batch import Batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.task import TreeTask
from jaxtrain.data.builders import Limits, TreeBuilder
from jaxtrain.data.formats import Probe, make_tokeniser, probe
from jaxtrain.data.readers import Part
from jaxtrain.data.row_views import GroupedRows, SyntheticTurns
from jaxtrain.data.selection import select_rows
from jaxtrain.data.sources import open_rows
from jaxtrain.data.steps import Source, count_part_steps, eval_part_batches, open_parts
from jaxtrain.data.tree_preview import TreeProbe, probe_trees
from jaxtrain.data.turns import Trained
from jaxtrain.errors import UserError

__all__ = ["Source", "count_steps", "eval_batches", "open_part", "open_source", "probe_dataset"]

CATERPILLAR = "builtin:caterpillar"


def open_source(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float | None = None,
    task: Any = None,
) -> Source:
    """Source of rounds [Batch [A, B, T]] over data.datasets, seeded and exactly resumable.

    Without num_epochs it never ends; with it the last batch is padded with empty rows. task: the
    section of that name, which matters if it is a TreeTask; its units_per_step replaces
    `microsteps`. Raises UserError for data that cannot be read or of which nothing trains.
    """
    tree = _tree_task(task)
    return open_parts(
        _open_all(data.datasets, data, tokenizer, tree),
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        num_epochs=num_epochs,
        normalise=tree.normalise if tree else "token",
        row_tokens=row_tokens(data, tree),
        units=tree.units_per_step if tree else None,
    )


def count_steps(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    rows_per_microstep: int,
    microsteps: int,
    num_epochs: float = 1.0,
    task: Any = None,
) -> int:
    """Optimizer steps that open_source(num_epochs=...) will give: every row is tokenised once."""
    tree = _tree_task(task)
    return count_part_steps(
        _open_all(data.datasets, data, tokenizer, tree),
        data,
        seed=seed,
        rows_per_microstep=rows_per_microstep,
        microsteps=microsteps,
        num_epochs=num_epochs,
        row_tokens=row_tokens(data, tree),
        units=tree.units_per_step if tree else None,
    )


def eval_batches(
    dataset: DatasetConfig, data: DataConfig, tokenizer: Any, rows: int, task: Any = None
) -> Iterator[Batch]:
    """Batches [1, B, T] of every example of a held-out dataset once; the last one is padded.

    A tree task is always evaluated on whole trees with weights g/K, so that its modes compare.
    """
    tree = _tree_task(task)
    if tree is not None:
        tree = tree.model_copy(update={"mode": "tree"})
    part = open_part(dataset, data, tokenizer, tree)
    return eval_part_batches(part, data, rows=rows, row_tokens=row_tokens(data, tree))


def row_tokens(data: DataConfig, task: Any) -> int:
    """T: data.sequence_len, or what a packed tree may have."""
    tree = _tree_task(task)
    return (tree.max_packed_tokens if tree else None) or data.sequence_len


def open_part(dataset: DatasetConfig, data: DataConfig, tokenizer: Any, task: Any = None) -> Part:
    """One dataset, opened, with the function that makes samples or trees of its rows."""
    tree = _tree_task(task)
    if tree is not None:
        rows, builder = _open_trees(dataset, data, tokenizer, tree)
        return Part(dataset.path, rows, builder, dataset.weight)
    tokenise = make_tokeniser(dataset, tokenizer, data.sequence_len, data.too_long)
    return Part(dataset.path, open_rows(dataset), tokenise, dataset.weight)


def probe_dataset(
    dataset: DatasetConfig, data: DataConfig, tokenizer: Any, task: Any = None
) -> Probe | TreeProbe:
    """A first look at a few rows; UserError when they would not train. str() of it is a line."""
    if _tree_task(task) is None:
        return probe(dataset, tokenizer, data)
    return probe_trees(open_part(dataset, data, tokenizer, task))


def _tree_task(task: Any) -> TreeTask | None:
    return task if isinstance(task, TreeTask) else None


def _open_all(
    datasets: Sequence[DatasetConfig], data: DataConfig, tokenizer: Any, task: Any
) -> list[Part]:
    return [open_part(dataset, data, tokenizer, task) for dataset in datasets]


def _open_trees(
    dataset: DatasetConfig, data: DataConfig, tokenizer: Any, task: TreeTask
) -> tuple[Any, TreeBuilder]:
    generated = dataset.path == CATERPILLAR
    if generated:
        rows = _open_synthetic(dataset, tokenizer)
    else:
        rows = open_rows(dataset)
    if task.selection != "none" or task.filter_by_token_estimate or task.max_examples:
        rows = select_rows(
            rows,
            metric=task.selection,
            # Groups are counted below, after they were made.
            max_examples=None if task.group_by else task.max_examples,
            max_estimate=data.sequence_len if task.filter_by_token_estimate else None,
            workers=task.selection_workers,
            fields=dataset.fields,
            roles=dataset.roles,
            name=dataset.path,
        )
    if task.group_by:
        rows = _group(rows, task.group_by, dataset.path)
        rows = select_rows(rows, metric="none", max_examples=task.max_examples)
    limits = Limits(data.sequence_len, row_tokens(data, task))
    builder = TreeBuilder(
        tokenizer,
        "turns" if generated else task.split,
        task.mode,
        task.rendering,
        Trained(task.train_response, task.train_reasoning),
        limits,
        dataset.fields,
        dataset.roles,
        _read_tools(dataset.tools),
        "error" if data.too_long == "error" else "drop",
    )
    return rows, builder


def _open_synthetic(dataset: DatasetConfig, tokenizer: Any) -> SyntheticTurns:
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer) if tokenizer is not None else None,
        **dataset.options,
    }
    known = set(SyntheticTurns.__dataclass_fields__)
    if set(options) - known:
        raise UserError(
            f"{dataset.path}: unknown options {sorted(set(options) - known)}; allowed:"
            f" {', '.join(sorted(known))}"
        )
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    for key in ("user_len", "think_len", "response_len"):
        low, high = options.get(key, (1, 1))
        if not 1 <= low <= high:
            raise UserError(
                f"{dataset.path}: option {key} [{low}, {high}] must be 1 <= low <= high"
            )
    if dataset.max_rows is not None:
        options["num_rows"] = min(options.get("num_rows", dataset.max_rows), dataset.max_rows)
    return SyntheticTurns(**options)


def _group(rows: Any, column: str, name: str) -> GroupedRows:
    try:
        return GroupedRows(rows, column)
    except KeyError:
        raise UserError(
            f"task.group_by {column!r} is no column of {name}; it has {', '.join(rows[0])}"
        ) from None


def _read_tools(path: str | None) -> list[dict] | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise UserError(f"tools file {path!r} does not exist (key tools of a dataset)")
    try:
        tools = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"tools file {path!r} is not JSON: {error}") from None
    if not isinstance(tools, list):
        raise UserError(f"tools file {path!r} must hold a list of tool schemas")
    return tools
