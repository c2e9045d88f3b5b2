"""The numbers of the training API against a run's own step, closed forms and torch."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from api_toy import as_data, draw_documents, open_base, read_output, write_request

from jaxtrain.adapters.storage import round_trip
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.roles import Role, Roles
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.task import of_policy
from jaxtrain.core.weights import start_adapter
from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import chain
from jaxtrain.errors import UserError
from jaxtrain.training_api import wire
from jaxtrain.training_api.optimizer import read_numbers
from jaxtrain.training_api.requests import read_request, read_tensor
from jaxtrain.training_api.trainer import MAX_KINDS, LoRASpec, TrainedModel, name_metrics

ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(scope="module")
def base():
    return open_base()


def train(model, data, loss="cross_entropy", settings=None, **adam):
    raw = write_request("m", 1, data, loss, settings)
    output = read_output(model.forward_backward(read_request(raw)))
    metrics = model.optim_step(read_numbers({"adam_params": {**ADAM, **adam}}))
    return *output, metrics


def run_steps(base, lora, seed, batches):
    """Losses of a run's own step on rows of documents, with its Adam, which decays nothing."""
    roles = Roles({"policy": Role(base.kind(lora).roles.bundle)})
    optimizer = optax.adamw(ADAM["learning_rate"], 0.9, 0.95, ADAM["eps"], weight_decay=0.0)
    step = make_step(roles.build, of_policy(nll_loss), {"nll": 1.0}, optimizer, None)
    losses = []
    with jax.set_mesh(base.mesh):
        if lora.rank:
            trained = start_adapter(roles.bundle, roles.trained_shapes, base.params, seed)
        else:
            trained = {path: base.params[path] + 0 for path in roles.trained_shapes}
        state = init_state(trained, optimizer)
        for documents in batches:
            rows = []
            for ids, weights in documents:
                total = sum(float(w.sum()) for _, w in documents)
                tree = chain(ids, {"nll": np.append(0, weights / total)})
                rows.append([lay_out(tree)])
            batch = stack_batches([build_batch(rows, 128)])
            batch = batch._replace(denoms={"nll": np.ones(1, np.float32)})
            state, output = step(state, batch, base.kind(lora).frozen)
            losses.append(float(output.metrics["loss"][0]))
    return np.array(losses)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 0])
def test_twenty_steps_equal_a_run_of_the_same_batches(base, rank):
    lora = LoRASpec(rank)
    batches = [draw_documents(4, seed) for seed in range(4)] * 5
    model = TrainedModel(base.kind(lora), base.kind(lora).start(7))
    losses = []
    for documents in batches:
        total = sum(float(w.sum()) for _, w in documents)
        data = as_data([(ids, w / total) for ids, w in documents])
        losses.append(train(model, data)[1]["loss:sum"])
    np.testing.assert_allclose(losses, run_steps(base, lora, 7, batches), rtol=1e-6)
    assert losses[-1] < losses[0] - 0.01


def open_model(base, seed=7):
    """A model whose adapter is not the identity any more."""
    model = TrainedModel(base.kind(LoRASpec(4)), base.kind(LoRASpec(4)).start(seed))
    train(model, as_data(draw_documents(2, seed=9)))
    return model


@pytest.mark.slow  # compiles a step of two bases
def test_adapters_over_a_quantized_base_are_those_over_what_it_stands_for(base):
    with pytest.raises(UserError, match="adapter.rank has no effect with --train"):
        open_base(adapter={"kind": "lora", "rank": 1, "quantize": "int8"})
    quantized = open_base(adapter={"kind": "lora", "quantize": "int8"})
    names = {path.rpartition(".")[0] for path in quantized.params if path.endswith(".codes")}
    assert len(names) == 7 and all(name.endswith(".kernel") for name in names)
    with pytest.raises(UserError, match="section adapter begins one on this; remove it"):
        open_base(adapter={"kind": "lora", "rank": 1})
    rounded, data = copy.copy(base), as_data(draw_documents(3))
    rounded._kinds = weakref.WeakValueDictionary()
    rounded.params = dict(base.params)
    for name in names:
        kernel = jnp.stack([round_trip(kernel, "int8") for kernel in base.params[name]])
        assert np.abs(kernel - base.params[name]).max() > 1e-5
        rounded.params[name] = kernel
    models = [
        TrainedModel(of.kind(LoRASpec(4)), of.kind(LoRASpec(4)).start(7))
        for of in (quantized, rounded)
    ]
    for _ in range(3):
        (logprobs, metrics, _), (expected, expected_metrics, _) = (train(m, data) for m in models)
        for values, numbers in zip(logprobs, expected, strict=True):
            np.testing.assert_allclose(values, numbers, atol=1e-5)
        assert metrics["loss:sum"] == pytest.approx(expected_metrics["loss:sum"], rel=1e-5)


def test_few_kinds_of_models_stay_that_no_model_needs(base):
    needed = base.kind(LoRASpec(1))
    for rank in range(2, 2 + 2 * MAX_KINDS):
        base.kind(LoRASpec(rank))
    gc.collect()
    assert {lora.rank for lora in base._kinds if lora.rank > 1} >= {
        2 * MAX_KINDS,
        1 + 2 * MAX_KINDS,
    }
    assert len(base._kinds) < 2 * MAX_KINDS and base.kind(LoRASpec(1)) is needed


def forward(model, data, loss="cross_entropy", settings=None):
    raw = write_request("m", 1, data, loss, settings, forward_only=True)
    return read_output(model.forward_backward(read_request(raw)))


def group_data(count=3, prompt=6, length=5, noise=0.3):
    """Answers to one prompt, as a loop of RL sends them: nothing but 0 on the prompt's places."""
    rng = np.random.default_rng(4)
    start, data = rng.integers(4, 512, prompt), []
    for index in range(count):
        answer = rng.integers(4, 512, length + index)
        tokens = np.concatenate([start, answer[:-1]])
        before = np.zeros(prompt - 1)
        data.append(
            (
                tokens,
                {
                    "target_tokens": np.concatenate([before.astype(int), answer]),
                    "logprobs": np.concatenate([before, np.zeros(len(answer))]),
                    "advantages": np.concatenate([before, np.full(len(answer), index - 0.8)]),
                },
            )
        )
    return data, noise


def clip(values, low=0.8, high=1.2):
    return values.clamp(low, high)


LOSSES = {
    "importance_sampling": (None, lambda r, lp, q, a, torch: -(r * a).sum()),
    "ppo": (None, lambda r, lp, q, a, torch: -torch.minimum(r * a, clip(r) * a).sum()),
    "cispo": (None, lambda r, lp, q, a, torch: -(clip(r).detach() * lp * a).sum()),
    "dro": ({"beta": 0.1}, lambda r, lp, q, a, torch: -(lp * a - 0.05 * (lp - q) ** 2).sum()),
    "gspo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda r, lp, q, a, torch: (
            -torch.minimum((s := ((lp - q)[a != 0].mean()).exp()) * a, clip(s, 0.9, 1.1) * a).sum()
        ),
    ),
    "jaxtrain:grpo": (
        {"epsilon": 0.1, "epsilon_high": 0.3},
        lambda r, lp, q, a, torch: -torch.minimum(r * a, clip(r, 0.9, 1.3) * a).sum(),
    ),
}


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(name, marks=() if name == "jaxtrain:grpo" else pytest.mark.slow)
        for name in LOSSES
    ],
)
def test_losses_and_gradients_are_those_of_the_formula_in_torch(base, loss):
    """The gradient by cross_entropy with the weights -dL/dlp that torch gives."""
    torch = pytest.importorskip("torch")
    settings, formula = LOSSES[loss]
    (data, noise), rng = group_data(), np.random.default_rng(0)
    model, other = open_model(base), open_model(base)
    bare = [(ids, {"target_tokens": inputs["target_tokens"]}) for ids, inputs in data]
    logprobs, _ = forward(model, bare)
    total, weighted = 0.0, []
    for (ids, inputs), lp in zip(data, logprobs, strict=True):
        trained = inputs["advantages"] != 0
        q = np.where(trained, lp + noise * rng.normal(size=lp.shape), 0.0).astype(np.float32)
        inputs["logprobs"] = q
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = trained.astype(np.float32)
        lp = torch.tensor(lp, requires_grad=True)
        q, a = torch.tensor(q), torch.tensor(inputs["advantages"], dtype=torch.float32)
        value = formula((lp - q).exp(), lp, q, a, torch)
        value.backward()
        total += value.item()
        weights = -lp.grad.numpy()
        weighted.append((ids, {"target_tokens": inputs["target_tokens"], "weights": weights}))
    _, metrics, step = train(model, data, loss, settings)
    assert metrics["loss:sum"] == pytest.approx(total, rel=2e-5, abs=2e-5)
    _, _, want = train(other, weighted)
    assert step["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    for path, value in model.state.params.items():
        # Adam's step is a sign where gradients are as small as rounding.
        moved = np.abs(np.asarray(value) - np.asarray(other.state.params[path]))
        assert (moved < 1e-5).mean() > 0.98, path


def test_data_that_begin_alike_share_tokens_and_change_no_number(base):
    data, _ = group_data()
    documents = draw_documents(2)
    alike = [*documents, documents[0], (documents[0][0][:3], documents[0][1][:2])]
    for loss, sent in (("importance_sampling", data), ("cross_entropy", as_data(alike))):
        shared, apart = open_model(base), open_model(base)
        first = train(shared, sent, loss)
        second = train(apart, sent, loss, {"trees": "off"})
        for together, alone in zip(first[0], second[0], strict=True):
            np.testing.assert_allclose(together, alone, atol=2e-5)
        assert first[1]["loss:sum"] == pytest.approx(second[1]["loss:sum"], rel=1e-5)
        assert first[2]["grad_norm"] == pytest.approx(second[2]["grad_norm"], rel=1e-4)


def test_several_targets_a_place_are_the_sum_of_one_each(base):
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(4, 512, 7), rng.integers(4, 512, (7, 3))
    weights = rng.random((7, 3)).astype(np.float32)
    single_data = [
        (ids, {"target_tokens": targets[:, k], "weights": weights[:, k]}) for k in range(3)
    ]
    single, many = open_model(base), open_model(base)
    (logprobs,), metrics, step = train(
        many, [(ids, {"target_tokens": targets, "weights": weights})]
    )
    want, want_metrics, want_step = train(single, single_data)
    np.testing.assert_allclose(logprobs, np.stack(want, axis=1), atol=2e-5)
    assert metrics["loss:sum"] == pytest.approx(want_metrics["loss:sum"], rel=1e-5)
    assert step["grad_norm"] == pytest.approx(want_step["grad_norm"], rel=1e-4)


def test_updates_are_those_of_torch(base):
    """Weight decay of everything, clipping, and numbers that change from step to step."""
    torch = pytest.importorskip("torch")
    data = as_data(draw_documents(2))
    kind = base.kind(LoRASpec(4))
    model = TrainedModel(kind, kind.start(1))
    weights = {p: torch.tensor(np.array(x)) for p, x in model.state.params.items()}
    adam = torch.optim.AdamW(list(weights.values()), betas=(0.9, 0.95), eps=1e-4)
    for rate, norm in ((1e-2, 0.0), (3e-3, 0.5), (1e-2, 1e9)):
        model.forward_backward(read_request(write_request("m", 1, data)))
        for path, value in weights.items():
            value.grad = torch.tensor(np.array(model.sums.grads[path]))
        size = torch.nn.utils.clip_grad_norm_(list(weights.values()), norm or float("inf"))
        adam.param_groups[0] |= {"lr": rate, "weight_decay": 0.1}
        adam.step()
        params = {"learning_rate": rate, "eps": 1e-4, "weight_decay": 0.1, "grad_clip_norm": norm}
        metrics = model.optim_step(read_numbers({"adam_params": params}))
        assert metrics["grad_norm"] == pytest.approx(size.item(), rel=1e-5)
        for path, value in weights.items():
            np.testing.assert_allclose(model.state.params[path], value, atol=2e-6, err_msg=path)


def test_a_step_that_is_not_finite_changes_nothing(base):
    model = open_model(base)
    before = {path: np.array(value) for path, value in model.state.params.items()}
    ids, inputs = as_data(draw_documents(1))[0]
    with pytest.raises(UserError, match="not finite"):
        train(model, [(ids, {**inputs, "weights": np.full(len(ids), np.inf)})])
    for path, value in model.state.params.items():
        assert np.array_equal(value, before[path])


def make_sparse(shape, rows, columns, values):
    message = wire.CLASSES["Tensor"](dtype=wire.FLOAT32, shape=shape)
    message.sparse_csr.values = np.asarray(values, np.float32).tobytes()
    message.sparse_csr.crow_indices = np.asarray(rows, np.int64).tobytes()
    message.sparse_csr.col_indices = np.asarray(columns, np.int64).tobytes()
    return message


def test_a_sparse_tensor_is_read():
    message = make_sparse([3, 4], [0, 2, 2, 3], [1, 3, 0], [5.0, 6.0, 7.0])
    dense = [[0, 5, 0, 6], [0, 0, 0, 0], [7, 0, 0, 0]]
    np.testing.assert_array_equal(read_tensor(message, "x", 100), dense)


@pytest.mark.parametrize(
    "shape, rows, columns",
    [
        ([3, 4], [0, 2**63 - 1, -2, 3], [1, 3, 0]),  # differences of int64 wrap around
        ([3, 4], [0, 2, 1, 3], [1, 3, 0]),
        ([3, 4], [0, 2, 3], [1, 3, 0]),
        ([3, 4], [0, 2, 2, 3], [1, 4, 0]),
        ([3, 4], [0, 2, 2, 3], [1, -1, 0]),
        ([0, 2**62], [0], [1, 3, 0]),
        ([3, 34], [0, 2, 2, 3], [1, 3, 0]),  # more than 100 numbers
    ],
)
def test_sparse_indices_that_do_not_fit_are_refused(shape, rows, columns):
    with pytest.raises(UserError, match="x.* shape"):
        read_tensor(make_sparse(shape, rows, columns, [5.0, 6.0, 7.0]), "x", 100)


@pytest.mark.parametrize(
    "name, reduction",
    [("ratio/max", "max"), ("clip_ratio/low_min", "min"), ("entropy", "mean")]
    + [("mismatch/max_abs", "max"), ("x/max_reward", "max"), ("x/other_max", "mean")],
)
def test_metrics_are_named_by_how_the_step_joins_them(name, reduction):
    assert name_metrics({name: (6.0, 1.0)}) == {f"{name}:{reduction}": 6.0}


TARGETS = {"target_tokens": [5, 6, 7]}
POLICY = {**TARGETS, "logprobs": [0.0] * 3, "advantages": [1.0] * 3}


@pytest.mark.parametrize(
    "tokens, inputs, loss, settings, text",
    [
        ([4, 5, 600], TARGETS, "cross_entropy", None, "model_input holds the id 600"),
        ([4, 5], TARGETS, "cross_entropy", None, r"has shape \[3\]; it needs one target"),
        ([], {"target_tokens": [0][:0]}, "cross_entropy", None, "model_input has 0 tokens"),
        ([4] * 200, TARGETS, "cross_entropy", None, "1 to 199 can be trained"),
        ([4, 5, 6], {}, "cross_entropy", None, "needs 'target_tokens'"),
        ([4, 5, 6], {"target_tokens": [5, 6, -1]}, "cross_entropy", None, "holds the id -1"),
        ([4, 5, 6], {"target_tokens": [5.0] * 3}, "cross_entropy", None, "whole numbers"),
        ([4, 5, 6], {**TARGETS, "weights": [1.0]}, "cross_entropy", None, r"has shape \[1\]"),
        ([4, 5, 6], {**TARGETS, "mask": [1.0] * 3}, "cross_entropy", None, "has 'mask'"),
        ([4, 5, 6], TARGETS, "ppo", None, "needs 'logprobs'"),
        ([4, 5, 6], POLICY, "ppo", {"clip": 1.0}, "loss_fn_config.'clip' is nothing that ppo"),
        ([4, 5, 6], POLICY, "ppo", {"clip_low_threshold": "x"}, "must be a number"),
        ([4, 5, 6], POLICY, "dro", None, "loss_fn_config.beta is needed"),
        ([4, 5, 6], POLICY, "stable_reinforce", None, "formula is not published"),
        ([4, 5, 6], POLICY, "ppo", {"trees": "no"}, "loss_fn_config.trees must be on or off"),
        ([4, 5, 6], POLICY, "jaxtrain:grpo", {"epsilon": -1.0}, "loss_fn_config.epsilon"),
        ([4, 5, 6], POLICY, "jaxtrain:nothing", None, "'jaxtrain:nothing' is unknown"),
    ],
)
def test_requests_that_cannot_be_run_name_the_field(base, tokens, inputs, loss, settings, text):
    model = TrainedModel(base.kind(LoRASpec(4)), base.kind(LoRASpec(4)).start(1))
    with pytest.raises(UserError, match=text):
        forward(model, [(tokens, inputs)], loss, settings)


@pytest.mark.parametrize(
    "params, text",
    [
        (None, "adam_params must be an object"),
        ({"lr": 1.0}, "adam_params.'lr' is unknown"),
        ({"learning_rate": -1}, "adam_params.learning_rate must be a number from 0 on"),
        ({"beta1": 1.0}, "adam_params.beta1 must be below 1"),
        ({"beta2": 1.0 - 1e-9}, "adam_params.beta2 must be below 1"),
        ({"eps": float("nan")}, "adam_params.eps"),
        ({"eps": 0.0}, "adam_params.eps must be 1.2e-38 or more, not 0.0"),
        ({"learning_rate": 1e39}, "adam_params.learning_rate"),
        ({"weight_decay": 10**400}, "adam_params.weight_decay"),
    ],
)
def test_numbers_of_adam_are_checked(params, text):
    with pytest.raises(UserError, match=text):
        read_numbers({"adam_params": params})
