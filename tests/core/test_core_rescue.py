"""A run that ends by an error has saved what it had trained, and goes on from there to the bits of
the run that was never stopped."""

import json

import jax
import numpy as np
import pytest
from test_methods_rl import read_params
from toy_run import MODEL

from jaxtrain.core.hooks import HookList
from jaxtrain.core.session import Session
from jaxtrain.main import main
from jaxtrain.methods.offline import OfflineRounds
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.checkpoint_folder import find_steps

SFT = f"""
[run]
max_steps = 4
export = false
{MODEL.replace("max_position_embeddings = 64", "max_position_embeddings = 512")}
[data]
sequence_len = 512
[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 200 }}
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"
[log]
plot = false
console = "plain"
"""


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "sft.toml"
    path.write_text(SFT)
    return path


def train(config, folder, *words):
    return main(["--config", str(config), f"run.output_dir={folder}", *words])


@pytest.fixture(scope="module")
def whole(sft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(sft, folder) == 0
    return folder


def assert_same(folder, whole, step=4):
    ours, theirs = read_params(folder, step), read_params(whole, step)
    for path, value in theirs.items():
        np.testing.assert_array_equal(ours[path], value, err_msg=path)
    lines = [
        [
            (line["step"], line["loss"])
            for line in map(json.loads, (one / "metrics.jsonl").open())
            if "loss" in line
        ]
        for one in (folder, whole)
    ]
    assert lines[0] == lines[1]


def after(calls, error, function):
    """A method that raises once it was called so many times."""
    remaining = [calls]

    def call(self, *args):
        remaining[0] -= 1
        if remaining[0] < 0:
            raise error
        return function(self, *args)

    return call


def raise_next(errors):
    if error := next(errors, None):
        raise error


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("next", marks=pytest.mark.thorough),
        pytest.param("update", marks=pytest.mark.slow),
        pytest.param("evaluate", marks=pytest.mark.thorough),
    ],
)
def test_any_error_after_a_step_saves_first(sft, whole, tmp_path, monkeypatch, capsys, where):
    """In the data, at a step that was asked for but not made, in an evaluation after it."""
    folder, error = tmp_path / "run", KeyError("a bug")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        if where == "next":
            patch.setattr(OfflineRounds, "next", after(3, error, OfflineRounds.next))
        elif where == "update":
            patch.setattr(Session, "update", after(3, error, Session.update))
        else:
            patch.setattr(HookList, "on_round_end", after(2, error, HookList.on_round_end))
        train(sft, folder)
    assert find_steps(folder / "checkpoints") == [3]
    assert "step 3 is saved; the same command goes on from there" in capsys.readouterr().out
    assert train(sft, folder) == 0
    assert_same(folder, whole)


@pytest.mark.slow
def test_memory_that_runs_out_is_explained(sft, tmp_path, monkeypatch, capsys):
    """The trained steps are saved, and a profile shows what held the memory."""
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nat")
    monkeypatch.setattr(Session, "update", after(2, error, Session.update))
    assert train(sft, tmp_path / "run") == 1
    printed = capsys.readouterr()
    profile = tmp_path / "run" / "memory-0.prof"
    assert profile.read_bytes()[:2] == b"\x1f\x8b", "pprof's form is compressed"
    assert f"{profile}: what holds the devices' memory" in printed.out
    assert "step 2 is saved" in printed.out
    assert "stopped: a device is out of memory (RESOURCE_EXHAUSTED: Out of memory" in printed.err
    assert "data.micro_batch_size = 1" in printed.err and "Traceback" not in printed.err


@pytest.mark.slow
def test_a_bad_step_is_not_part_of_what_is_saved(sft, whole, tmp_path, monkeypatch, capsys):
    """The step after it was dispatched already when its numbers are read."""
    folder, calls = tmp_path / "run", [0]
    update = Session.update

    def spoil(self, batch):
        calls[0] += 1
        if calls[0] == 3:
            weights = {name: value * np.float32("nan") for name, value in batch.weights.items()}
            batch = batch._replace(weights=weights)
        return update(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "update", spoil)
        assert train(sft, folder) == 1
    assert "step 3: the loss" in capsys.readouterr().err and calls[0] == 4
    assert find_steps(folder / "checkpoints") == [2]
    assert train(sft, folder) == 0
    assert_same(folder, whole)


@pytest.mark.slow
def test_checkpoints_by_time_and_a_save_that_fails_hides_no_error(
    sft, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    saved, save, next_ = [], Checkpoints.save, OfflineRounds.next

    def fail_at_last(self, step, *args, **options):
        saved.append(step)
        if step == 3 and len(saved) == 3:
            raise OSError("No space left on device")
        return save(self, step, *args, **options)

    monkeypatch.setattr(Checkpoints, "save", fail_at_last)
    with pytest.raises(OSError):
        train(sft, folder, "checkpoint.every_minutes=1e-9")
    # The third save is due by time, and refused: it is not tried a second time.
    assert saved == [1, 2, 3]
    monkeypatch.setattr(OfflineRounds, "next", after(2, KeyError("a bug"), next_))
    gone = iter([None, OSError("gone")])  # the first comes before training
    monkeypatch.setattr(Checkpoints, "wait", lambda self: raise_next(gone))
    with pytest.raises(KeyError):
        train(sft, tmp_path / "other", "checkpoint.every_minutes=null")
    assert "since step 0 could not be saved: gone" in capsys.readouterr().out
