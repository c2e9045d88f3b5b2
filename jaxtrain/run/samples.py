"""samples.jsonl: what the model said, for people and for the tools that show runs.

Every line has `step`, `reward`, `rewards`, `prompt`, `completion`, `finish_reason` and `tokens`;
answers to a set of problems also `set`, those of a training round `prompt_number` and
`policy_version`.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SAMPLES = "samples.jsonl"


def append_samples(
    folder: Path, step: int, samples: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Append answers drawn at `step` to the samples of a run's folder; returns the lines."""
    lines = [{"step": step, **sample} for sample in samples]
    if lines:
        with (folder / SAMPLES).open("a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    return lines
