"""Drawing tokens never copies the KV cache: what the compiled program makes of its size."""

import json
from pathlib import Path

import pytest
from cache_program import compile_chunk, compile_cycles, describe
from other_devices import need_hopper_compiler, run_script

WRITES = {"scatter", "dynamic-update-slice"}  # the latter by XLA's older emitter for CPUs
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "fusion", *WRITES}


def check(actual):
    """Only scatters of new keys, in place: a copy would show in the program and in its memory."""
    assert WRITES & set(actual["made"])
    assert set(actual["made"]) <= IN_PLACE
    # A CPU copies one of the four layers of k and of v.
    assert actual["temp"] < actual["cache"]


@pytest.mark.parametrize("scan", [pytest.param(True, marks=pytest.mark.slow), False])
def test_on_a_cpu(scan):
    check(describe(*compile_chunk(scan, "float32")))


@pytest.mark.slow
def test_cycles_with_a_draft_on_a_cpu():
    check(describe(*compile_cycles("float32")))


@pytest.mark.slow
def test_on_a_hopper_gpu():
    need_hopper_compiler()
    script = Path(__file__).with_name("cache_program.py")
    printed = run_script(script, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len(rows) == 5
    for row in rows[:4]:  # the last two of them in 8 bits: never widened either
        check(row)
        assert row["temp"] < row["cache"] / 4  # not even a layer
    assert set(rows[4]["made"]) <= IN_PLACE, "cycles with a draft"
