"""A draft that learns between the rounds of its policy: from the drawn tokens alone, held to the
policy's weights of the moment; a resumed run is the run that was never stopped."""

import contextlib
import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_methods_rl import CONFIG, run
from test_methods_rl_draft import TARGET

from jaxtrain.config import load_config, validate_config
from jaxtrain.core.auxiliary import AuxiliaryModel
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.task import Round
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from jaxtrain.methods.rl.batch_builder import BatchBuilder, build_batches
from jaxtrain.models import families, loading
from jaxtrain.runs.checkpoint import Checkpoints

sys.path.append(str(Path(__file__).parents[1] / "generation"))
import test_generation_drafts as drafts

from tests.docs.metric_names import require_rows

REFRESH = {
    "dflash": {"kind": "dflash", "num_anchors": 64, "decay": 4.0},
    "eagle3": {"kind": "eagle3", "decay": 0.5},
}


def make_draft(kind: str):
    """The config of a small draft of toy_run.MODEL."""
    if kind == "dflash":
        inner = {"mask_token_id": 500, "target_layer_ids": [0]}
        return drafts.make_dflash(TARGET, num_hidden_layers=1, dflash_config=inner)
    raw = {key: value for key, value in TARGET.items() if key != "model_type"}
    layers = {"eagle_aux_hidden_state_layer_ids": [0], "ttt_length": 3}
    local_value = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "rope_theta": 1e4,
    }
    return families.config_from_hf(
        {**raw, **local_value, "initializer_range": 0.3, "eagle_config": layers}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: draft folder} of random weights."""
    position = tmp_path_factory.mktemp("drafts")
    return {kind: str(drafts.save(make_draft(kind), 1, position / kind)) for kind in REFRESH}


def make_config(folder: str, kind: str, **refresh):
    table = tomllib.loads(CONFIG)
    optim = {"name": "sgd", "beta1": 0.0, "learning_rate": 0.5, "max_grad_norm": 1e6}
    refresh = {"task": REFRESH[kind], "optim": optim, **refresh}
    table["rollout"] |= {"draft": folder, "draft_refresh": refresh}
    return validate_config(table, "test")


def draw_group(rng) -> Group:
    """Answers to one prompt, one of them in two turns, and one that begins as another does."""
    prompt = rng.integers(1, 200, 5).tolist()
    episodes = []
    for turns in (1, 1, 2, 1):
        tokens, sampled = list(prompt), [False] * len(prompt)
        for turn in range(turns):
            new = rng.integers(1, 200, 6).tolist()
            if episodes and turn == 0:
                new[:2] = episodes[0].tokens[5:7]
            between = [7, 8] if turn < turns - 1 else []
            tokens += new + between
            sampled += [True] * len(new) + [False] * len(between)
        zeros = [0.0] * len(tokens)
        episodes.append(Episode(tokens, sampled, zeros, [0] * len(tokens), "stop"))
    return Group(0, {}, episodes, [{}] * 4, advantages=np.array([1.0, -1.0, 0.0, 1.0]))


class Live:
    """core.task.Live, as far as a refresh asks: its policy is not the one of the start."""

    def __init__(self, task, parts):
        roles = Roles(task.roles)
        trained, frozen, _ = roles.open(0)
        moved = {path: value * 1.5 for path, value in trained.items()}
        self.now = ModelSnapshot(roles, {**frozen, **moved}, 1)
        self.auxiliary = {
            name: AuxiliaryModel(entry, parts) for name, entry in task.auxiliary.items()
        }
        for entry in self.auxiliary.values():
            entry.open(0)

    def snapshot(self):
        return self.now

    def phase(self, name, detail=None):
        return contextlib.nullcontext()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dflash", pytest.param("eagle3", marks=pytest.mark.thorough)])
def test_a_refresh_is_a_step_on_each_answer_by_itself(folders, kind):
    """Its gradient is that of a run which trains the draft on the same answers as documents: with
    so many blocks nothing is left to chance, and answers part before what is drawn."""
    task = make_task(make_config(folders[kind], kind))
    (learner,) = task.auxiliary.values()
    live = Live(task, task.roles["policy"].bundle)
    entry = live.auxiliary["draft"]
    start = jax.device_get(entry.state.params)
    group = draw_group(np.random.default_rng(3))
    labels = BatchBuilder(StepShape(4, None, 64), "sequence", dtype=np.float32)
    (batch,) = build_batches([group], labels).batches

    refresh, method = task.prepare.func.__self__, SimpleNamespace(prepare=lambda round, _: round)
    ready = refresh.prepare(method, Round([batch], version=0), None)
    assert ready.batches[0] is batch  # what the policy trains on is left alone
    refresh.prepare(method, Round([batch], held_out=True), None)
    with jax.set_mesh(task.mesh):
        actual = task.after_round(live, 0)
    assert actual["draft/loss"] > 1 and 1 <= actual["draft/accept_len"] <= 4
    moved = jax.device_get(entry.state.params)
    assert task.after_round(live, 1) == {}  # nothing was drawn since

    rows = []
    for episode in group.episodes:
        weights = {"nll": np.array(episode.sampled, np.float64)}
        node = Node(-1, np.array(episode.tokens, np.int32), weights)
        rows.append([lay_out(Tree((node,)))])
    flat = jax.tree.map(lambda x: x[None], build_batch(rows, 64))
    flat = flat._replace(weights={"nll": flat.weights["nll"].astype(np.float32)})
    module = sys.modules[f"jaxtrain.methods.drafts.{kind}_method"]
    section = task_section(folders[kind], kind)
    lesson = module.teach(section, task.roles["policy"].bundle)
    flat = lesson.label(flat, np.random.default_rng(9))
    models = {
        "draft": Roles({"draft": learner.role}),
        "target": Roles({"target": task.roles["policy"]}),
    }
    target = models["target"].rebuild("target")(live.snapshot().params())

    def loss(params):
        micro = jax.tree.map(lambda x: x[0], flat)
        pair = {"draft": models["draft"].rebuild("draft")(params), "target": target}
        (total,) = lesson.loss(pair, micro)[0].values()
        return total / micro.denoms[lesson.component]

    with jax.set_mesh(task.mesh):
        gradient = jax.device_get(jax.jit(jax.grad(loss))(start))
    assert sum(np.abs(g).sum() for g in gradient.values()) > 0.1
    for path, before in start.items():
        expected = before - 0.5 * gradient[path]
        np.testing.assert_allclose(moved[path], expected, rtol=1e-4, atol=2e-6, err_msg=path)


def task_section(folder: str, kind: str):
    """The config of a run that trains this draft further."""
    config = make_config(folder, kind)
    refresh = config.rollout.draft_refresh
    draft = refresh.task.draft.model_copy(update={"path": folder})
    return config.model_copy(update={"task": refresh.task.model_copy(update={"draft": draft})})


def read_state(folder, step: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint that are the draft's."""
    config = validate_config(json.loads((folder / "config.json").read_text()), "saved")
    task = make_task(config)
    auxiliary_model = AuxiliaryModel(task.auxiliary["draft"], task.roles["policy"].bundle)
    with jax.set_mesh(task.mesh):
        checkpoints = Checkpoints(folder / "checkpoints")
        tree = checkpoints.load(step, {"draft": auxiliary_model.state.tree()}).arrays["draft"]
        checkpoints.close()
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(value) for path, value in named}


CLOCKS = ("time", "seconds", "per_second", "memory", "mfu", "tflops")


def read_numbers(folder) -> list[dict]:
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if not any(c in k for c in CLOCKS)} for line in lines]


@pytest.mark.thorough
def test_a_resumed_run_refreshes_as_the_run_that_was_never_stopped(folders, tmp_path):
    """The draft's weights and optimizer state are in the checkpoint, so the draft guesses and
    learns on as it would have."""
    path = tmp_path / "rl.toml"
    path.write_text(CONFIG.replace("export = false", ""))
    words = [
        f"rollout.draft={folders['dflash']}",
        'rollout.draft_refresh.task={kind = "dflash", num_anchors = 64}',
        "rollout.draft_refresh.optim.learning_rate=1e-2",
        "rollout.draft_refresh.every=2",
        "rollout.draft_refresh.passes=2",
        *("checkpoint.every=2", "optim.name=sgd", "rollout.prompts_per_step=2"),
    ]
    full, parts = tmp_path / "whole", tmp_path / "parts"
    run(path, full, *words)
    run(path, parts, *words, "run.max_steps=2", "run.export=false")
    run(path, parts, *words, "run.allow_config_change=true")
    numbers = read_numbers(full)
    assert numbers == read_numbers(parts)
    # A line of its own for every second round.
    assert [line["step"] for line in numbers if "draft/loss" in line] == [2, 4]
    assert all(line["draft/tau"] >= 1 for line in numbers if "reward" in line)
    first, right = read_state(full, 4), read_state(parts, 4)
    assert any("mu" in name for name in first) and first.keys() == right.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)
    assert first["['step']"] == 4  # two rounds of two passes

    # What the run writes at its end is that draft.
    written = loading.load(full / "draft")
    fc = first["['params']['fc.kernel']"]
    np.testing.assert_array_equal(np.asarray(written.fc.kernel.get_value()), fc)
    assert (
        np.abs(np.asarray(loading.load(folders["dflash"]).fc.kernel.get_value()) - fc).max() > 1e-3
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (['rollout.draft_refresh.task={kind = "dflash"}'], "no effect without rollout.draft"),
        (["rollout.draft_refresh.task.num_anchors=3"], 'kind must be "dflash" or "eagle3"'),
        (
            ["rollout.draft=x", 'rollout.draft_refresh.task={kind = "dflash", vocab_rows = 2}'],
            "rollout.draft_refresh.task.vocab_rows: unknown key",
        ),
        (
            [
                "rollout.draft=x",
                'rollout.draft_refresh.task={kind = "eagle3", vocab_rows = 2, kl_decay = 1.0}',
                "rollout.draft_refresh.task.draft.num_layers=1",
                "rollout.draft_refresh.optim.warmup_ratio=0.1",
            ],
            "vocab_rows has no effect, for rollout.draft has its vocabulary(.|\n)*"
            "draft_refresh.task.draft.num_layers: the draft is that of rollout.draft(.|\n)*"
            "draft_refresh.task.kl_decay has no effect(.|\n)*set warmup_steps instead",
        ),
    ],
)
def test_conflicts_are_named(tmp_path, words, expected):
    path = tmp_path / "rl.toml"
    path.write_text(CONFIG)
    with pytest.raises(UserError, match=expected):
        load_config(str(path), words)


@pytest.mark.slow
def test_a_draft_of_another_kind_is_refused(folders, tmp_path, capsys):
    path = tmp_path / "rl.toml"
    path.write_text(CONFIG)
    words = [f"rollout.draft={folders['dflash']}", "--dry-run"]
    words += ["rollout.draft_refresh.task.kind=eagle3", f"run.output_dir={tmp_path / 'run'}"]
    assert main(["--config", str(path), *words]) == 2
    assert re.search("rollout.draft .* holds DFlashDraftModel; needed is", capsys.readouterr().err)
