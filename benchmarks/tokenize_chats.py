"""Rows of chats that a core makes tokens and masks of in a second.

    python benchmarks/tokenize_chats.py MODEL_FOLDER gsm8k_train.jsonl

First without any word remembered, and again. CPU seconds of this process, so that a busy machine
changes little; templates that are rendered in a process of their own count by wall time, too.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer


def read_chats(file: Path) -> list[dict[str, Any]]:
    """Return rows with messages; those with question and answer become such."""
    rows = map(json.loads, file.read_bytes().splitlines())
    return [
        row
        if "messages" in row
        else {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows
    ]


def measure_passes(model: str, file: Path, passes: int = 2) -> list[dict[str, float]]:
    """Return rows a CPU second and a wall second, and tokens a row, of each pass over a file."""
    rows = read_chats(file)
    tokenize = RowTokenizer(DatasetConfig(path=str(file)), load_tokenizer(model), 1 << 20, "drop")
    results = []
    for _ in range(passes):
        wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
        for row in rows:
            tokens += sum(len(getattr(item, "tokens", ())) for item in tokenize(row, ""))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        results.append(
            {"cpu": len(rows) / cpu, "wall": len(rows) / wall, "tokens": tokens / len(rows)}
        )
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    for number, result in enumerate(measure_passes(options.model, options.file), 1):
        print(
            f"pass {number}: {result['cpu']:,.0f} rows a CPU second,"
            f" {result['wall']:,.0f} a second, {result['tokens']:.0f} tokens a row",
            flush=True,
        )
