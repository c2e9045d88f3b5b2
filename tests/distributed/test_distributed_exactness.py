"""Every mesh gives the loss and the gradients of one device: documents and trees, full and LoRA.

One process with 8 fake devices compares many meshes; see mesh_worker.py. In float32 the two sides
differ by the order of sums: the largest difference seen is 1.7e-6 of the parameter's largest
gradient, so 4e-6 is allowed; one wrong pair in a mask shows above 1e-3.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from other_devices import set_cpus

HERE = Path(__file__).parent


def run_worker(*names: str) -> list[dict]:
    root = HERE.parents[1]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{root}:{root / 'kernels'}:{root / 'tests/plain'}",
        **set_cpus(8),
    }
    command = [sys.executable, str(HERE / "mesh_worker.py"), *names]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["documents, DoRA", "biases and windows, trees"], marks=pytest.mark.slow),
        pytest.param(["documents", "trees", "pairs"], marks=pytest.mark.thorough),
    ],
)
def test_any_mesh_gives_the_update_of_one_device(names):
    cases = run_worker(*names)
    assert {line["case"] for line in cases} == set(names)
    for line in cases:
        assert line["loss"] == pytest.approx(line["one"], rel=1e-6), line
        assert line["error"] < 4e-6, line
