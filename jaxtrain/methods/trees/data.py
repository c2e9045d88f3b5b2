"""Recipe of prefix trees: branching trajectories, thoughts as side leaves, grouped trials."""

from typing import Any

from rich.console import Console
from typing_extensions import override

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.config.limits import ITEMS, TOKENS
from jaxtrain.data.chat.messages import MalformedRow, read_tools
from jaxtrain.data.packing.pack import NLL, Fields, Normalize
from jaxtrain.data.pipeline import Recipe
from jaxtrain.data.preview import Probe, probe_trees, show_tree, show_trees
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.data.sources.row_views import GroupedRows, SyntheticTurns
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.modes import LengthLimits, TreeBuilder
from jaxtrain.methods.trees.selection import ESTIMATES, select_rows
from jaxtrain.methods.trees.turns import TrainedParts
from jaxtrain.safe_io import parse_json, read_text
from jaxtrain.text_safety import show

CATERPILLAR = "builtin:caterpillar"
MAX_TOOL_BYTES = 2**20
"""Limit of bytes of a file with tool schemas."""


class Trees(Recipe):
    """`pipeline.Recipe` of a TreeTask.

    Held-out data are always trees with weights g/K, so that losses of the modes are comparable.
    """

    fields: Fields = NLL
    normalize: Normalize
    held_out_normalize: Normalize = "token"

    def __init__(self, task: TreeTask, data: DataConfig, tokenizer: Any):
        self.task, self.data, self.tokenizer = task, data, tokenizer
        self.row_tokens = task.max_packed_tokens or data.sequence_len
        self.normalize, self.units = task.normalize, task.units_per_step

    @override
    def open(self, dataset: DatasetConfig) -> MixturePart:
        rows, builder = _open_trees(dataset, self.data, self.tokenizer, self.task, self.row_tokens)
        return MixturePart(dataset.shown_path, rows, builder, dataset.weight)

    @override
    def open_held_out(self, dataset: DatasetConfig) -> MixturePart:
        tree_task = self.task.model_copy(update={"mode": "tree"})
        return Trees(tree_task, self.data, self.tokenizer).open(dataset)

    @override
    def settings(self, dataset: DatasetConfig) -> str | None:
        if type(self) is not Trees:
            return None
        keys = dataset.model_dump_json(
            include={"fields", "roles", "special_tokens", "chat_template_kwargs"}
        )
        tools, data = _read_tools(dataset.tools), self.data
        return repr((keys, tools, self.task, self.row_tokens, data.sequence_len, data.too_long))

    @override
    def probe(self, dataset: DatasetConfig) -> Probe:
        return probe_trees(self.open(dataset))

    @override
    def show(self, dataset: DatasetConfig, num_samples: int, console: Console) -> None:
        show_trees(self.open(dataset), self.tokenizer, num_samples, console)

    @override
    def show_example(self, probe: Probe, console: Console) -> None:
        show_tree(probe.samples[0], self.tokenizer, console)


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
            # max_examples counts groups, which are selected below.
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
    limits = LengthLimits(data.sequence_len, row_tokens)
    grouping = [task.group_by] if task.group_by else []
    if task.filter_by_token_estimate:
        grouping += ESTIMATES
    builder = TreeBuilder(
        tokenizer,
        "turns" if generated else task.split,
        task.mode,
        task.rendering,
        TrainedParts(task.train_response, task.train_reasoning),
        limits,
        dataset.reading,
        _read_tools(dataset.tools),
        "error" if data.too_long == "error" else "drop",
        dataset.special_tokens,
        dataset.chat_template_kwargs,
        frozenset(f"column {show(name, 60)}" for name in grouping),
    )
    return rows, builder


def _open_synthetic(dataset: DatasetConfig, tokenizer: Any) -> SyntheticTurns:
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer) if tokenizer is not None else None,
        **dataset.options,
    }
    allowed = set(SyntheticTurns.__dataclass_fields__)
    if set(options) - allowed:
        raise UserError(
            f"{dataset.path}: unknown options {sorted(set(options) - allowed)}; allowed:"
            f" {', '.join(sorted(allowed))}"
        )
    for key, value in dataset.options.items():
        if key in ("user_len", "think_len", "response_len"):
            is_range = isinstance(value, list | tuple) and all(type(n) is int for n in value)
            if not is_range or len(value) != 2 or not 1 <= value[0] <= value[1] <= TOKENS:
                raise UserError(
                    f"{dataset.path}: option {key} {show(value)} must be [low, high], with"
                    f" 1 <= low <= high <= {TOKENS:,}"
                )
            options[key] = tuple(value)
        elif type(value) is not int or not (key == "seed" or value >= 1) or abs(value) > ITEMS:
            raise UserError(
                f"{dataset.path}: option {key} {show(value)} must be a whole number from"
                f" {0 if key == 'seed' else 1} to {ITEMS:,}"
            )
    rows = SyntheticTurns(**options)
    longest = rows.user_len[1] + rows.think_len[1] + rows.response_len[1]
    if rows.num_turns * longest > TOKENS:
        raise UserError(
            f"{dataset.path}: {rows.num_turns:,} turns of up to {longest:,} tokens are more than"
            f" {TOKENS:,} a tree"
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
    key = "(key tools of a dataset)"
    try:
        schemas = parse_json(read_text(path, MAX_TOOL_BYTES))
        if not isinstance(schemas, list):
            raise MalformedRow("expected a list of tool schemas")
        return read_tools(schemas)
    except FileNotFoundError:
        raise UserError(f"tools file {show(path)} does not exist {key}") from None
    except OSError as error:
        raise UserError(f"tools file {show(path)}: {error.strerror or error} {key}") from None
    except ValueError as error:
        raise UserError(f"tools file {show(path)} is not JSON: {error} {key}") from None
    except MalformedRow as error:
        raise UserError(f"tools file {show(path)}: {error} {key}") from None
