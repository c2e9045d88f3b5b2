"""Speed against the PyTorch peer, held against what was measured before.

python benchmarks/train_step.py --layers unroll --remat none --peer torch --out now
python benchmarks/speed_guard.py now.json

A ratio is the peer's time over ours, both of one report: one machine, one day, so that it means the
same on every card. Of each setting (model, work, dtypes, adapter, rows) the fastest of ours counts.
Exits with 1 where a ratio is more than 10 % below the stored one (--stored, by default
benchmarks/results/train_step_h200.json), or where nothing can be compared.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "results" / "train_step_h200.json"
ALLOWED = 0.1
"""Share of a ratio that may be lost: clocks and temperatures move one by a few percent."""
SETTING = ("model", "work", "param_dtype", "dtype", "lora", "rows")
PEER = "PyTorch"


def read_ratios(reports: Sequence[Mapping[str, Any]]) -> dict[tuple, float]:
    """Return {setting: the peer's seconds a step over ours} of a results file; of several reports
    with both the best ratio. Raises ValueError for rows that are none of train_step."""
    ratios: dict[tuple, float] = {}
    for report in reports:
        times: dict[tuple, dict[str, float]] = {}
        for row in report["rows"]:
            if row.get("error"):
                continue
            missing = [key for key in (*SETTING, "by", "step_s") if key not in row]
            if missing:
                raise ValueError(f"a row has no {', '.join(missing)}; expected train_step's rows")
            setting = tuple(row[key] for key in SETTING)
            best = times.setdefault(setting, {})
            best[row["by"]] = min(row["step_s"], best.get(row["by"], float("inf")))
        for setting, best in times.items():
            if best.keys() >= {PEER, "jaxtrain"}:
                ratio = best[PEER] / best["jaxtrain"]
                ratios[setting] = max(ratio, ratios.get(setting, 0.0))
    return ratios


def compare(
    measured: Mapping[tuple, float], stored: Mapping[tuple, float]
) -> tuple[list[str], bool]:
    """Return (a line for each setting that both have, whether none has lost more than ALLOWED)."""
    lines, fine = [], True
    for setting in (setting for setting in measured if setting in stored):
        change = measured[setting] / stored[setting] - 1
        slow = change < -ALLOWED
        fine &= not slow
        name = " ".join(f"{key}={value}" for key, value in zip(SETTING, setting, strict=True))
        lines.append(
            f"{'SLOWER' if slow else 'ok':<7}{measured[setting]:.2f}x the peer's speed, stored"
            f" {stored[setting]:.2f}x ({change:+.1%})  {name}"
        )
    return lines, fine and bool(lines)


def read_file(path: Path) -> dict[tuple, float]:
    """Return the ratios of a results file, one report or a list of them."""
    content = json.loads(path.read_text())
    return read_ratios(content if isinstance(content, list) else [content])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("now", type=Path, help="OUT.json of train_step.py with --peer torch")
    parser.add_argument("--stored", type=Path, default=STORED)
    options = parser.parse_args(arguments)
    lines, fine = compare(read_file(options.now), read_file(options.stored))
    print("\n".join(lines) or f"{options.now} and {options.stored} share no setting with a peer")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
