"""Drafts through the step and whole runs: microsteps, meshes, going on, what is refused."""

import shutil

import jax
import numpy as np
import pytest
import step_harness as harness
from step_harness import make_table, read_metrics, run_config, write_run

from jaxtrain.config.load import validate_config
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main

DFLASH = {
    "kind": "dflash",
    "block_size": 4,
    "num_anchors": 6,
    "min_loss_tokens": 2,
    "draft": {"num_layers": 2, "target_layers": [2, 0]},
}
TABLE = make_table(DFLASH, num_layers=3, sequence_len=40)


def make(**changes):
    return harness.merge(TABLE, changes)


def make_batch():
    """[1, 4, 40]: packed documents and a tree."""
    rng = np.random.default_rng(0)

    def node(length, parent=-1):
        weights = (rng.random(length) < 0.8).astype(np.float64)
        return Node(parent, rng.integers(1, 200, length).astype(np.int32), {"nll": weights})

    tree = Tree((node(8), node(7, 0), node(9, 0), node(5, 2), node(6, 2)))
    lengths = [(21, 15), (30,), (9, 9, 9)]
    rows = [[lay_out(Tree((node(n),))) for n in row] for row in lengths]
    return jax.tree.map(lambda x: x[None], build_batch([[lay_out(tree)], *rows], 40))


def update(task, microsteps=1, **axes):
    return harness.update(task, make_batch(), microsteps, **axes)


@pytest.fixture(scope="module")
def single_device():
    return update(make())


def check_same(actual, expected, most):
    assert len(expected[1]) == 14
    harness.check_same(actual, expected, most)


@pytest.mark.slow
def test_microsteps_are_one_batch(single_device):
    """float32, the order of sums: 3e-6 of the largest gradient."""
    check_same(update(make(), 2), single_device, 3e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 2, "context": 2},
        {"data": 2, "tensor": 2},
    ],
    ids="_".join,
)
def test_meshes_are_one_device(single_device, axes):
    """Meshes change nothing either."""
    check_same(update(make(), **axes), single_device, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "weighting", ["dpace", pytest.param("continuation-value-only", marks=pytest.mark.thorough)]
)
def test_other_weightings_are_exact_under_microsteps(weighting):
    task = {**TABLE["task"], "weighting": weighting}
    check_same(update(make(task=task), 2), update(make(task=task)), 3e-6)


TASK = """
[task]
kind = "dflash"
block_size = 4
num_anchors = 8
min_loss_tokens = 2
[task.draft]
num_layers = 1
target_layers = [0, 2]
"""


def read_lines(folder):
    return read_metrics(folder, "loss", "acc", "eval/", "grad")


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_writes_a_draft(tmp_path, capsys):
    config = run_config(TASK, 3, "cache = false")
    words = write_run(tmp_path, config, " {0} and {1} end")
    assert main(words) == 0
    first = read_lines(tmp_path / "run")
    written = {n: t.shape for n, t in SafetensorsFolder(tmp_path / "run" / "model").tensors.items()}
    assert written["fc.weight"] == (32, 64) and "embed_tokens.weight" not in written
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "run" / "model")
    assert main(words) == 0
    again = read_lines(tmp_path / "run")
    assert again.keys() == first.keys() and (4, "eval/accept_len") in first
    assert again == first
    # On from its own folder.
    on = [f"task.draft.path={tmp_path / 'run' / 'model'}", f"run.output_dir={tmp_path / 'on'}"]
    fewer = config.replace("num_layers = 1\ntarget_layers = [0, 2]\n", "")
    words = write_run(tmp_path, fewer, " {0} and {1} end")
    assert main([*words, *on, "run.max_steps=1"]) == 0
    # A draft is no model.
    for name in ("run/model", "run"):
        assert main(["generate", str(tmp_path / name), "--prompt", "1 + 1"]) == 2
        assert "writes nothing alone" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"draft": {"num_layers": 3}}, "task.draft.target_layers .* names layer . twice"),
        ({"draft": {"target_layers": [0, 3]}}, "3 layers, which count from 0, .* no layer 3"),
        ({"draft": {"target_layers": []}}, "is empty"),
        ({"draft": {"target_layers": [0], "mask_token_id": 512}}, "outside of the target's"),
        ({"draft": {"target_layers": [0], "num_attention_heads": 3}}, "must be a multiple of"),
        (
            {
                "draft": {
                    "target_layers": [0],
                    "layer_types": ["sliding_attention"],
                    "sliding_window": 8,
                }
            },
            "layer_types has 1 entries, the draft 5",
        ),
        ({"draft": {"sliding_window": 8}}, "has no effect without a sliding_attention layer"),
        ({"draft": {"path": "x", "num_layers": 2}}, "is fixed by task.draft.path"),
        ({"draft": {"path": "no/such/draft"}}, "task.draft.path 'no/such/draft'"),
        ({"weighting": "dpace", "decay": 3.0}, "task.decay has no effect"),
        ({"alpha": 0.3}, "task.alpha has no effect"),
    ],
)
def test_what_is_refused(changes, output):
    with pytest.raises(UserError, match=output):
        make(task={**TABLE["task"], "draft": {}, **changes})


def test_an_adapter_that_would_be_trained_is_refused():
    with pytest.raises(UserError, match="the target of a draft is not trained"):
        merged = {**TABLE, "adapter": {"kind": "lora"}}
        validate_config(merged, "test")
