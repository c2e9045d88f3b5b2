"""A draft learns the same wherever its target's states come from: the step, other devices, a disk;
without interruption or with one."""

import gc
import re
import shutil

import jax
import pytest
from draft_toy import compare, run, write_config

from jaxtrain.main import main
from jaxtrain.methods.drafts.state_store import StateLayout
from jaxtrain.methods.drafts.state_writer import StateWriter
from jaxtrain.methods.drafts.target_stages import OtherDevices


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    write_config(folder)
    return folder


def on_disk(folder, name="states"):
    return ('task.target.source="disk"', f"task.target.path={folder / name}")


def capture(folder, *overrides):
    return main(["capture", "--config", str(folder / "draft.toml"), *overrides])


@pytest.fixture(scope="module")
def from_step(folder):
    return run(folder, "step")


@pytest.fixture(scope="module")
def states(folder):
    assert capture(folder, *on_disk(folder)) == 0
    return folder / "states"


QUANTIZED = ("adapter", "task.target")
AHEAD = ('task.target.source="ahead"', "task.target.queue=1")


@pytest.mark.slow
def test_states_from_other_devices_train_the_same(folder, from_step, monkeypatch, capsys):
    """Two run the target, two train; no more states lie about than the queue and two steps hold."""
    most, fill = 0, OtherDevices.fill

    def counted(self, batch):
        nonlocal most
        gc.collect()
        shape = (6, 2, 64, 2 * 32)  # of a step's states on the devices that train
        remote_result = set(self.mesh.devices.flat)
        alive = [x for x in jax.live_arrays() if x.shape == shape and x.devices() == remote_result]
        most = max(most, len(alive))
        return fill(self, batch)

    monkeypatch.setattr(OtherDevices, "fill", counted)
    overrides = (*AHEAD, "task.target.devices=2")
    completed = run(folder, "ahead", *overrides)
    compare(completed, from_step)
    assert 1 <= most <= 3
    assert 0 <= completed[4]["target/busy"] <= 1 and 0 <= completed[4]["target/starved"] <= 1
    assert "the target: busy" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_from_other_devices_resumes_exactly(folder):
    """Three devices train while another runs the target; batches that waited in the queue are made
    again."""
    overrides = (*AHEAD, "task.target.queue=3", "parallel.fsdp=3")
    completed = run(folder, "resumed", *overrides)
    shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
    again = run(folder, "resumed", *overrides)
    for step in (3, 4):
        assert again[step]["loss"] == completed[step]["loss"]
    compare(again, completed, rtol=0)


@pytest.mark.slow
def test_states_from_disk_train_the_same(folder, from_step, states):
    compare(run(folder, "disk", *on_disk(folder)), from_step)


@pytest.mark.slow
def test_an_interrupted_capture_goes_on_to_the_same_bytes(folder, states, monkeypatch):
    """Samples of two shards, killed between them."""
    choose = StateLayout.choose
    monkeypatch.setattr(StateLayout, "choose", lambda *a: choose(*a, shard_bytes=2**16))
    position = on_disk(folder, "whole")
    assert capture(folder, *position) == 0
    remaining, add = 30, StateWriter.add

    def stopped(self, *sample):
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise KeyboardInterrupt
        return add(self, *sample)

    monkeypatch.setattr(StateWriter, "add", stopped)
    position = on_disk(folder, "killed")
    assert capture(folder, *position) == 130
    assert main(["--config", str(folder / "draft.toml"), *position]) == 2
    monkeypatch.setattr(StateWriter, "add", add)
    assert capture(folder, *position) == 0
    files = [path for path in (folder / "whole").rglob("*") if path.is_file()]
    assert len(list((folder / "whole" / "index").iterdir())) > 1
    for path in files:
        second = folder / "killed" / path.relative_to(folder / "whole")
        assert path.read_bytes() == second.read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, message",
    [
        (["run.seed=1"], "other weights"),
        (["task.draft.target_layers=[0,2]"], r"layers \[0, 1\] there, \[0, 2\] here"),
        (['model.compute_dtype="bfloat16"'], "dtype float32 there, bfloat16 here"),
        (['task.target.quantize="int8"'], "quantize none there, int8 here"),
        (["data.datasets.0.path={folder}/other.jsonl"], "other.jsonl': its rows or the keys"),
        (['task.target.source="disk"', "task.target.path={folder}/nothing"], "there are no target"),
    ],
)
def test_states_of_something_else_are_refused(folder, states, overrides, message, capsys):
    (folder / "other.jsonl").write_text((folder / "rows.jsonl").read_text().replace("7?", "8?"))
    overrides = [override.replace("{folder}", str(folder)) for override in overrides]
    messages = ["--config", str(folder / "draft.toml"), f"run.output_dir={folder / 'refused'}"]
    assert main([*messages, *on_disk(folder), *overrides]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_changed_row_ends_the_run_and_capture_adds_it(folder, states, tmp_path, capsys):
    shutil.copytree(states, tmp_path / "states")
    changed = (folder / "rows.jsonl").read_text().replace("rows 17?", "rows 1717?")
    (tmp_path / "rows.jsonl").write_text(changed)
    overrides = [f"data.datasets.0.path={tmp_path / 'rows.jsonl'}", *on_disk(tmp_path)]
    assert main(["--config", str(folder / "draft.toml"), *overrides]) == 2
    capsys.readouterr()
    assert capture(folder, *overrides) == 0
    assert "capturing 1 samples (43 are there already)" in capsys.readouterr().out
    assert main(["--dry-run", "--config", str(folder / "draft.toml"), *overrides]) == 0
    assert "target states of 44 samples" in capsys.readouterr().out


def test_capture_says_what_it_needs(folder, monkeypatch, capsys):
    usage = shutil.disk_usage(folder)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert capture(folder, *on_disk(folder, "full")) == 2
    captured = capsys.readouterr()
    assert "813 tokens x 256 bytes = 0.2 MiB" in captured.out
    assert "has 0.0 MiB left, 0.2 MiB are needed (256 bytes a token)" in captured.err
    assert capture(folder) == 2
    assert 'task.target.source is "step"' in capsys.readouterr().err
    text = (folder / "draft.toml").read_text()
    (folder / "sft.toml").write_text(text[: text.index("[task]")])
    assert main(["capture", "--config", str(folder / "sft.toml")]) == 2
    assert 'task.kind "sft" reads no target states' in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["task.target.devices=2"], 'task.target.devices has no effect with .* "step"'),
        (['task.target.source="disk"'], "needs task.target.path"),
        ([*AHEAD, "task.target.devices=3", "task.target.tensor=2"], "not a multiple of tensor"),
        ([*AHEAD, "task.target.devices=4"], "task.target.devices 4: there are 4 devices in all"),
        (
            ["adapter=lora", "adapter.path=x", *(f'{key}.quantize="int8"' for key in QUANTIZED)],
            "both store the target",
        ),
    ],
)
def test_impossible_sources_are_refused(folder, overrides, message, capsys):
    assert main(["--config", str(folder / "draft.toml"), *overrides]) == 2
    assert re.search(message, capsys.readouterr().err)
