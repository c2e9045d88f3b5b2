"""Which of many datasets has the most to gain from trees: the verb preprocess with --rank."""

import heapq
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrain.config import DatasetConfig
from jaxtrain.data.packing.workload import Workload, measure_tree
from jaxtrain.data.pipeline import Recipe
from jaxtrain.data.preview import RowClock, list_trees
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.config import TreeTask


def measure_top(dataset: DatasetConfig, recipe: Recipe, top: int) -> tuple[int, list[Workload]]:
    """Return (trees of a dataset, the workloads of the `top` with the highest pair ratio, best
    first). Keeps no more than those in memory."""
    part, trees = recipe.open(dataset), 0
    best: list[tuple[float, int, Workload]] = []
    for row, origin in RowClock().read(part):
        for tree in list_trees(part.tokenize(row, origin)):
            trees, size = trees + 1, measure_tree(tree)
            # The number decides ties: the first of equals stays.
            entry = (size.pair_ratio, -trees, size)
            (heapq.heappush if len(best) < top else heapq.heappushpop)(best, entry)
    return trees, [size for *_, size in sorted(best, reverse=True)]


def show_ranking(
    datasets: Sequence[DatasetConfig], recipe: Recipe, top: int, console: Console
) -> None:
    """Print a table of the datasets, highest mean pair ratio of their `top` best trees first.
    UserError where rows become no trees."""
    task = getattr(recipe, "task", None)
    if not isinstance(task, TreeTask) or task.mode != "tree":
        raise UserError('--rank compares trees; set task.kind and task.mode to "tree"')
    ranked = [(dataset, *measure_top(dataset, recipe, top)) for dataset in datasets]
    ranked.sort(key=lambda entry: -np.mean([size.pair_ratio for size in entry[2]] or [0.0]))
    table = Table("dataset", "trees", "K mean / max", "packed mean", "token ratio", "pair ratio")
    for dataset, trees, sizes in ranked:
        name = " ".join(filter(None, (dataset.path, dataset.name, dataset.split)))
        columns = ["-"] * 4
        if sizes:
            branches = [size.branches for size in sizes]
            columns = [f"{np.mean(branches):.1f} / {max(branches)}"]
            columns.append(f"{np.mean([size.packed_tokens for size in sizes]):,.0f}")
            for ratios in ([s.token_ratio for s in sizes], [s.pair_ratio for s in sizes]):
                columns.append(f"{np.mean(ratios):.2f} / {max(ratios):.2f}")
        table.add_row(name, f"{trees:,}", *columns)
    console.print(f"mean / max of the {top} trees of each dataset with the highest pair ratio")
    console.print(table)
