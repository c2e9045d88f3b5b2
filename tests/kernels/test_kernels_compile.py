"""Every Hopper kernel compiles to sm_90a machine code, and spills no more than recorded."""

import json
from pathlib import Path

import pytest
from other_devices import need_hopper_compiler, run_script

HERE = Path(__file__).parent
PTXAS = Path("/usr/local/cuda/bin/ptxas")

ALLOWED = {  # bytes of registers spilled to memory per thread; kernels that are not named: none
    ("gated_delta", "gated_delta_prepare"): 16,
    ("gated_delta", "gated_delta_walk"): 4,
    ("gated_delta", "gated_delta_walk_back"): 24,
    ("gated_delta", "gated_delta_gradients"): 228,
    ("gated_delta packed", "gated_delta_prepare"): 16,
    ("gated_delta packed", "gated_delta_walk_back"): 24,
    ("gated_delta packed", "gated_delta_gradients"): 228,
    ("moe clamped", "grouped_gated_gradient"): 4,
    ("logp_gather", "logp_d_logits"): 16,
    ("logp_gather softcap temperature", "logp_d_logits"): 128,
    ("weighted_logp softcap", "logp_exponentials"): 160,  # of them 80 for the largest logit
    ("attention d64", "tree_attention_bwd"): 24,
    ("attention d64 softcap", "tree_attention_bwd"): 40,
    ("attention d128", "tree_attention_bwd"): 16,
    ("attention d128 softcap", "tree_attention_bwd"): 16,
    ("attention d192 softcap", "tree_attention_dkv"): 48,
    ("attention d256 softcap", "tree_attention_dq"): 16,
}


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    need_hopper_compiler(PTXAS)
    printed = run_script(
        HERE / "sm90a.py", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTXAS="1"
    )
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    kernels = {row["kernel"] for row in rows}
    assert kernels == {
        "gated_delta_gradients",
        "gated_delta_prepare",
        "gated_delta_walk",
        "gated_delta_walk_back",
        "gated_delta_walk_states",
        "grouped_gated_gradient",
        "grouped_gated_product",
        "grouped_gather",
        "grouped_product",
        "grouped_weight_gradient",
        "logp_d_logits",
        "logp_exponentials",
        "logp_statistics",
        "rotate_heads",
        "rotate_heads_back",
        "tree_attention_bwd",
        "tree_attention_dk",
        "tree_attention_dkv",
        "tree_attention_dq",
        "tree_attention_dv",
        "tree_attention_fwd",
        "tree_attention_gather",
        "zeros",
    }
    # One that waits for each wgmma before the next: ptxas says so, and lets it pass.
    assert not [row for row in rows if row["serialized"]]
    spilled = {(row["case"], row["kernel"]): row["spills"] for row in rows}
    too_many = {name: n for name, n in spilled.items() if n > ALLOWED.get(name, 0)}
    assert not too_many
