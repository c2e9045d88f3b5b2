"""vLLM's names of a folder's tensors, and which of our tensors each is made of."""

import numpy as np
import pytest
from fake_vllm import FakeVllm
from test_generation_publish import HELD, SHAPES, draw_params, open_servers, pieces

from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain_vllm.tensor_names import ServedNames, describe, read_shapes


def test_a_served_model_is_taken_apart_into_hugging_face_tensors():
    layer = "model.layers.0"
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    experts = [f"{layer}.mlp.experts.{i}.{part}_proj.weight" for i in (0, 1) for part in "ud"]
    attention = [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
    stored = {name: [4, 4] for name in (*experts, *attention, "model.embed_tokens.weight")}
    served = ["model.embed_tokens.weight", f"{layer}.self_attn.qkv_proj.base_layer.weight"]
    around = f"{layer}.mlp.experts.routed_experts"
    served += [f"{around}.w13_weight", f"{around}.w2_weight"]
    old = [name.replace("routed_experts.", "") for name in served]
    assert describe(old, fused, stored, tied=True) == stored
    assert describe([*served, "lm_head.weight"], fused, stored, tied=True) == stored
    assert describe([*served, "lm_head.weight"], fused, stored, tied=False) == {
        **stored,
        "lm_head.weight": None,
    }
    assert set(describe(served[:2], fused, {}, tied=True)) == {served[0], *attention}


def test_names_of_gpt_oss_as_vllm_serves_it():
    """Parts of names, ends of names; experts of one tensor, with biases."""
    layer = "model.layers.0"
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    experts = [f"gate_up_proj{end}" for end in ("", "_bias")]
    experts += [f"down_proj{end}" for end in ("", "_bias")]
    stored = {f"{layer}.mlp.experts.{name}": [2, 4] for name in experts}
    stored |= {f"{layer}.self_attn.{p}_proj.{e}": [4] for p in "qkvo" for e in ("weight", "bias")}
    stored |= {"model.embed_tokens.weight": [9, 4], f"{layer}.self_attn.sinks": [2]}
    stored[f"{layer}.mlp.router.bias"] = [2]
    renamed = ServedNames(
        parts={".self_attn.": ".attn."},
        suffixes={
            ".embed_tokens.weight": ".embedding.weight",
            ".gate_up_proj": ".w13_weight",
            ".down_proj": ".w2_weight",
            ".gate_up_proj_bias": ".w13_bias",
            ".down_proj_bias": ".w2_bias",
        },
    )
    served = [f"{layer}.attn.{m}.{e}" for m in ("qkv_proj", "o_proj") for e in ("weight", "bias")]
    served += [f"{layer}.attn.sinks", f"{layer}.mlp.router.bias", "model.embedding.weight"]
    for around in ("experts", "experts.routed_experts"):
        matrices = [f"{layer}.mlp.{around}.w{n}_{e}" for n in (13, 2) for e in ("weight", "bias")]
        assert describe([*served, *matrices], fused, stored, False, renamed) == stored


def test_shapes_are_read_from_the_files(tmp_path):
    assert read_shapes(str(tmp_path)) == {} and read_shapes("no/such-model") == {}
    write_folder(
        tmp_path, {n: (s, np.dtype("float32")) for n, s in SHAPES.items()}, pieces(draw_params())
    )
    assert read_shapes(str(tmp_path)) == HELD


@pytest.mark.parametrize("multimodal", [False, True])
def test_a_served_hybrid_has_the_names_of_its_folder(multimodal):
    """Parameters of vLLM's Qwen3.5 classes and their mappers, from vLLM's source; what no run
    trains may be listed."""
    long, inner = "model.language_model.", "language_model.model." if multimodal else "model."
    fused = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"], "in_proj_ba": ["in_proj_b", "in_proj_a"]}
    prefixes = {"model.language_model.": inner, "mtp.": None}
    if multimodal:
        prefixes |= {"model.visual.": "visual.", "lm_head.": "language_model.lm_head."}
    linear = "layers.0.linear_attn."
    parts = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"]
    trained = [f"{long}{linear}{part}.weight" for part in parts] + [f"{long}{linear}A_log"]
    trained += [f"{long}embed_tokens.weight", "lm_head.weight"]
    stored = {name: [2, 2] for name in (*trained, "model.visual.attn.qkv.weight", "mtp.fc.weight")}
    served = [
        f"{inner}{linear}{part}.weight" for part in ("in_proj_qkvz", "in_proj_ba", *parts[4:])
    ]
    served += [f"{inner}{linear}A_log", f"{inner}embed_tokens.weight"]
    served.append("language_model.lm_head.weight" if multimodal else "lm_head.weight")
    if multimodal:
        served.append("visual.attn.qkv.weight")
    actual = describe(served, fused, stored, tied=False, renamed=ServedNames(prefixes=prefixes))
    extra = {"model.visual.attn.qkv.weight"} if multimodal else set()
    assert actual == {name: [2, 2] for name in {*trained, *extra}}
    assert "lm_head.weight" not in describe(
        served, fused, stored, tied=True, renamed=ServedNames(prefixes=prefixes)
    )
    fake = FakeVllm(tensors=actual)
    shapes = dict.fromkeys(trained, (2, 2))
    with open_servers([fake]) as (_, servers, _):
        wide = {f"{long}{linear}A_log"}
        carried = ("model.visual.", "mtp.")
        sent = {name: np.full((2, 2), 0.1, np.float32) for name in trained}
        publisher = WeightPublisher(servers, pieces, TensorSet(shapes, wide, carried), delta=False)
        publisher.publish(0, sent)
        held = fake.shelves[0].tensors
        assert {name for name, tensor in held.items() if tensor.dtype == "float32"} == wide
        np.testing.assert_array_equal(held[min(wide)].bits.view(np.float32), np.float32(0.1))
        publisher.close()
