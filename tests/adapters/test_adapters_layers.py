"""Adapters of some layers of a stack and of routers: chosen, computed, and as PEFT has them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_adapters_peft import RAW, TOKENS, our_logits, pack
from test_adapters_peft_experts import make_base as make_experts
from test_adapters_peft_experts import run, theirs

from jaxtrain.adapters.attach import attach, cut_layers, draw_trained
from jaxtrain.adapters.merge import merge_adapter
from jaxtrain.adapters.peft import adapter_entries, load_trained, read_adapter, write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_adaptable
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model

SLOT = LoRASpec(4, 6.0)
UP, DOWN, Q = "stack.block.mlp.up", "stack.block.mlp.down", "stack.block.attention.q"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(config, folder) of three layers."""
    folder = tmp_path_factory.mktemp("base")
    config = families.config_from_hf({**RAW["qwen3"], "num_hidden_layers": 3})
    saving.save(build.init(config, seed=3), config, folder)
    return families.read_config(folder), folder


def open_adapted(config, adapter, seed=0, scan=True):
    """(random trained values, rebuild, shapes)."""
    place = jax.sharding.NamedSharding(make_mesh(jax.devices()[:1]), jax.sharding.PartitionSpec())
    shapes, rebuild = split_model(attach(build.abstract(config, scan_layers=scan), adapter))
    shapes = {
        path: jax.ShapeDtypeStruct(shape.shape, jnp.float32, sharding=place)
        for path, shape in shapes.items()
    }
    shapes, rebuild = cut_layers(shapes, rebuild, adapter)
    rng = np.random.default_rng(seed)
    values = {
        path: jnp.asarray(
            path.endswith("magnitude") + 0.3 * rng.standard_normal(shape.shape), jnp.float32
        )
        for path, shape in sorted(shapes.items())
        if adapter.trains(path)
    }
    return values, rebuild, {path: shapes[path] for path in values}


def choose(config, *target, ranks=None, slot=SLOT):
    return choose_slots(find_adaptable(config), target, slot, ranks or {}, {})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (["layers.(0|2).mlp"], {UP: (0, 2), DOWN: (0, 2), "stack.block.mlp.gate": (0, 2)}),
        ([r".*\.layers\.[12]\.mlp\.(up|down)_proj"], {UP: (1, 2), DOWN: (1, 2)}),
        (["layers.1.self_attn.q_proj", "up_proj"], {Q: (1,), UP: None}),
        (["layers.1.*.q_proj", "layers.(0|2)..*q_proj"], {Q: None}),
        (["(up|down)_proj"], {UP: None, DOWN: None}),
    ],
)
def test_expressions_choose_layers(base, target, expected):
    slots = choose(base[0], *target)
    assert {path: slot.layers for path, slot in slots.items()} == expected


def test_ranks_of_some_of_the_layers_are_refused(base):
    slots = choose(base[0], "layers.(0|2).mlp", ranks={"layers.(0|2).mlp.up_proj": 2})
    assert slots[UP] == LoRASpec(2, 6.0, layers=(0, 2)) and slots[DOWN].rank == 4
    with pytest.raises(UserError, match="some of the layers in which .* leave the layers out"):
        choose(base[0], "layers.(0|2).mlp", ranks={"layers.2.mlp.up_proj": 2})
    with pytest.raises(UserError, match="names no Linear"):
        choose(base[0], "layers.(7|8).mlp")


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_some_layers_in_the_scan_equal_all_layers_with_no_change_in_the_others(base, dora):
    """And the unrolled stack; gradients are those of the chosen layers."""
    config, folder = base
    slots = choose(config, "layers.(0|2).mlp", "q_proj", slot=LoRASpec(4, 6.0, dora=dora))
    values, rebuild, shapes = open_adapted(config, Adapter(slots))
    assert shapes[f"{UP}.adapter.a"].shape[0] == 2 and shapes[f"{Q}.adapter.a"].shape[0] == 3
    every = {path: LoRASpec(4, 6.0, dora=dora) for path in slots}
    full, rebuild_full, _ = open_adapted(config, Adapter(every))
    frozen = split_model(loading.load(folder))[0]
    start = draw_trained(
        {path: open_adapted(config, Adapter(every))[2][path] for path in full},
        frozen, Adapter(every), 0,
    )  # fmt: skip
    for path, value in values.items():
        rows = [0, 2] if value.shape[0] == 2 else [0, 1, 2]
        # B of zero and DoRA's length of the plain matrix change nothing.
        part = start[path] if path.endswith((".b", ".magnitude")) else full[path]
        full[path] = part.at[jnp.asarray(rows)].set(value)
    expected = our_logits(folder, full, rebuild_full)
    actual = our_logits(folder, values, rebuild)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
    _, unrolled, _ = open_adapted(config, Adapter(slots), scan=False)
    np.testing.assert_allclose(
        our_logits(folder, values, unrolled), expected, atol=1e-5 * np.abs(expected).max()
    )

    def loss(values, rebuild):
        model = rebuild({**frozen, **values})
        batch = pack([[row] for row in TOKENS], 30)
        return jnp.sum(jnp.sin(model.logits(model.hidden(batch).hidden)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    ours, theirs = gradient(values, rebuild), gradient(full, rebuild_full)
    for path, grad in ours.items():
        rows = [0, 2] if grad.shape[0] == 2 else [0, 1, 2]
        other = np.asarray(theirs[path])[rows]
        np.testing.assert_allclose(grad, other, atol=1e-4 * np.abs(other).max(), err_msg=path)


@pytest.mark.slow
def test_an_adapter_of_some_layers_starts_as_the_identity(base):
    config, folder = base
    slots = choose(config, "layers.(0|2).mlp", slot=LoRASpec(4, 6.0, dora=True))
    values, rebuild, shapes = open_adapted(config, Adapter(slots))
    frozen = split_model(loading.load(folder))[0]
    start = draw_trained(shapes, frozen, Adapter(slots), 0)
    assert {path: value.shape for path, value in start.items()} == {
        path: value.shape for path, value in values.items()
    }
    plain = our_logits(folder, {}, split_model(build.abstract(config))[1])
    np.testing.assert_allclose(our_logits(folder, start, rebuild), plain, atol=1e-5)


def assert_peft_agrees(folder, base, ours, merged):
    """PEFT computes what we do of the folder, and so does the base with it merged in."""
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    model = peft.PeftModel.from_pretrained(theirs(base), folder)
    expected = run(model)
    plain = run(theirs(base))
    assert np.abs(expected - plain).max() > 0.02 * np.abs(plain).max()
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    merge_adapter(base, folder, merged)
    np.testing.assert_allclose(run(theirs(merged)), expected, atol=1e-4 * np.abs(expected).max())
    return model


@pytest.mark.slow
def test_peft_loads_adapters_of_some_layers_that_we_write(base, tmp_path):
    config, folder = base
    slots = choose(config, "layers.(0|2).mlp", "q_proj", "layers.1.*.v_proj", ranks={"q_proj": 2})
    adapter = Adapter(slots)
    values, rebuild, shapes = open_adapted(config, adapter)
    write_peft(values, config, adapter, tmp_path / "peft", str(folder))
    named = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers."
    assert sorted({name[len(prefix)] for name in named if ".mlp." in name}) == ["0", "2"]
    assert sorted({name[len(prefix)] for name in named if "v_proj" in name}) == ["1"]
    read = read_adapter(tmp_path / "peft", config, "float32")
    assert read.slots == slots
    again = load_trained(shapes, config, read)
    for path, value in values.items():
        np.testing.assert_array_equal(again[path], value)
    ours = our_logits(folder, values, rebuild)
    model = assert_peft_agrees(tmp_path / "peft", folder, ours, tmp_path / "merged")
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == len(named) // 2


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"target_modules": ["up_proj"], "layers_to_transform": [0, 2]}, (0, 2)),
        ({"target_modules": r".*\.layers\.(1|2)\.mlp\.up_proj"}, (1, 2)),
    ],
)
def test_we_read_what_peft_writes_for_some_layers(base, tmp_path, keys, layers):
    peft = pytest.importorskip("peft", reason="peft is not installed on this Python")
    config, folder = base
    made = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **keys)
    model = peft.get_peft_model(theirs(folder), made)
    model.save_pretrained(tmp_path / "peft")
    adapter = read_adapter(tmp_path / "peft", config, "float32")
    assert adapter.slots == {UP: LoRASpec(4, 6.0, layers=layers)}
    _, rebuild, shapes = open_adapted(config, adapter)
    values = load_trained(shapes, config, adapter)
    expected = run(model)
    actual = our_logits(folder, values, rebuild)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param("qwen3_moe", ["router", "attention"], marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", ["layers.1.mlp.gate", "q_proj"], marks=pytest.mark.slow),
        pytest.param("gpt_oss", ["mlp.router", "layers.1.*experts.*"], marks=pytest.mark.thorough),
        pytest.param("llama4", ["router", "experts.down"], marks=pytest.mark.thorough),
    ],
)
def test_peft_loads_adapters_of_routers_that_we_write(name, target, tmp_path):
    config = make_experts(tmp_path / "base", name)
    assert "stack.block.mlp.router" not in choose(config, "all-linear", "mlp", "mlp.*")
    slots = choose(config, *target)
    adapter = Adapter(slots)
    values, rebuild, shapes = open_adapted(config, adapter)
    write_peft(values, config, adapter, tmp_path / "peft", str(tmp_path / "base"))
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert any(parameter.endswith(".weight") for parameter in written["target_parameters"])
    read = read_adapter(tmp_path / "peft", config, "float32")
    assert {path: slot.layers for path, slot in read.slots.items()} == {
        path: slot.layers for path, slot in slots.items()
    }
    assert read.slots["stack.block.mlp.router"] == slots["stack.block.mlp.router"]
    again = load_trained(open_adapted(config, read)[2], config, read)
    for part in ("a", "b"):
        path = f"stack.block.mlp.router.adapter.{part}"
        np.testing.assert_array_equal(again[path], values[path])
    ours = our_logits(tmp_path / "base", values, rebuild)
    assert_peft_agrees(tmp_path / "peft", tmp_path / "base", ours, tmp_path / "merged")


def test_routers_that_peft_has_otherwise_are_refused():
    config = families.config_from_hf(RAW["mixtral"])
    with pytest.raises(UserError, match="a router that transformers calls otherwise"):
        adapter_entries(config, Adapter(choose(config, "router")))
    slots = choose(config, "router", slot=LoRASpec(4, 6.0, dora=True))
    with pytest.raises(UserError, match='"dora" has no form for routers'):
        attach(build.abstract(config), Adapter(slots))
