"""Preferences through the step: trees are flat rows, microsteps are one batch, in float64; what a
step's comparisons need of each other; and whole runs through the front door.

A model of two tokens' context that compiles at once, and in a slow test the transformer of the tree
tests; both sides differ by the order of sums alone, a few 1e-15 here.
"""

import functools
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_harness import KEEP_GRADIENTS
from test_methods_tree_exactness import float64, start
from toy_run import MODEL

from jaxtrain.core import roles
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.step import State, make_step
from jaxtrain.core.task import Round, of_policy
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.pack import lay_out
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.main import main
from jaxtrain.methods.preference.config import PreferenceTask
from jaxtrain.methods.preference.cross_batch_stats import list_groups, mismatch
from jaxtrain.methods.preference.loss import preference_loss
from jaxtrain.methods.preference.method import (
    PreferencePreparation,
    preference_coef,
    read_fields,
    read_objective,
)
from jaxtrain.models import build
from jaxtrain.models.parameters import split_model
from tests.docs.metric_names import require_rows

ROWS, TOKENS = 4, 96
PAIRS = {
    "loss": ["sigmoid", "aot", "aot_unpaired", "ipo", "sft"],
    "loss_weights": [1.0, 0.7, 0.5, 0.01, 0.3],
    "label_smoothing": 0.0,
    "use_weighting": False,
}
LABELS = {"loss": ["kto"], "desirable_weight": 1.3}


def make_ranked(labels: bool) -> list[Ranked]:
    rng = np.random.default_rng(5)
    created = []
    for number in range(6):
        count = 2 + number % 2
        answers = []
        for _ in range(count):
            n = int(rng.integers(2, 7))
            weights = np.ones(n)
            weights[1:2] = number % 3 > 0
            answers.append(RankedAnswer(rng.integers(1, 60, n), weights))
        prompt = rng.integers(1, 60, int(rng.integers(2, 9)))
        pairs = [] if labels else [RankedPair(0, 1), RankedPair(2, 1)][: count - 1]
        marks = tuple(bool(i % 2) for i in range(count)) if labels else ()
        created.append(Ranked(prompt, tuple(answers), tuple(pairs), marks))
    return created


def make_batch(task: PreferenceTask, microsteps: int, share: bool = True):
    """[A, ROWS / A, TOKENS] of six prompts."""
    nll = "answer" if task.nll_weight else "none"
    trees = [PairTrees(share, nll=nll)(entry) for entry in make_ranked(task.of_labels)]
    rows = [trees[:1], trees[1:3], trees[3:5], trees[5:]]
    fields = read_fields(task, "float64")
    shape = StepShape(ROWS // microsteps, microsteps, TOKENS, fields=fields)
    return shape.build([[lay_out(tree, "branch") for tree in row] for row in rows])


class Scores:
    """A scorer: the policy, and a reference that is the policy in other numbers."""

    def __init__(self, rebuild, params):
        moved = {path: value * 1.05 for path, value in params.items()}
        self.params = {"policy": params, "reference": moved}

        def score(params, batch):
            return jax.lax.map(lambda micro: token_logp(rebuild(params), micro).logp, batch)

        self.score = jax.jit(score)

    def logp(self, batch, role):
        bare = batch._replace(weights={}, streams={}, denoms={})
        return np.asarray(self.score(self.params[role], bare))


class TwoTokens:
    """A model whose hidden states depend on a token and the one before it on its branch."""

    logit_softcap = None

    def __init__(self, params):
        self.params = params

    def hidden(self, batch):
        embedded_BTD = self.params["embed"][batch.tokens]
        before_BT = jnp.maximum(batch.prev, 0)[:, :, None]
        before_BTD = jnp.take_along_axis(embedded_BTD, before_BT, axis=1) @ self.params["mix"]
        before_BTD = jnp.where(batch.prev[:, :, None] >= 0, before_BTD, 0.0)
        return SimpleNamespace(hidden=jnp.tanh(embedded_BTD + before_BTD))

    def head(self):
        return self.params["head"]


def open_model(name: str):
    """(rebuild, params)"""
    if name == "two tokens":
        rng = np.random.default_rng(0)
        shapes = {"embed": (61, 8), "mix": (8, 8), "head": (61, 8)}
        return TwoTokens, {path: jnp.asarray(rng.normal(size=s)) for path, s in shapes.items()}
    architecture, params = start(name)
    options = {"param_dtype": "float64", "dtype": "float64", "attention_impl": "reference"}
    return split_model(build.abstract(architecture, **options))[1], params


@functools.cache
def steps(kind: str, model: str):
    """(task, scorer, params, step): the step leaves its gradients in the optimizer's state."""
    task = PreferenceTask(**{"pairs": PAIRS, "labels": LABELS}[kind])
    rebuild, params = open_model(model)
    loss = functools.partial(preference_loss, objective=read_objective(task), impl="reference")
    coef, keep = preference_coef(task), KEEP_GRADIENTS
    step = make_step(lambda p: {"policy": rebuild(p)}, of_policy(loss), coef, keep, None)
    return task, Scores(rebuild, params), params, (step, keep)


def prepare(task, batch, scorer):
    config = SimpleNamespace(data=SimpleNamespace(length_buckets=[]))
    preparation = PreferencePreparation(task, config, SimpleNamespace(row_tokens=TOKENS))
    return preparation(Round([batch]), scorer)


def run_step(kind: str, model: str, microsteps: int, share: bool = True):
    """(metrics, gradients) of one step."""
    with float64():
        task, scorer, params, (step, keep) = steps(kind, model)
        ready = prepare(task, make_batch(task, microsteps, share), scorer)
        [batch] = ready.batches
        params = jax.tree.map(jnp.copy, params)
        state = State(jnp.zeros((), jnp.int32), params, keep.init(params))
        state, output = step(state, batch)
        means = {name: float(v) / float(w) for name, (v, w) in output.metrics.items() if w}
        return {**means, **ready.metrics}, jax.device_get(state.opt_state)


def assert_same(actual, expected):
    (metrics, grads), (wanted_metrics, wanted_grads) = actual, expected
    assert metrics == pytest.approx(wanted_metrics, rel=1e-10, abs=1e-12)
    largest = max(np.abs(grad).max() for grad in wanted_grads.values())
    assert largest > 1e-3
    for path, grad in wanted_grads.items():
        bound = 1e-10 * np.abs(grad).max() + 1e-14 * largest
        assert np.abs(grads[path] - grad).max() <= bound, path


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("pairs", "two tokens"),
        pytest.param("labels", "two tokens", marks=pytest.mark.slow),
        pytest.param("pairs", "qwen3", marks=pytest.mark.thorough),
    ],
)
def test_trees_are_flat_rows_and_microsteps_are_one_batch(kind, model):
    """DPO, both AOT, IPO and SFT at once, and KTO: losses, metrics and every gradient. A sort or a
    baseline of a microstep alone would differ in the second digit."""
    entry = run_step(kind, model, 1)
    assert entry[0]["num_pairs"] == {"pairs": 9, "labels": 15}[kind]
    assert entry[0].get("kl", 1.0) > 0.01  # a baseline of 0 would compare nothing
    assert_same(run_step(kind, model, 1, share=False), entry)
    assert_same(run_step(kind, model, 2), entry)


def test_a_prompt_gets_the_answers_of_the_one_before_it():
    task = PreferenceTask(**LABELS)
    shape = StepShape(2, None, TOKENS)
    for share in (True, False):
        batch = make_batch(task, 1, share)
        groups = list_groups(batch)
        assert [len(answers) for _, answers in groups] == [2, 3, 2, 3, 2, 3]
        second = mismatch(batch, shape)
        actual = {tuple(prompt): [t.tolist() for t, _ in a] for prompt, a in list_groups(second)}
        for index, (prompt, _) in enumerate(groups):
            before = [tokens.tolist() for tokens, _ in groups[index - 1][1]]
            assert actual[tuple(prompt)] == before
    # What does not fit behind its new prompt is cut; nobody is left out.
    short = mismatch(batch, StepShape(2, None, 12))
    assert sum(len(answers) for _, answers in list_groups(short)) == 15
    alone = PairTrees()(make_ranked(True)[1])
    lone = StepShape(1, 1, TOKENS, fields=read_fields(task, "float64")).build([[lay_out(alone)]])
    assert mismatch(lone, shape) is None


def test_the_baseline_is_the_mean_of_mismatched_log_ratios():
    """Against a loop over pairs of prompts, with log-probs that depend on the last two tokens."""
    table = np.random.default_rng(0).normal(0, 1, (2, 64, 64))

    class Bigrams:
        def logp(self, batch, role):
            before = np.take_along_axis(batch.tokens, np.maximum(batch.prev, 0), -1)
            return table[int(role == "reference")][before % 64, batch.tokens % 64]

    task = PreferenceTask(**LABELS)
    batch = make_batch(task, 2)
    total, count, groups = 0.0, 0, list_groups(batch)
    for index, (prompt, _) in enumerate(groups):
        for tokens, weights in groups[index - 1][1]:
            full = [*prompt[-1:], *tokens]
            for a, b, w in zip(full, full[1:], weights, strict=False):
                total += (table[0, a, b] - table[1, a, b]) * (w != 0)
            count += 1
    [ready] = prepare(task, batch, Bigrams()).batches
    slots = batch.weights["preference"] != 0
    np.testing.assert_allclose(ready.streams["kto"][slots], max(total / count, 0.0), rtol=1e-12)
    assert total > 0 and not ready.streams["kto"][~slots].any()


CONFIG = f"""
[run]
max_steps = 4
export = false
{MODEL.replace("max_position_embeddings = 64", "max_position_embeddings = 128")}
[data]
sequence_len = 48
micro_batch_size = 4

[[data.datasets]]
path = "PAIRS"

[task]
kind = "preference"

[optim]
learning_rate = 3e-3
lr_scheduler = "constant"

[checkpoint]
every = 2

[log]
plot = false
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    rows = [
        {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": f" {a + b + 1} or so"}
        for a in range(6)
        for b in range(6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "dpo.toml"
    path.write_text(CONFIG.replace("PAIRS", str(folder / "pairs.jsonl")))
    return path


def run(config, folder, *words) -> list[dict]:
    assert main(["--config", str(config), f"run.output_dir={folder}", *words]) == 0
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line or "eval/loss" in line]


@pytest.mark.slow
def test_a_run_goes_on_and_a_kept_reference_is_the_reference(config, tmp_path, capsys):
    """Four steps at once with a frozen reference; two and two with its log-probs on disk: the same
    numbers. Without the table the second half is refused, and so are weights of another seed."""
    held_out = f"data.eval_datasets.0.path={config.parent / 'pairs.jsonl'}"
    completed = run(config, tmp_path / "whole", held_out)
    assert completed[-1]["eval/rewards/accuracies"] > 0.9
    assert abs(completed[0]["rewards/margins"]) < 1e-6 < completed[3]["rewards/margins"]
    assert completed[0]["data/shared_prefix_share"] > 0.2
    retained = [held_out, "task.reference=precomputed", f"data.cache_dir={tmp_path / 'cache'}"]
    run(config, tmp_path / "kept", *retained, "run.max_steps=2")
    parts = run(config, tmp_path / "kept", *retained)
    assert "read from" in capsys.readouterr().out
    names = ("loss", "grad_norm", "rewards/margins")
    steps = [line for line in parts if "loss" in line]
    assert [[line[name] for name in names] for line in steps] == [
        pytest.approx([line[name] for name in names], rel=1e-5, abs=1e-7)
        for line in completed
        if "loss" in line
    ]
    shutil.rmtree(tmp_path / "cache" / "reference")
    words = ["--config", str(config), f"run.output_dir={tmp_path / 'kept'}", *retained]
    assert main([*words, "run.max_steps=5"]) == 2
    assert "reference log-probs that this run began with" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reference_on_the_host_changes_no_bit(config, tmp_path, capsys, monkeypatch):
    """Beside model.remat = "offload", whose copies a CPU's program does not have."""
    steps, moved = {}, []

    def recorded(move):
        def record(params):
            params = move(params)
            moved.extend(value.sharding.memory_kind for value in params.values())
            return params

        return record

    for name in ("to_host", "to_devices"):
        monkeypatch.setattr(roles, name, recorded(getattr(roles, name)))
    for place in ("device", "host"):
        assert not moved
        words = [
            f"parallel.frozen={place}",
            "parallel.fsdp=2",
            "parallel.data=2",
            "run.max_steps=2",
        ]
        words += ["model.remat=offload"] if place == "host" else ["model.remat=full"]
        lines = run(config, tmp_path / place, *words)
        steps[place] = [(line["loss"], line["grad_norm"]) for line in lines]
    assert steps["host"] == steps["device"]
    # To the host once, and back for each of two batches.
    assert moved.count("device") >= 2 * moved.count("pinned_host") > 0
    assert "moves nothing" not in capsys.readouterr().err
    lora = ["parallel.frozen=host", "adapter.kind=lora", "run.max_steps=1"]
    run(config, tmp_path / "lora", *lora)  # its reference is the model without the adapter
    assert 'parallel.frozen "host" moves nothing' in capsys.readouterr().err
    arguments = ["--config", str(config), f"run.output_dir={tmp_path / 'dry'}", "--dry-run"]
    assert main([*arguments, "parallel.frozen=host"]) == 0
    output = capsys.readouterr().out
    assert "other models, GiB of host memory per device" in output
    assert "other models, GiB per device" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["task.loss=kto", "adapter.kind=lora", "adapter.rank=2", "adapter.quantize=int8"],
            marks=pytest.mark.thorough,
        ),
        ["task.reference=mixed", "task.reference_every=1", "task.ld_alpha=0.5"],
        pytest.param(
            ["task.loss=aot", "task.share_prompts=false", "parallel.fsdp=2", "parallel.context=2"],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["kto qlora", "tr-dpo", "flat on a mesh"],
)
def test_methods_learn_through_the_front_door(config, tmp_path, words):
    lines = run(config, tmp_path / "run", *words, "run.max_steps=3")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(np.isfinite(value) for value in lines[-1].values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.loss=hinge", "task.label_smoothing=0.1"], "label_smoothing has no meaning in"),
        (['task.loss=["kto","sigmoid"]'], "take losses of one kind"),
        (['task.loss=["simpo","sigmoid"]'], "set task.beta"),
        (["task.loss=simpo", "task.reference=frozen"], "needs no reference"),
        (["task.loss=kto", "task.reference=precomputed"], "behind other prompts"),
        (["task.loss=aot", "task.use_weighting=true"], "use_weighting weighs pairs"),
        (["task.loss=exo_pair", "task.label_smoothing=0"], "set 0.001"),
        (["task.reference=adapter_off"], "needs an adapter"),
        (['task.loss=["sigmoid","ipo"]', "task.loss_weights=[1]"], "1 numbers for 2 losses"),
        (["task.loss=apo_zero", "task.f_divergence=js"], "f_divergence has no meaning"),
        (["task.loss=dpoo"], "task.loss"),
        (["task.kind=dpo"], 'task.loss = "sigmoid"'),
        (["task.kind=kto"], 'task.kind = "preference"'),
    ],
)
def test_mistakes_are_named(config, tmp_path, capsys, words, message):
    assert main(["--config", str(config), f"run.output_dir={tmp_path / 'run'}", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
