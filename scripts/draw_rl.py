"""Draw rewards and held-out accuracy of RL runs: docs/images/rl_calculator.png.

python scripts/draw_rl.py OUTPUT.png METRICS.jsonl [METRICS.jsonl ...]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

WINDOW = 5


def draw(output: str, files: list[str]) -> None:
    """Draw each file in its color: rounds as dots, their running mean as a line, evaluations at the
    right."""
    figure, (first, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for number, file in enumerate(files):
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        steps = [line["step"] for line in lines if "reward" in line]
        rewards = np.array([line["reward"] for line in lines if "reward" in line])
        means = [rewards[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(rewards))]
        (line,) = first.plot(steps, means, label=f"seed {number}")
        first.plot(steps, rewards, ".", color=line.get_color(), alpha=0.3)
        held_out = [
            (line["step"], value)
            for line in lines
            for name, value in line.items()
            if name.startswith("eval/") and name.endswith("accuracy")
        ]
        right.plot(*zip(*held_out, strict=True), "o-", color=line.get_color())
    first.set(title=f"mean reward of a round (mean of {WINDOW})", xlabel="step", ylim=(0, 1))
    right.set(title="held-out questions right, temperature 1", xlabel="step", ylim=(0, 1))
    for axis in (first, right):
        axis.grid(alpha=0.3)
    first.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output")
    parser.add_argument("files", nargs="+", help="metrics.jsonl of each run")
    options = parser.parse_args()
    draw(options.output, options.files)
