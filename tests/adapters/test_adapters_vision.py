"""Adapters of the parts for images: which patterns reach them, and PEFT folders out and in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import torch
import transformers
from test_models_families import make_torch, read_flat, relative_error
from tiny_vision import VISION, make_batch, processed

from jaxtrain.adapters.attach import attach, cut_layers
from jaxtrain.adapters.peft import load_trained, read_adapter, write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_adaptable
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.models import build, families, loading
from jaxtrain.models.parameters import split_model

FC1 = r"vision_model\.encoder\.layers\.[12]\.mlp\.fc1"
LINEAR_FC1 = r"visual\.blocks\.[12]\.mlp\.linear_fc1"
CASES = {
    "text": (["all-linear"], {"stack"}),
    "all": (["attention", "tower", "projector"], {"stack", "tower", "projector"}),
    "text and tower": (["attention", "tower"], {"stack", "tower"}),
    "some layers of the tower": (["projector", FC1], {"projector", "tower"}),
    "some layers of Qwen's tower": (["*merger.linear_fc2", LINEAR_FC1], {"projector", "tower"}),
}
SLOW = [("smolvlm", "all"), ("smolvlm", "some layers of the tower"), ("qwen3_5", "all")]
THOROUGH = [
    ("smolvlm", "text"),
    ("qwen3_5", "some layers of Qwen's tower"),
    ("gemma3", "text"),
    ("gemma3", "text and tower"),  # the projector is no module there
    *((name, "all") for name in VISION if name not in ("smolvlm", "idefics3", "qwen3_5", "gemma3")),
]


def multiply(values, path, slot):
    """Return what an adapter adds to its matrix."""
    a, b = values[f"{path}.adapter.a"], values[f"{path}.adapter.b"]
    return np.asarray(a @ b * slot.scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [*SLOW, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in THOROUGH)],
)
def test_adapters_of_each_part_are_those_of_peft(name, case, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    target, parts = CASES[case]
    make_torch(VISION[name]).save_pretrained(tmp_path / "base")
    config = families.read_config(tmp_path / "base")
    slots = choose_slots(find_adaptable(config), target, LoRASpec(3, 5.0), {}, {})
    assert {path.removeprefix("vision.").split(".")[0] for path in slots} == parts
    adapter = Adapter(slots)
    shapes, rebuild = cut_layers(*split_model(attach(build.abstract(config), adapter)), adapter)
    rng = np.random.default_rng(0)
    values = {
        path: jnp.asarray(0.3 * rng.standard_normal(shape.shape), jnp.float32)
        for path, shape in shapes.items()
        if adapter.trains(path)
    }
    write_peft(values, config, adapter, tmp_path / "adapter", str(tmp_path / "base"))

    read = read_adapter(tmp_path / "adapter", config, "float32")
    assert slots.keys() == read.slots.keys()
    place = jax.sharding.SingleDeviceSharding(make_mesh(jax.devices()[:1]).devices.item())
    shapes = cut_layers(*split_model(attach(build.abstract(config), read)), read)[0]
    placed = {
        path: jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=place)
        for path, value in shapes.items()
        if read.trains(path)
    }
    loaded = load_trained(placed, config, read)
    for path, slot in slots.items():
        if read.slots[path] == slot:
            for part in ("a", "b"):
                part_of = f"{path}.adapter.{part}"
                np.testing.assert_array_equal(loaded[part_of], values[part_of])
        else:  # rows of a larger matrix in PEFT, which has one pair
            joint = multiply(loaded, path, read.slots[path])
            np.testing.assert_allclose(joint, multiply(values, path, slot), rtol=0, atol=1e-6)

    base = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    count = sum("lora_A" in name for name, _ in adapted.named_parameters())
    assert count == sum("lora_A" in tensor for tensor in read_flat(tmp_path / "adapter"))
    batch, _, images = make_batch(VISION[name])
    inputs = processed(VISION[name], np.asarray(batch.tokens)[0], images[:2])
    with torch.no_grad():
        expected = adapted(**{key: torch.from_numpy(x) for key, x in inputs.items()}).logits[0]
    model = rebuild({**split_model(loading.load(tmp_path / "base"))[0], **values})
    # float32 sums in another order.
    assert relative_error(model.logits(model.hidden(batch).hidden)[0], expected.numpy()) < 1e-4
