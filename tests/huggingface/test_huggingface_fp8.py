"""FP8 folders with scales of blocks, as DeepSeek, Kimi, GLM, MiniMax and Qwen publish them, or with
one scale for a matrix, as Mistral and NVIDIA do, and NVIDIA's NVFP4."""

import json

import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.huggingface.packed import BFLOAT16, FLOAT8, open_folder
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain.models import build, families, loading, saving

BLOCK = 128
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def store(folder, tensors):
    plan = {name: (array.shape, array.dtype) for name, array in tensors.items()}
    pieces = (SplitPiece(n, a.shape, full_index(a.shape), a) for n, a in tensors.items())
    # A few to a shard: codes and scales then lie in different ones.
    write_folder(folder, plan, pieces, max_shard_bytes=40_000)


def quantize(array):
    """(codes, scales) of [out, in], by hand: each block's largest magnitude becomes 448."""
    rows, columns = (-(-size // BLOCK) for size in array.shape)
    codes, scales = np.empty(array.shape, FLOAT8), np.empty((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            part = np.s_[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scales[i, j] = np.abs(array[part]).max() / 448
            codes[part] = (array[part] / scales[i, j]).astype(FLOAT8)
    return codes, scales


def test_any_part_is_codes_times_the_scale_of_its_block(tmp_path):
    rng = np.random.default_rng(0)
    # Blocks at the edges are short; sizes of blocks differ by far.
    wide = rng.standard_normal((200, 300)) * np.exp(rng.standard_normal((200, 1)) * 3)
    codes, scales = quantize(wide.astype(np.float32))
    store(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales, "b": np.ones(3, np.float32)})
    files = open_folder(tmp_path)
    assert set(files.tensors) == {"a.weight", "b"}
    stored = files.tensors["a.weight"]
    assert stored.shape == (200, 300) and stored.dtype == BFLOAT16
    expected = np.empty((200, 300), np.float32)
    for i, j in np.ndindex(200, 300):
        expected[i, j] = np.float32(codes[i, j]) * scales[i // BLOCK, j // BLOCK]
    expected = expected.astype(BFLOAT16)
    for index in [
        full_index((200, 300)),
        (slice(100, 200), slice(0, 300)),
        (slice(130, 131), slice(127, 257)),
        (slice(0, 200, 2), slice(5, 300, 7)),
    ]:
        assert files.fetch("a.weight", index).tobytes() == expected[index].tobytes(), index


def test_a_model_in_fp8_is_one_of_its_decoded_weights(tmp_path):
    """Also the layers that are only carried along, which an export has in bfloat16, too."""
    raw = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **dict(vocab_size=50, hidden_size=160, intermediate_size=144, num_hidden_layers=2),
        **dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64),
        **dict(q_lora_rank=16, kv_lora_rank=140, qk_nope_head_dim=8, qk_rope_head_dim=4),
        **dict(v_head_dim=8, moe_intermediate_size=16, n_routed_experts=4, n_group=2),
        **dict(num_experts_per_tok=2, topk_group=1, first_k_dense_replace=1),
        **dict(num_nextn_predict_layers=1),
    }
    config = families.config_from_hf(raw)
    shapes = {}
    params = dict(nnx.to_flat_state(nnx.state(build.abstract(config))))
    params = {".".join(map(str, path)): leaf.get_value().shape for path, leaf in params.items()}
    for entry in families.family(config).names(config):
        shapes |= entry.op.shapes(params[entry.param])
    rng = np.random.default_rng(1)
    tensors, expected = {}, {}
    actual = {name: rng.standard_normal(shape).astype(BFLOAT16) for name, shape in shapes.items()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    actual[bias] = actual[bias].astype(np.float32)
    ahead = "model.layers.2.eh_proj.weight"
    actual[ahead] = rng.standard_normal((160, 320)).astype(BFLOAT16)
    for name, array in actual.items():
        linear = "_proj" in name
        if linear:
            codes, scales = quantize(np.asarray(array, np.float32))
            tensors |= {name: codes, f"{name}_scale_inv": scales}
            blown = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))
            blown = blown[: array.shape[0], : array.shape[1]]
            expected[name] = (codes.astype(np.float32) * blown).astype(BFLOAT16)
        else:
            tensors[name] = expected[name] = array
    store(tmp_path / "fp8", tensors)
    text = json.dumps({**config.to_hf(), "quantization_config": QUANTIZED})
    (tmp_path / "fp8" / "config.json").write_text(text)

    loaded = loading.load(tmp_path / "fp8", param_dtype="bfloat16")
    saving.save(loaded, families.read_config(tmp_path / "fp8"), tmp_path / "out")
    out = open_folder(tmp_path / "out")
    assert set(out.tensors) == set(expected)
    for name, array in expected.items():
        got = out.fetch(name, full_index(array.shape))
        assert got.dtype == array.dtype and got.tobytes() == array.tobytes(), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in written and written["torch_dtype"] == "bfloat16"
    assert written["num_nextn_predict_layers"] == 1


def test_what_is_not_read_is_named(tmp_path):
    codes, scales = quantize(np.ones((130, 64), np.float32))
    store(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales[:1]})
    with pytest.raises(UserError, match=r"a.weight_scale_inv.*\(1, 1\) does not fit.*\(2, 1\)"):
        open_folder(tmp_path)
    packing = {**QUANTIZED, "weight_block_size": [64, 64]}
    raw = {"model_type": "qwen3", "quantization_config": packing}
    with pytest.raises(UserError, match=r"weight_block_size is a list, \[64, 64\].*128 x 128"):
        families.config_from_hf(raw)
    packing = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}
    with pytest.raises(UserError, match="W4A8_AWQ.*FP8 and NVFP4.*that it was made of"):
        families.config_from_hf({**raw, "quantization_config": packing})


PARTS = [
    full_index((6, 64)),
    (slice(1, 5), slice(0, 64)),
    (slice(2, 3), slice(15, 49)),
    (slice(0, 6, 2), slice(3, 64, 7)),
]


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_one_scale_for_a_matrix(tmp_path, name, shape):
    """transformers' FP8 without blocks, compressed-tensors' strategy tensor, modelopt's FP8."""
    wide = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    scale = np.float32(np.abs(wide).max() / 448)
    codes = (wide / scale).astype(FLOAT8)
    one = np.ones(shape, np.float32)
    served = {"a.input_scale": one, "a.activation_scale": one, "k_proj.k_scale": one}
    store(tmp_path, {"a.weight": codes, f"a.{name}": np.full(shape, scale), **served})
    files = open_folder(tmp_path)
    assert set(files.tensors) == {"a.weight"}, "scales of activations are a server's"
    expected = (codes.astype(np.float32) * scale).astype(BFLOAT16)
    for index in PARTS:
        assert files.fetch("a.weight", index).tobytes() == expected[index].tobytes(), index
    experts = np.array([1.0, 2.0], np.float32).reshape(2, 1, 1)
    store(tmp_path / "e", {"x": np.stack([codes, codes]), "x_scale_inv": experts})
    got = open_folder(tmp_path / "e").fetch("x", (slice(1, 2), *PARTS[2]))
    assert (got[0] == 2 * codes.astype(np.float32)[PARTS[2]]).all(), "one for each expert"


def test_nvfp4_by_hand(tmp_path):
    """modelopt: two codes of 4 bits a byte, the first in its low half; a scale in FP8 for 16
    numbers, and one for all."""
    rng = np.random.default_rng(1)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    levels = np.array([*magnitudes, *(-size for size in magnitudes)], np.float32)
    codes = rng.integers(0, 16, (6, 64), dtype=np.uint8)
    scales = rng.uniform(0.5, 300, (6, 4)).astype(FLOAT8)
    packed, factor = codes[:, ::2] | codes[:, 1::2] << 4, np.float32(0.0007)
    tensors = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": factor}
    store(tmp_path / "x", {**{n: np.asarray(t) for n, t in tensors.items()}})
    files = open_folder(tmp_path / "x")
    assert set(files.tensors) == {"a.weight"} and files.tensors["a.weight"].shape == (6, 64)
    expected = np.empty((6, 64), np.float32)
    for i, j in np.ndindex(6, 64):
        expected[i, j] = levels[codes[i, j]] * (np.float32(scales[i, j // 16]) * factor)
    for index in PARTS:
        got = files.fetch("a.weight", index)
        assert got.tobytes() == expected[index].astype(BFLOAT16).tobytes(), index
    store(tmp_path / "y", {"a.weight": packed, "a.weight_scale": scales})
    with pytest.raises(UserError, match=r"needs a.weight_scale \(6, 4\) and a.weight_scale_2"):
        open_folder(tmp_path / "y")


def test_nvfp4_of_compressed_tensors(tmp_path):
    """Its package divides by the scale of all, and rounds scales to bfloat16 on the way."""
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    torch.manual_seed(0)
    weight = torch.randn(6, 64)
    factor = torch.tensor([448 * 6 / weight.abs().max()])
    scale = (weight.reshape(6, 4, 16).abs().amax(-1) / 6 * factor).to(torch.float8_e4m3fn)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": factor}
    stored = NVFP4PackedCompressor.compress(dict(state), scheme)
    tensors = {f"a.{name}": tensor for name, tensor in stored.items()}
    arrays = {
        name: tensor.view(torch.uint8).numpy().view(FLOAT8)
        if tensor.dtype == torch.float8_e4m3fn
        else tensor.numpy()
        for name, tensor in tensors.items()
    }
    store(tmp_path, arrays)
    got = open_folder(tmp_path).fetch("a.weight", full_index((6, 64))).astype(np.float32)
    expected = NVFP4PackedCompressor.decompress(dict(stored), scheme)["weight"].float().numpy()
    np.testing.assert_allclose(got, expected, rtol=0.01)
    assert np.abs(got - weight.numpy()).max() < 0.6, "a sixth of the largest of a group at most"
