"""Gemma's folders: text out of multimodal ones, layers that share keys, what is refused by name."""

import json

import jax
import numpy as np
import pytest
from families_gemma import FAMILIES, FULL, SLIDING
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_models import SIZES

from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving

KINDS = {
    "gemma3": ("Gemma3", "language_model.model.", "vision_tower.vision_model."),
    "gemma4_per_layer": ("Gemma4", "model.language_model.", "model.embed_vision."),
}
"""(name of the classes, what tensors of text and of a tower begin with)."""


def write(folder, raw: dict, tensors: dict) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")


def draw(config):
    """A model of random numbers, without a compilation."""
    rng = np.random.default_rng(1)
    graphdef, state = nnx.split(build.abstract(config))
    numbers = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), state)
    return nnx.merge(graphdef, jax.tree.map(jax.numpy.asarray, numbers))


def read_text(name: str) -> dict:
    return {**SIZES, **FAMILIES[name], "dtype": "float32"}


@pytest.mark.parametrize(
    "name", ["gemma3", pytest.param("gemma4_per_layer", marks=pytest.mark.slow)]
)
def test_text_of_a_multimodal_folder(name, tmp_path):
    """Numbers match those of a text-only folder; towers, and keys that no layer uses, come out
    again byte by byte, with the same config.json."""
    family, prefix, tower = KINDS[name]
    text = read_text(name)
    plain = families.config_from_hf(text)
    saving.save(draw(plain), plain, tmp_path / "text")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    rng = np.random.default_rng(0)
    beside = {f"{tower}weight": rng.standard_normal((3, 5)).astype(np.float16)}
    if plain.num_hidden_layers == 6:
        unused = f"{prefix}layers.5.self_attn.k_proj.weight"
        beside[unused] = rng.standard_normal((32, 32)).astype(np.float32)
    named = {f"{prefix}{key.removeprefix('model.')}": value for key, value in tensors.items()}
    around = {
        "architectures": [f"{family}ForConditionalGeneration"],
        "model_type": family.lower(),
        "image_token_id": 90,
    }
    raw = {**around, "text_config": text}
    write(tmp_path / "in", raw, named | beside)

    config, model = families.read_config(tmp_path / "in"), loading.load(tmp_path / "in")
    assert config.media_tokens == {90: "image_token_id"}
    actual_values, reference = (
        jax.tree.leaves(nnx.state(m)) for m in (model, loading.load(tmp_path / "text"))
    )
    for entry, second in zip(actual_values, reference, strict=True):
        np.testing.assert_array_equal(entry, second)
    saving.save(model, config, tmp_path / "out")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert {k: v.tobytes() for k, v in actual.items()} == {
        k: v.tobytes() for k, v in (named | beside).items()
    }
    assert families.read_config(tmp_path / "out") == config
    with pytest.raises(UserError, match="vision tower of a multimodal config cannot be drawn"):
        config.check_drawn()


def test_what_newer_files_say_of_each_layer():
    """`per_layer_config` is the head width and the keys of all full layers, or refused."""
    raw = read_text("gemma4")
    old = families.config_from_hf(raw)
    assert (old.heads(FULL), old.heads(SLIDING)) == ((16, 1), (12, 2))
    del raw["global_head_dim"], raw["num_global_key_value_heads"]
    local_value = {"head_dim": 16, "num_key_value_heads": 1}
    assert (
        families.config_from_hf({**raw, "per_layer_config": {"2": local_value, "3": local_value}})
        == old
    )
    for wrong in (
        {"2": local_value},
        {"1": local_value, "2": local_value, "3": local_value},
        {"2": local_value, "3": {**local_value, "sliding_window": 3}},
        [local_value],
    ):
        with pytest.raises(UserError, match="per_layer_config is"):
            families.config_from_hf({**raw, "per_layer_config": wrong})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gemma4", {"use_bidirectional_attention": "all"}, 'only null or "vision" is'),
        ("gemma4", {"num_global_key_value_heads": 3}, "num_global_key_value_heads=3"),
        ("gemma4_per_layer", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 must be below"),
        ("gemma4_per_layer", {"num_kv_shared_layers": 4}, "leaves no layer of type 'full_att"),
        ("gemma4_moe", {"top_k_experts": 7}, "top_k_experts=7 from 1 to num_experts=6"),
        (
            "gemma4",
            {"architectures": ["Gemma4ForSequenceClassification"]},
            "no class of Gemma 4 that scores",
        ),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        (
            "gemma3",
            {"layer_types": None, "sliding_window_pattern": 0},
            "sliding_window_pattern is .*0",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, change, words):
    raw = {**read_text(name), **change}
    if change.get("num_kv_shared_layers") == 4:
        raw["layer_types"] = [SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL]
    with pytest.raises(UserError, match=words):
        families.config_from_hf(raw)


def test_gemma3_layers_of_an_old_file():
    raw = read_text("gemma3")
    del raw["layer_types"], raw["rope_parameters"]
    raw |= {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = families.config_from_hf(raw)
    assert config.layer_types == (SLIDING, SLIDING, FULL)
    ropes = {name: dict(rope) for name, rope in config.rope}
    assert ropes[FULL] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert ropes[SLIDING] == {"rope_type": "default", "rope_theta": 1e4}
    assert families.config_from_hf(config.to_hf()) == config
    del raw["sliding_window_pattern"]  # transformers writes the next key, and does not read it
    written = {**raw, "_sliding_window_pattern": 3}
    assert families.config_from_hf(written).layer_types == (SLIDING,) * 3


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_hidden_act_is_not_what_gemma_computes(model_type):
    """transformers writes it and reads hidden_activation."""
    plain = {"model_type": model_type}
    config = families.config_from_hf({**plain, "hidden_act": "silu"})
    assert config.hidden_act == families.config_from_hf(plain).hidden_act == "gelu_pytorch_tanh"
