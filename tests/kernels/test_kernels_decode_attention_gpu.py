"""Kernels of decoding compile to sm_90a machine code that waits for memory alone: no spills."""

import json
from pathlib import Path

import pytest
from other_devices import need_hopper_compiler, run_script
from sm90a_triton import FLAGS, PTXAS

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_of_decoding_compile_for_hopper(tmp_path):
    need_hopper_compiler(Path(PTXAS))
    printed = run_script(
        HERE / "sm90a_triton.py",
        str(tmp_path),
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        XLA_FLAGS=FLAGS.format(folder=tmp_path),
    )
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    calls = [row for row in rows if row["kernel"] == "decode_attention"]
    merges = [row for row in rows if row["kernel"] == "decode_attention_merge"]
    assert len(calls) == 19 and len(merges) == 18  # with 16 programs a row nothing is merged
    assert all(row["in_flight"] for row in calls)
    assert [row["kernel"] for row in rows if row["case"] == "delta"] == ["gated_delta_decode"]
    convolutions = {row["kernel"] for row in rows if row["case"] == "conv"}
    assert {"conv_heads", "conv_heads_back", "causal_conv_back"} <= convolutions
    assert not [row for row in rows if row["spills"]]
