"""NF4 over whole tensors: an independent bitsandbytes, folders of both forms, merging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_experts import FAMILIES
from families_gptoss import FAMILIES as GPT_OSS
from test_adapters_experts import BATCH, SIZES, WIDE, open_model
from test_adapters_nf4 import plain_round_trip
from tiny_models import RAW, compute_logits
from tiny_models import SIZES as TINY

from jaxtrain.adapters import nf4
from jaxtrain.adapters.fused import find_tensors
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.nf4 import TensorPart
from jaxtrain.adapters.peft import write_peft
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import full_index
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.models import build, families, loading, saving

# 384 blocks a matrix: groups of 256 reach from one expert into the next, and from gate into up.
BASES = {
    "qwen3_moe": {**RAW["qwen3_moe"], **SIZES},  # a tensor for each expert
    "granitemoe": {**TINY, **FAMILIES["granitemoe"], "hidden_size": 64, "intermediate_size": 384},
}


@pytest.mark.parametrize(
    ("num", "rows", "parts"),
    [
        (3, 128, [((0, 64),), ((64, 64),)]),  # a matrix: 256 blocks
        pytest.param(3, 96, [((0, 48),), ((48, 48),)], marks=pytest.mark.slow),  # 192
        # In turns: no experts.
        pytest.param(
            *(1, 96, [((0, 20), (48, 20)), ((20, 28), (68, 28))]), marks=pytest.mark.thorough
        ),
    ],
    ids=["even", "straddling", "runs"],
)
def test_matrices_of_a_tensor_equal_the_definition_on_all_of_it(num, rows, parts):
    tensor = np.random.default_rng(0).standard_normal((num, rows, 256)).astype(np.float32)
    tensor *= np.linspace(0.5, 2, num * rows, dtype=np.float32).reshape(num, rows, 1)
    expected, *_ = plain_round_trip(tensor)
    places = [TensorPart("t", runs, rows, num) for runs in parts]
    kernels = [jnp.asarray(tensor[:, position.rows].swapaxes(1, 2)) for position in places]
    stored = nf4.quantize_together(kernels, places)
    for position, kernel, entry in zip(places, kernels, stored, strict=True):
        shapes = nf4.nf4_shapes(kernel.shape, position)
        assert {k: v.shape for k, v in entry.items()} == {k: v.shape for k, v in shapes.items()}
        group = None if position.is_even(4) else position.groups(4)
        assert (group is None) == (num == 3 and rows == 128)
        actual_values = np.asarray(nf4.dequantize_nf4(entry, jnp.float32, group)).swapaxes(1, 2)
        # One rounding more or less in absmax; a code that differs would be off by a tenth.
        np.testing.assert_allclose(actual_values, expected[:, position.rows], rtol=1e-5, atol=1e-6)
    alone, *_ = plain_round_trip(tensor[0, places[0].rows])
    assert np.abs(alone - expected[0, places[0].rows]).max() > 1e-3


def fuse(folder, name):
    """{what transformers calls a tensor of experts: it} of a folder, in numpy."""
    files = open_folder(folder)
    actual = {n: files.fetch(n, full_index(t.shape)) for n, t in files.tensors.items()}
    if name == "granitemoe":
        return {n: array for n, array in actual.items() if array.ndim == 3}
    fused = {}
    for layer in range(SIZES["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts"

        def get(part, experts=experts):
            count = SIZES["num_local_experts"]
            return np.stack([actual[f"{experts}.{e}.{part}_proj.weight"] for e in range(count)])

        fused[f"{experts}.gate_up"] = np.concatenate([get("gate"), get("up")], 1)
        fused[f"{experts}.down"] = get("down")
    return fused


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_moe", pytest.param("granitemoe", marks=pytest.mark.thorough)]
)
def test_a_run_and_its_merged_folder_have_the_tensors_of_bitsandbytes(name, tmp_path):
    config = families.config_from_hf(BASES[name])
    saving.save(build.init(config, seed=3), config, tmp_path / "base")
    mesh = make_mesh(jax.devices()[:1])
    config, adapter, trained, frozen, rebuild = open_model("nf4_fused", mesh, tmp_path / "base")
    zero = {path: jnp.zeros_like(value) for path, value in trained.items()}
    for folder, params in [("none", zero), ("adapter", trained)]:
        write_peft(params, config, adapter, tmp_path / folder, None)
        options = {"quantize": "nf4_fused", "max_shard_bytes": 300_000}
        merge_adapter(tmp_path / "base", tmp_path / folder, tmp_path / f"{folder}-out", **options)
    assert len(list((tmp_path / "none-out").glob("*.safetensors"))) > 2
    before, after = (fuse(tmp_path / folder, name) for folder in ("base", "none-out"))
    for tensor, array in before.items():
        expected, *_ = plain_round_trip(array)
        np.testing.assert_allclose(after[tensor], expected, rtol=1e-5, atol=1e-7, err_msg=tensor)

    def logits(model):
        return np.asarray(compute_logits(model, BATCH))

    actual_values = logits(rebuild({**frozen, **trained}))
    scale = np.abs(actual_values).max()
    # fp32 sums in another order.
    assert (
        np.abs(logits(loading.load(tmp_path / "adapter-out")) - actual_values).max() < 1e-4 * scale
    )


def test_tensors_whose_blocks_are_of_many_outputs_are_refused():
    config = families.config_from_hf({**TINY, **GPT_OSS["gpt_oss"], **WIDE})
    with pytest.raises(UserError, match=r"down_proj has its inputs before its outputs.*mxfp4"):
        find_tensors(config)
