"""Kernel durations of a jax profile, summed by what the kernels do.

python benchmarks/train_step.py --trace profiles ...
python benchmarks/gpu_profile.py profiles/0 --steps 3

Reads the folder that `train_step.py --trace` wrote: the trace, and the compiled program, which
says what source operation a kernel comes from. Prints milliseconds a step by kind, and the longest
kernels.
"""

import argparse
import collections
import gzip
import json
import re
from pathlib import Path

KINDS = [
    ("attention forward", r"tree_attention_fwd"),
    ("attention backward", r"tree_attention"),
    ("head", r"logp_"),
    ("gemm", r"gemm|nvjet|cublas|cutlass|sm90_xmma|splitK"),
    ("copies", r"memcpy|memset|^copy|wrapped_slice|dynamic_update_slice|dynamic_slice"),
]
"""Kinds by kernel name, the first that matches; others go by their source operation."""


def read_events(folder: Path) -> list[dict]:
    """Kernels and copies of all GPUs of the newest trace in `folder`, with name, dur and args."""
    path = max(folder.rglob("*.trace.json.gz"), key=lambda actual: actual.stat().st_mtime)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    devices, streams = set(), set()
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            if "GPU" in event["args"]["name"]:
                devices.add(event["pid"])
        if event.get("ph") == "M" and event["name"] == "thread_name":
            if event["args"]["name"].startswith("Stream"):
                streams.add((event["pid"], event["tid"]))
    return [
        event
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (event["pid"], event["tid"]) in streams
    ]


def read_sources(folder: Path) -> dict[str, str]:
    """{instruction of the compiled program: operation that it comes from}."""
    path = folder / "program.txt.gz"
    if not path.exists():
        return {}
    with gzip.open(path, "rt") as file:
        return dict(re.findall(r"%(\S+) = .*metadata=\{op_name=\"([^\"]*)\"", file.read()))


def classify(event: dict, sources: dict[str, str]) -> tuple[str, str]:
    """(kind, operation it comes from) of a kernel."""
    name = event["name"]
    instruction = event.get("args", {}).get("hlo_op", name)
    source = sources.get(instruction, sources.get(name.replace("_", "."), ""))
    source = re.sub(r"jit\(step\)/|closed_call/|while/body/|checkpoint/|eval_jaxpr/", "", source)
    for kind, pattern in KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind, source
    inside = "backward" if "transpose" in source else "forward" if "jvp" in source else "update"
    return f"fusions, {inside}", source


def summarize(folder: Path, steps: int, longest: int) -> str:
    """The table."""
    events, sources = read_events(folder), read_sources(folder)
    kinds: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    kernels: collections.Counter = collections.Counter()
    calls: collections.Counter = collections.Counter()
    for event in events:
        kind, source = classify(event, sources)
        kinds[kind] += event["dur"]
        counts[kind] += 1
        key = (kind, event["name"][:70], source[-80:])
        kernels[key] += event["dur"]
        calls[key] += 1
    first = min(event["ts"] for event in events)
    last = max(event["ts"] + event["dur"] for event in events)
    lines = [f"{(last - first) / steps / 1e3:9.2f} ms a step from first to last kernel"]
    for kind, total in kinds.most_common():
        lines.append(f"{total / steps / 1e3:9.2f} ms {counts[kind] / steps:7.0f} calls  {kind}")
    lines.append(f"{sum(kinds.values()) / steps / 1e3:9.2f} ms in all")
    lines.append("")
    for key, total in kernels.most_common(longest):
        kind, name, source = key
        per_entry = f"{calls[key] / steps:6.0f} x {total / calls[key]:8.1f} us"
        lines.append(f"{total / steps / 1e3:9.3f} ms {per_entry}  {kind:<20} {name}  {source}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="steps in the trace")
    parser.add_argument("--longest", type=int, default=60)
    options = parser.parse_args()
    print(summarize(options.folder, options.steps, options.longest))


if __name__ == "__main__":
    main()
