"""Adapters in slots: rows of several are drawn in one batch, each as its adapter alone draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families_added import FAMILIES
from tiny_models import HYBRID, MAMBA, SIZES
from toy_run import save_model

from jaxtrain.adapters.slotted import NO_ADAPTER, SlottedLoRA
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.api import Model
from jaxtrain.cli.serve import split_layers
from jaxtrain.core.weights import abstract_params
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local import prefill, slots
from jaxtrain.generation.local.adapter_slots import AdapterSlots
from jaxtrain.generation.local.scoring import score_text
from jaxtrain.generation.local.shared_base import lay_out

KINDS = {"qwen3_5": "linear", "nemotron_h": "mamba", "lfm2": "conv", "olmo_hybrid": "linear"}
"""Part of the paths of recurrent layers."""
RECURRENT = {**FAMILIES, **HYBRID, **MAMBA}
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def test_rows_are_corrected_by_their_slot_alone():
    rng = np.random.default_rng(0)
    S, R, D, F = 3, 4, 8, 6
    a, b, scale = rng.normal(size=(D, S, R)), rng.normal(size=(S, R, F)), rng.normal(size=S)
    x, y = rng.normal(size=(4, 5, D)), rng.normal(size=(4, 5, F))
    a, b, scale, x, y = (np.asarray(array, np.float32) for array in (a, b, scale, x, y))
    a[:, 2] = 3e38  # products with it overflow, which rows of other slots must not see
    layer, index = SlottedLoRA(*map(jnp.asarray, (a, b, scale))), np.array([2, 0, 1, 3])
    assert layer(x, y, None) is y, "no rows were chosen"
    expected = y.copy()
    for row, slot in enumerate(index[:3]):
        if slot:
            low = x[row].astype(np.float64) @ a[:, slot - 1] * scale[slot - 1]
            expected[row] += low @ b[slot - 1]
    layer.index = index
    corrected = np.asarray(layer(x, y, None))
    np.testing.assert_allclose(corrected[:3], expected[:3], rtol=1e-5, atol=1e-5)
    assert (corrected[1] == y[1]).all()
    layer.index = np.int32(2)
    np.testing.assert_array_equal(np.asarray(layer(x, y, None))[0], corrected[0])
    layer.index = np.repeat(index[:, None], 5, 1)
    np.testing.assert_array_equal(np.asarray(layer(x, y, None)), corrected)


def draw_adapter(base, rank, seed, target=("all-linear",), **options):
    """Return (an adapter of the base, the numbers that it trains)."""
    bundle = base.snapshot.roles.bundle
    spec = LoRASpec(rank, 2.0 * rank, **options)
    linears = find_linears(bundle.architecture)
    adapter, rng = (
        Adapter(choose_slots(linears, list(target), spec, {}, {})),
        np.random.default_rng(seed),
    )
    shapes = abstract_params(dataclasses.replace(bundle, adapter=adapter))[0]
    return adapter, {
        path: jax.device_put(
            0.3 * rng.standard_normal(shape.shape).astype(np.float32), shape.sharding
        )
        for path, shape in sorted(shapes.items())
        if adapter.trains(path)
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slots") / "base"
    save_model(folder, num_hidden_layers=2)
    return Model(folder)


def open_sampler(base, prefixes=0):
    sampler = base.sampler(True, max_batch=8, prefixes=prefixes)
    sampler.use(split_layers(base, sampler.model), 0)
    return sampler


def draw_alone(base, adapter, trained, prompt=PROMPT):
    """Draw with a model of the adapter alone."""
    bundle = dataclasses.replace(base.snapshot.roles.bundle, adapter=adapter)
    frozen, sampler = base.snapshot.params(), open_sampler(base)
    with sampler.on_mesh():
        layout = lay_out(abstract_params(bundle)[1], trained, frozen, sampler.model)
        sampler.use(layout.assemble(trained, frozen))
    (answer,) = sampler.generate([prompt], GREEDY)
    return answer, score_text(sampler, prompt)[0]


def request(sampler, slot, prompt=PROMPT, sampling=GREEDY):
    asked = sampler.request(prompt, sampling)
    asked.adapter = slot
    sampler.add(asked)
    return asked


def run(sampler):
    while sampler.busy:
        sampler.step()


def check(answer, alone):
    assert answer.tokens == alone.tokens
    np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=2e-5)


def count_programs():
    programs = (prefill.fill, slots.insert, slots.decode_chunk)
    return [program.count() for program in programs]


@pytest.mark.slow  # compiles samplers
def test_one_batch_draws_what_each_adapter_alone_draws(base):
    adapters = [
        draw_adapter(base, 8, 0),
        draw_adapter(base, 4, 1, ["attention"], rslora=True),
        draw_adapter(base, 5, 2, ["mlp"], layers=(1,)),
    ]
    plain = open_sampler(base)
    alone = [(plain.generate([PROMPT], GREEDY)[0], score_text(plain, PROMPT)[0])]
    alone += [draw_alone(base, *pair) for pair in adapters]
    assert len({tuple(answer.tokens) for answer, _ in alone}) == 4

    sampler = open_sampler(base)
    held = AdapterSlots(sampler, 3)
    loaded = [NO_ADAPTER, *(held.load(*pair) for pair in adapters)]
    assert held.load(*adapters[0]) is None, "no slot is free"
    requests = [request(sampler, slot) for slot in loaded for _ in range(2)]
    assert len(sampler.step()) == 8, "one batch"
    for number, asked in enumerate(requests):
        check(asked.completion, alone[number // 2][0])
    for slot, (_, scores) in zip(loaded, alone, strict=True):
        ours = score_text(sampler, PROMPT, adapter=slot)[0]
        np.testing.assert_allclose(ours[1:], scores[1:], atol=2e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "qwen3_5" else pytest.mark.thorough)
        for name in KINDS
    ],
)
def test_recurrent_layers_have_slots(name, tmp_path):
    save_model(tmp_path, **(SIZES | {"vocab_size": 512, "architectures": None} | RECURRENT[name]))
    base = Model(tmp_path)
    one, two = draw_adapter(base, 8, 0), draw_adapter(base, 3, 1)
    sampler = open_sampler(base, prefixes=4)
    held = AdapterSlots(sampler, 2)
    assert any(path.startswith("stack.") and KINDS[name] in path for path in one[0].slots)
    loaded = [NO_ADAPTER, held.load(*one), held.load(*two)]
    requests = [request(sampler, slot) for slot in loaded * 2]
    run(sampler)
    alone = [open_sampler(base).generate([PROMPT], GREEDY)[0]]
    alone += [draw_alone(base, *pair)[0] for pair in (one, two)]
    for asked, answer in zip(requests, alone * 2, strict=True):
        check(asked.completion, answer)


@pytest.mark.slow  # compiles samplers
def test_a_slot_is_replaced_while_others_are_drawn_and_compiles_nothing(base):
    sampler, long = open_sampler(base), Sampling(max_new_tokens=80, temperature=0.0)
    held, one, two = AdapterSlots(sampler, 2), draw_adapter(base, 8, 0), draw_adapter(base, 3, 1)
    first, second = held.load(*one), held.load(*two)
    for slot in (first, second) * 4:
        request(sampler, slot, sampling=long)
    run(sampler)

    def draw(adapter):
        """Load an adapter in the second slot while the first is drawn with, and draw with all."""
        running = request(sampler, first, sampling=long)
        sampler.step()
        assert sampler.busy
        held.free(second)
        asked = [request(sampler, held.load(*adapter)), request(sampler, NO_ADAPTER)]
        run(sampler)
        return [running.completion, *(other.completion for other in asked)]

    undisturbed, *_ = draw(two)
    programs, newer = count_programs(), draw_adapter(base, 6, 7)
    running, drawn, plain = draw(newer)
    assert count_programs() == programs
    assert running.tokens == undisturbed.tokens and len(running.tokens) == 80
    check(drawn, draw_alone(base, *newer)[0])
    check(plain, open_sampler(base).generate([PROMPT], GREEDY)[0])
    # A larger rank makes the slots grow, and what they hold stays.
    larger = draw_adapter(base, 12, 9)
    running, drawn, _ = draw(larger)
    check(running, undisturbed)
    check(drawn, draw_alone(base, *larger)[0])


@pytest.mark.slow  # compiles samplers
def test_states_serve_prompts_of_the_adapter_that_read_them(base):
    sampler = open_sampler(base, prefixes=4)
    held, one, two = AdapterSlots(sampler, 2), draw_adapter(base, 8, 0), draw_adapter(base, 8, 1)
    loaded = [held.load(*pair) for pair in (one, two)]
    prompt = list(range(4, 64))
    answers = [request(sampler, slot, prompt) for slot in loaded]
    run(sampler)
    assert sampler.prefix_tokens() == (120, 0)
    for slot, asked, pair in zip(loaded, answers, (one, two), strict=True):
        turn = [*prompt, *asked.tokens, 7]
        following = request(sampler, slot, turn)
        run(sampler)
        check(following.completion, draw_alone(base, *pair, turn)[0])
    assert sampler.prefix_tokens()[1] == 2 * (60 + 11)
    held.free(loaded[1])
    again = held.load(*two)
    assert again.index == loaded[1].index
    request(sampler, again, prompt)
    run(sampler)
    assert sampler.prefix_tokens()[1] == 2 * (60 + 11), "states of what was unloaded"


@pytest.mark.slow  # compiles samplers
def test_forms_without_a_slot_and_numbers_that_are_not_finite_have_none(base):
    held = AdapterSlots(open_sampler(base), 2)
    adapter, trained = draw_adapter(base, 4, 0)
    dora = {path: dataclasses.replace(spec, dora=True) for path, spec in adapter.slots.items()}
    assert held.load(dataclasses.replace(adapter, slots=dora), trained) is None
    assert held.load(dataclasses.replace(adapter, full=("lm_head.embedding",)), trained) is None
    path = "stack.block.mlp.down.adapter.a"
    assert held.load(adapter, {**trained, path: trained[path].at[0, 0, 0].set(np.inf)}) is None
    assert held.load(adapter, trained) is not None
