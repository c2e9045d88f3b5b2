"""Tuned configs: one table per op and kind of device, kept in version control beside this file.

An op's config is its heuristic with what the table's entry changes.
Nothing is timed while a model trains or is traced, so numerics do not depend on the day:
`benchmarks/sweep.py --save` times the variants and puts the winners here.

    tuned/nvidia_h200/tree_attention_dkv.json
    {"source": "...", "entries": [{"key": {"head_dim": 64}, "near": {"tokens": 32768},
                                   "config": {"q_stages": 4}, "ms": 7.97}]}
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import TypeVar

from jaxtrain_kernels.mosaic import device_kind

TABLES = Path(__file__).parent / "tuned"
Config = TypeVar("Config")


def tuned(op: str, heuristic: Config, *, near: dict | None = None, **key) -> Config:
    """The config of `op` on the device that the program being traced is for.

    `heuristic` (a frozen dataclass) with the fields put over it that the device's table holds for
    `key`; of several entries with that key, those of the closest one, by ratio, to the sizes
    `near`. No table or no such entry: `heuristic` as it is.
    """
    entries = [e for e in table(op, device_kind()) if e["key"] == key]
    if not entries:
        return heuristic
    sizes = near or {}

    def distance(entry):
        return sum(
            abs(math.log(sizes[n] / reference_size))
            for n, reference_size in entry.get("near", {}).items()
        )

    # By ratio, because configs depend on sizes roughly logarithmically.
    return dataclasses.replace(heuristic, **min(entries, key=distance)["config"])


@functools.cache
def table(op: str, kind: str) -> tuple[dict, ...]:
    """The entries for an op on a kind of device; none where there is no table."""
    path = _path(op, kind)
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()


def save(op: str, kind: str, source: str, entries: list[dict]) -> Path:
    """Put entries into a table; those with the same key and sizes are replaced.

    The heuristic itself (an empty config) is only kept beside other configs of its key, whose
    sizes it bounds; a table that has nothing else is removed.
    """

    def place(entry):
        return json.dumps([entry["key"], entry.get("near", {})], sort_keys=True)

    merged = {place(e): e for e in (*table(op, kind), *entries)}
    changed = [e["key"] for e in merged.values() if e["config"]]
    saved_entries = [merged[name] for name in sorted(merged) if merged[name]["key"] in changed]
    path = _path(op, kind)
    table.cache_clear()
    if not saved_entries:
        path.unlink(missing_ok=True)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(entry) for entry in saved_entries)
    path.write_text(f'{{\n "source": {json.dumps(source)},\n "entries": [\n  {lines}\n ]\n}}\n')
    return path


def _path(op: str, kind: str) -> Path:
    return TABLES / kind.lower().replace(" ", "_") / f"{op}.json"
