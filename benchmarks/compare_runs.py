"""Two runs side by side: how far their losses, parameters and moments are apart.

jaxtrain --config configs/tree_ablation/synthetic_tree.toml model=tiny run.max_steps=40
jaxtrain --config configs/tree_ablation/synthetic_per_branch.toml model=tiny run.max_steps=40
python benchmarks/compare_runs.py runs/tree_ablation/synthetic_tree runs/tree_ablation/synthetic_per_branch

For runs that should be one: trees and their branches, other meshes, other microsteps. Prints the
largest relative difference of the losses of any step; and, at the newest step of which both have a
checkpoint, for parameters and each kind of the optimizer's slots (Adam's mu and nu) the tensor that
is furthest apart: max |a - b| / max |a|, and the root mean square of a - b over that of a.
"""  # noqa: E501

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp


class Drift(NamedTuple):
    """Distance between the tensors of one kind."""

    tensor: str
    """Name of the tensor that differs most."""
    largest: float
    """max |a - b| / max |a| of that tensor."""
    rms: float
    """Root mean square of a - b over that of a, of all tensors."""


def read_losses(run: Path) -> dict[int, float]:
    """Return {step: training loss} of a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def find_steps(run: Path) -> set[int]:
    """Return the steps of a run's checkpoints."""
    return {int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit()}


def read_arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by name, on one device."""
    folder = (run / "checkpoints" / str(step) / "state").absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree: Any = checkpointer.metadata(folder).item_metadata.tree
        placed = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(sharding=placed), tree)
        arrays = checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=shapes))
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: np.asarray(leaf) for name, (_, leaf) in zip(names, leaves, strict=True)}


def kind_of(name: str) -> str | None:
    """Return the kind of an array, "params" or the name of the optimizer's slot; None: others."""
    parts = [part for part in name.replace(".", "/").split("/") if part]
    if parts[0] == "params":
        return "params"
    return next((part for part in parts if part in ("mu", "nu", "trace", "z")), None)


def measure_drift(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> dict[str, Drift]:
    """Return the drift of each kind of arrays. Raises ValueError where the names differ."""
    if first.keys() != second.keys():
        raise ValueError(f"only one has {', '.join(sorted(first.keys() ^ second.keys())[:4])}")
    worst: dict[str, Drift] = {}
    sums: dict[str, np.ndarray] = {}
    for name, a in first.items():
        kind = kind_of(name)
        if kind is None or not np.issubdtype(a.dtype, np.floating):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(second[name], np.float64)
        largest = float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-300))
        if kind not in worst or largest > worst[kind].largest:
            worst[kind] = Drift(name, largest, 0.0)
        squares = np.array([np.square(a - b).sum(), np.square(a).sum()])
        sums[kind] = sums.get(kind, 0.0) + squares
    return {
        kind: drift._replace(rms=float(np.sqrt(sums[kind][0] / max(sums[kind][1], 1e-300))))
        for kind, drift in worst.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the comparison of two run folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs=2)
    first, second = parser.parse_args(arguments).runs
    losses = read_losses(first), read_losses(second)
    steps = sorted(losses[0].keys() & losses[1].keys())
    if not steps:
        sys.exit(f"{first} and {second} have no step in common")
    apart = [abs(losses[0][step] / losses[1][step] - 1) for step in steps]
    worst = int(np.argmax(apart))
    print(f"loss of {len(steps)} steps: at most {apart[worst]:.1e} apart (step {steps[worst]})")
    common = find_steps(first) & find_steps(second)
    if not common:
        sys.exit("no checkpoint of the same step")
    step = max(common)
    drifts = measure_drift(read_arrays(first, step), read_arrays(second, step))
    for kind, drift in drifts.items():
        print(
            f"{kind} at step {step}: rms {drift.rms:.1e}, at most {drift.largest:.1e} of the"
            f" largest in {drift.tensor}"
        )


if __name__ == "__main__":
    main()
