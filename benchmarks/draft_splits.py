"""DFlash on several GPUs: the target on devices of its own against the target in the step.

python benchmarks/draft_splits.py --out benchmarks/results/draft_splits_h200
XLA_FLAGS=--xla_force_host_platform_device_count=4 python benchmarks/draft_splits.py --size tiny

The ordinary command line on draft.py's work (Qwen3-8B's shape, random weights and tokens), one
process for each split: `0` runs the target in the step, sharded over all devices, `n` gives the
last n devices to the target (task.target.source = "ahead") and trains on the others. A row of
--length tokens for each device that trains.

rows/s    rows that were trained a second, in the steps after the warm-up: what splits compare by
busy      share of the time in which the target's devices worked; starved: in which those that train
          had no states to train on
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from draft import SIZES, log, write_config
from preference import describe_hardware, run_limited

WARM_UP, STEPS = 4, 12


def run_split(options, split: int, folder: Path) -> dict:
    """The rates of one split."""
    name = f"split{split}"
    table = write_config(options, "dflash", folder)
    table["run"]["output_dir"] = str(folder / name)
    table["data"]["sequence_len"] = options.length
    table["checkpoint"] = {"every": 10**6, "every_minutes": None}
    table["log"] = {"plot": False, "console": "off"}
    if split:
        table["task"]["target"] = {"source": "ahead", "devices": split}
    config, metrics = folder / f"{name}.json", folder / name / "metrics.jsonl"
    config.write_text(json.dumps(table))

    def read_steps() -> list[dict]:
        whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
        return [line for line in map(json.loads, whole.splitlines()) if "loss" in line]

    wanted = WARM_UP + STEPS
    command = [sys.executable, "-m", "jaxtrain.main", "--config", str(config)]
    began = time.perf_counter()
    log, cut = run_limited(command, options.seconds, lambda: len(read_steps()) >= wanted)
    steps = read_steps()
    row = {"target_devices": split, "whole_s": time.perf_counter() - began}
    if len(steps) < WARM_UP + 3:
        return row | {"failed": f"cut off after {options.seconds:.0f} s" if cut else log.strip()}
    timed = steps[WARM_UP:]
    times = [line["time"] for line in timed]
    tokens = sum(line["tokens"] for line in timed[1:])
    return row | {
        "rows_per_s": tokens / options.length / (times[-1] - times[0]),
        "rows_per_step": tokens / options.length / (len(timed) - 1),
        "step_s": statistics.median(np.diff(times).tolist()),
        "peak_gib": timed[-1]["peak_memory_gib"],
        "busy": timed[-1].get("target/busy"),
        "starved": timed[-1].get("target/starved"),
        "loss": [steps[0]["loss"], steps[-1]["loss"]],
    }


def describe(row: dict) -> str:
    """One line."""
    split = row["target_devices"]
    start = f"{f'{split} for the target' if split else 'in the step':<18}"
    if "failed" in row:
        return f"{start} failed: {' '.join(row['failed'].split())[-700:]}"
    shares = ""
    if row["busy"] is not None:
        shares = f"  target busy {row['busy']:.0%}, training starved {row['starved']:.0%}"
    return (
        f"{start} {row['rows_per_s']:>7.2f} rows/s  step {row['step_s']:.4f} s of"
        f" {row['rows_per_step']:.0f} rows  peak {row['peak_gib']:.1f} GiB  process"
        f" {row['whole_s']:.0f} s{shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=120.0, help="longest of one process")
    parser.add_argument("--remat", default="none", help="of the draft")
    parser.add_argument("--scan", action="store_true", help="one compiled layer of the draft")
    parser.add_argument("--unroll", action="store_true", help="every layer of the target")
    parser.add_argument("--out", type=Path, help="path without suffix for JSON and text")
    options = parser.parse_args()
    report = {
        "command": " ".join(["python benchmarks/draft_splits.py", *sys.argv[1:]]).split(" --out")[
            0
        ],
        "hardware": describe_hardware(),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as place:
        for split in options.splits:
            row = run_split(options, split, Path(place))
            report["rows"].append(row)
            log(describe(row))
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
                lines = [report["command"], report["hardware"], *map(describe, report["rows"])]
                options.out.with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
