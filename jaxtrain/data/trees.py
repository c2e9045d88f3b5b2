"""Rows of data as prefix trees: branching trajectories, thoughts as side leaves, grouped trials."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.task import TreeTask
from jaxtrain.data.builders import Limits, TreeBuilder
from jaxtrain.data.pack import NLL, Fields, Normalise
from jaxtrain.data.readers import Part
from jaxtrain.data.row_views import GroupedRows, SyntheticTurns
from jaxtrain.data.selection import select_rows
from jaxtrain.data.sources import open_rows
from jaxtrain.data.tree_preview import TreeProbe, describe_part, probe_trees
from jaxtrain.data.turns import TrainedParts
from jaxtrain.data.workload import describe_tree
from jaxtrain.errors import UserError

CATERPILLAR = "builtin:caterpillar"


class Trees:
    """`pipeline.Recipe` of a TreeTask.

    Held-out data are always whole trees with weights g/K, so that the modes compare.
    """

    fields: Fields = NLL
    normalise: Normalise

    def __init__(self, task: TreeTask, data: DataConfig, tokenizer: Any):
        self.task, self.data, self.tokenizer = task, data, tokenizer
        self.row_tokens = task.max_packed_tokens or data.sequence_len
        self.normalise, self.units = task.normalise, task.units_per_step

    def open(self, dataset: DatasetConfig) -> Part:
        """See pipeline.Recipe."""
        rows, builder = _open_trees(dataset, self.data, self.tokenizer, self.task, self.row_tokens)
        return Part(dataset.path, rows, builder, dataset.weight)

    def open_held_out(self, dataset: DatasetConfig) -> Part:
        """See pipeline.Recipe."""
        whole = self.task.model_copy(update={"mode": "tree"})
        return Trees(whole, self.data, self.tokenizer).open(dataset)

    def probe(self, dataset: DatasetConfig) -> TreeProbe:
        """See pipeline.Recipe."""
        return probe_trees(self.open(dataset))

    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        """See pipeline.Recipe."""
        text = describe_part(self.open(dataset), self.tokenizer, num_samples)
        console.print(text, markup=False, soft_wrap=True)

    def show_example(self, found: TreeProbe, console: Console) -> None:
        """See pipeline.Recipe."""
        text = describe_tree(found.samples[0], self.tokenizer.decode)
        console.print(text, markup=False, soft_wrap=True)


def _open_trees(
    dataset: DatasetConfig, data: DataConfig, tokenizer: Any, task: TreeTask, row_tokens: int
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
    limits = Limits(data.sequence_len, row_tokens)
    builder = TreeBuilder(
        tokenizer,
        "turns" if generated else task.split,
        task.mode,
        task.rendering,
        TrainedParts(task.train_response, task.train_reasoning),
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
