"""A draft and its target that train in milliseconds, and runs of them; for tests of the sources of
the target's states."""

import json

import numpy as np
from toy_run import MODEL

from jaxtrain.main import main

CONFIG = (
    MODEL.replace("num_hidden_layers = 1", "num_hidden_layers = 3")
    + """
[run]
output_dir = "FOLDER/run"
max_steps = 4
export = false
[data]
sequence_len = 64
global_batch_size = 12
[[data.datasets]]
path = "FOLDER/rows.jsonl"
[[data.eval_datasets]]
path = "FOLDER/held.jsonl"
[optim]
learning_rate = 3e-3
[checkpoint]
every = 2
[log]
plot = false
[task]
kind = "dflash"
block_size = 4
num_anchors = 8
min_loss_tokens = 4
[task.draft]
num_layers = 1
target_layers = [0, 1]
"""
)


def write_config(folder):
    """Write draft.toml and its rows."""
    for name, count in (("rows", 40), ("held", 3)):
        rows = [
            {"prompt": f"{name} {n}?", "completion": f" {n + 1} and {n * 7} {name}"}
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "draft.toml").write_text(CONFIG.replace("FOLDER", str(folder)))


def run(folder, name, *overrides):
    """{step: its numbers} of a run; of held-out data under "eval/..."."""
    messages = [f"run.output_dir={folder / name}", *overrides]
    assert main(["--config", str(folder / "draft.toml"), *messages]) == 0
    return read(folder / name)


def read(position):
    actual: dict[int, dict] = {}
    for line in map(json.loads, (position / "metrics.jsonl").read_text().splitlines()):
        actual.setdefault(line["step"], {}).update(line)
    return actual


def compare(actual, expected, rtol=2e-6):
    """float32; another number of devices sums in another order."""
    assert actual.keys() == expected.keys()
    for step, numbers in expected.items():
        for key in ("loss", "grad_norm", "accept_len", "eval/loss", "eval/acc"):
            if key in numbers:
                np.testing.assert_allclose(
                    actual[step][key], numbers[key], rtol=rtol, err_msg=f"{key} at step {step}"
                )
    assert "eval/loss" in expected[4]
