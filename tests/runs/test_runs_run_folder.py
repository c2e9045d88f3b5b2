"""The run folder: who may use it, with which config, and what a resumed run cuts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import Config
from jaxtrain.config.base import list_places
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import SplitPiece
from jaxtrain.huggingface.packed import fingerprint
from jaxtrain.huggingface.safetensors import write_folder
from jaxtrain.runs.folder import RunFolder, cut_lines, find_changes, list_names
from jaxtrain.runs.records import flatten
from jaxtrain.runs.run_files import SET_ASIDE, claim_names, list_own, put_back, replace_folder
from tests.rights import read_only

REPO = Path(__file__).parents[2]


def make_config(folder, **sections) -> Config:
    table = {
        "run": {"output_dir": str(folder), "max_steps": 10},
        "model": {"architecture": {"hidden_size": 8}, "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "a"}]},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return Config.model_validate(table)


def open_run(folder, command=("jaxtrain",), **sections) -> RunFolder:
    with RunFolder(make_config(folder, **sections), list(command)) as run:
        run.accept()
        return run


def fake_steps(folder: Path, steps=(5,)):
    """A checkpoint with a manifest, and metrics, as far as the run folder looks."""
    for step in steps:
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        (folder / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_new_folder_gets_config_and_attempt(tmp_path):
    run = open_run(tmp_path / "a/b", command=["jaxtrain", "--config", "x.toml"])
    saved = json.loads((run.path / "config.json").read_text())
    assert Config.model_validate(saved) == make_config(run.path)
    [line] = (run.path / "attempts.jsonl").read_text().splitlines()
    attempt = json.loads(line)
    assert attempt["attempt"] == run.attempt == 1
    assert attempt["command"] == ["jaxtrain", "--config", "x.toml"]
    assert {"python", "jaxtrain", "jax", "flax", "orbax-checkpoint"} <= set(attempt["versions"])
    assert attempt["devices"] == ["cpu"] * 4
    assert open_run(run.path).attempt == 2


def test_an_attempt_that_ended_without_a_word_is_named_by_the_next(tmp_path):
    (tmp_path / "mine.py").write_text("Sink = dict")
    log = {"sinks": [f"{tmp_path}/mine.py:Sink"]}
    open_run(tmp_path / "run", log=log)
    beat = {"state": "running", "step": 7, "phase": "training"}
    (tmp_path / "run/heartbeat.json").write_text(json.dumps(beat))
    _, warning, *_ = open_run(tmp_path / "run", log=log).describe()
    expected = "warning: the last attempt ended after step 7, in 'training', without a word: "
    assert warning.startswith(expected) and warning.endswith(f"such as {log['sinks'][0]}")
    (tmp_path / "run/heartbeat.json").write_text(json.dumps({**beat, "state": "finished"}))
    assert len(open_run(tmp_path / "run", log=log).describe()) == 1


def test_the_same_config_and_free_keys_resume(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    run = open_run(
        tmp_path,
        run={"max_steps": 20, "export": False},
        log={"every": 7},
        checkpoint={"keep": 5},
        model={"remat": "full"},
    )
    assert "run.max_steps: 10 -> 20" in run.changes and len(run.changes) == 5
    first, second = run.describe()
    assert "attempt 2: python 3" in first and "run.max_steps: 10 -> 20; " in second
    assert json.loads((tmp_path / "config.json").read_text())["run"]["max_steps"] == 20


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"optim": {"learning_rate": 0.5}}, "optim.learning_rate: 1e-05 -> 0.5"),
        ({"run": {"max_steps": 9}}, "run.max_steps: 10 -> 9"),
        ({"run": {"seed": 1}}, "run.seed: 0 -> 1"),
        ({"data": {"datasets": [{"path": "b"}]}}, "data.datasets.0.path: 'a' -> 'b'"),
        (
            {"model": {"architecture": {"hidden_size": 16}}},
            "model.architecture.hidden_size: 8 -> 16",
        ),
        ({"data": {"micro_batch_size": 2}}, "data.micro_batch_size: 1 -> 2"),
        (
            {"data": {"datasets": [{"path": "a"}, {"path": "b"}]}},
            "data.datasets.1.path: None -> 'b'",
        ),
    ],
)
def test_another_config_is_refused_and_changes_nothing(tmp_path, change, line):
    open_run(tmp_path)
    fake_steps(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file() and p.name != ".lock"}
    with pytest.raises(UserError) as caught:
        open_run(tmp_path, **change)
    assert line in str(caught.value) and "run.allow_config_change" in str(caught.value)
    assert all(path.read_bytes() == content for path, content in before.items())
    allowed = {**change, "run": {**change.get("run", {}), "allow_config_change": True}}
    assert any(line == shown for shown in open_run(tmp_path, **allowed).changes)


def test_a_run_from_before_a_key_was_there_resumes_with_its_default(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    del saved["rollout"]["options"], saved["log"]["sinks"], saved["model"]["family"]
    saved["eval"]["problems"] = 64  # and one that is there no longer
    path.write_text(json.dumps(saved))
    assert open_run(tmp_path).changes == []


def test_a_folder_where_nothing_was_trained_takes_any_config(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, run={"seed": 3})
    assert json.loads((tmp_path / "config.json").read_text())["run"]["seed"] == 3


def test_with_a_global_batch_size_the_split_and_the_devices_are_free():
    saved = make_config("x", data={"global_batch_size": 8}).model_dump(mode="json")
    config = make_config("x", data={"global_batch_size": 8, "micro_batch_size": 2})
    shown, refused = find_changes(saved, config.model_dump(mode="json"), 4, 8)
    assert shown == ["data.micro_batch_size: 1 -> 2"] and refused == []
    plain = make_config("x").model_dump(mode="json")
    assert "devices: 4 -> 8" in find_changes(plain, plain, 4, 8)[1][0]
    assert find_changes(plain, plain, 4, 4) == ([], [])
    assert find_changes(plain, plain, None, 4) == ([], [])


def test_flatten_names_every_leaf():
    table = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"e": 3}], "f": [1, 2], "g": []}
    assert flatten(table) == {
        "a.b": 1,
        "a.c": {},
        "d.0.e": 2,
        "d.1.e": 3,
        "f": [1, 2],
        "g": [],
    }


def test_resume_never_and_required(tmp_path):
    with pytest.raises(UserError, match='resume is "required"'):
        open_run(tmp_path, run={"resume": "required"})
    assert not (tmp_path / "config.json").exists()
    open_run(tmp_path, run={"resume": "never"})
    fake_steps(tmp_path)
    with pytest.raises(UserError, match='resume is "never"'):
        open_run(tmp_path, run={"resume": "never"})
    run = open_run(tmp_path, run={"resume": "required"})
    with pytest.raises(UserError, match="holds no usable checkpoint"):
        run.rewind(0)  # they were all unfinished


def list_files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock, links followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("log.txt", "model/x", "curves.png", "nonfinite_batch_step_3.npz"):
        (tmp_path / name).write_text("x")
    claim_names(tmp_path, ["eval"])
    for name in ("eval", "merged", "profile", "notes"):  # the first one is the run's
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("x")
    open_run(tmp_path, run={"overwrite": True, "seed": 4})
    remaining = {p.name for p in tmp_path.iterdir()}
    retained = {"merged", "profile", "notes"}
    assert remaining == {".lock", "run.json", "config.json", "attempts.jsonl", *retained}
    with pytest.raises(UserError, match="profile was not made by a run"):
        open_run(tmp_path, log={"profile_start": 1}, run={"overwrite": True, "seed": 4})


def test_overwrite_follows_no_link(tmp_path):
    open_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / "run" / "model").symlink_to(tmp_path / "mine")
    open_run(tmp_path / "run", run={"overwrite": True})
    assert not (tmp_path / "run" / "model").exists() and (tmp_path / "mine" / "x").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "model.safetensors", "tokenizer.json"],
        ["adapter_config.json", "adapter_model.safetensors"],
        ["model-00001-of-00002.safetensors"],
        ["model/notes.txt"],
        ["checkpoints/epoch1.pt"],
        ["metrics.jsonl"],
        ["nonfinite_batch_step_1.npz"],
    ],
)
def test_a_folder_that_no_run_made_is_refused_whole(tmp_path, names, overwrite, monkeypatch):
    folder = tmp_path / "theirs"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"architectures": ["LlamaForCausalLM"]}')
    before = list_files(folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    first = names[0].split("/")[0]
    for provided in (folder, f"{folder}/", tmp_path / "link", ".", "../theirs/../theirs"):
        with pytest.raises(UserError, match=f"run.output_dir .*{first}.* was not made by a run"):
            open_run(provided, run={"overwrite": overwrite})
    assert list_files(folder) == before and not (folder / ".lock").exists()


def test_a_run_from_before_there_were_records_is_a_run(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    (tmp_path / "run.json").unlink()
    assert open_run(tmp_path).attempt == 2
    (tmp_path / "run.json").unlink()
    (tmp_path / "eval").mkdir()
    open_run(tmp_path, run={"overwrite": True})
    assert not (tmp_path / "eval").exists() and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"names": 3}', '{"names": [".."]}', '{"names": ["*"]}', "[" * 9999]
)
def test_a_damaged_record_deletes_nothing(tmp_path, text):
    open_run(tmp_path)
    fake_steps(tmp_path)
    (tmp_path / "run.json").write_text(text)
    before = list_files(tmp_path)
    with pytest.raises(UserError, match="run.json is damaged"):
        open_run(tmp_path, run={"overwrite": True})
    assert list_files(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_reads_nothing_that_it_replaces(tmp_path, overwrite, monkeypatch):
    folder = tmp_path / "run"
    open_run(folder)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(folder / "model")
    monkeypatch.chdir(tmp_path)
    for provided in (folder / "model", "run/model/", "link", "run/../run/model"):
        for key in ("tokenizer", "chat_template"):
            with pytest.raises(UserError, match=f"model.{key} .* lies in 'model' of run.output_d"):
                open_run(folder, run={"overwrite": overwrite}, model={key: str(provided)})
    with pytest.raises(UserError, match="data.datasets.0.path .* lies in 'samples.jsonl'"):
        open_run(folder, data={"datasets": [{"path": "run/samples.jsonl"}]})
    assert (folder / "model" / "config.json").exists()


def test_home_is_expanded_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = make_config(
        "~/run",
        model={"tokenizer": "~/tok", "chat_template": "~/t.jinja"},
        data={"datasets": [{"path": "~/x.jsonl"}]},
        rewards=[{"function": "~/r.py:f"}],
        env={"kind": "~/env.py:Env"},
        task={"kind": "rl"},
        sampling={"temperature": 1.0},
    )
    places = dict(list_places(config))
    assert len(places) >= 6 and not any(value.startswith("~") for value in places.values())
    assert config.run.output_dir == f"{tmp_path}/run"
    assert config.env.kind == f"{tmp_path}/env.py:Env"


def test_rewind_cuts_later_and_half_written_lines(tmp_path):
    run = open_run(tmp_path)
    lines = [f'{{"step": {step}, "loss": {step}.5}}' for step in (0, 2, 2, 3, 4)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("\n".join([*lines, '{"step": 5, "lo']))
    run.rewind(2)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_text().splitlines() == lines[:3]
    run.rewind(0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    cut_lines(tmp_path / "not there", 3)


HOLDER = """
import sys, time
from jaxtrain.runs.folder import take_lock
from pathlib import Path
take_lock(Path(sys.argv[1]) / ".lock", Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_share_a_folder_and_a_dead_one_holds_nothing(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO}/tests/plain"},
    )
    assert child.stdout.readline() == b"locked\n"
    with pytest.raises(UserError, match=f"in use by process {child.pid}"):
        open_run(tmp_path)
    child.kill()
    child.communicate()
    assert open_run(tmp_path).attempt == 1


def test_folders_that_cannot_be_used_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.output_dir .*file/run.*Not a directory"):
        open_run(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="run.output_dir .*File exists"):
        open_run(tmp_path / "file")


def test_a_folder_without_write_permission_is_named(tmp_path):
    with read_only(tmp_path), pytest.raises(UserError, match="Permission denied"):
        open_run(tmp_path / "run")


def test_a_broken_saved_config_is_named(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not valid JSON"):
        open_run(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json is missing"):
        open_run(tmp_path)


def test_everything_a_run_makes_is_its_own(tmp_path):
    refresh = {"task": {"kind": "eagle3"}, "optim": {"warmup_steps": 1}}
    config = make_config(
        tmp_path,
        model={"path": "base", "architecture": None, "tokenizer": None},
        task={"kind": "rl"},
        rewards=[{"function": "exact_match"}],
        rollout={"draft": "draft", "draft_refresh": refresh},
        sampling={"temperature": 1.0},
    )
    assert {"draft", "base", "model"} <= set(list_names(config))
    with RunFolder(config, []) as run:
        run.accept()
    with replace_folder(tmp_path / "draft") as folder:
        (folder / "x").write_text("1")
    with replace_folder(tmp_path / "draft") as folder:  # by a repeated or a resumed run
        (folder / "x").write_text("2")
    assert (tmp_path / "draft/x").read_text() == "2"
    config = config.model_copy(update={"run": config.run.model_copy(update={"overwrite": True})})
    with RunFolder(config, []) as run:
        run.accept()
    assert not (tmp_path / "draft").exists()


def test_lost_checkpoints_and_killed_first_ones_are_told_apart(tmp_path):
    run = open_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    open_run(tmp_path)  # killed before a checkpoint was finished
    run.note_saved()
    fake_steps(tmp_path)
    open_run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="has saved checkpoints, but .*checkpoints has none"):
        open_run(tmp_path)
    open_run(tmp_path, run={"overwrite": True})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    open_run(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_start_that_is_not_accepted_leaves_the_folder_as_it_was(tmp_path, overwrite):
    open_run(tmp_path)
    fake_steps(tmp_path)
    (tmp_path / "log.txt").write_text("one\n")
    (tmp_path / "heartbeat.json").write_text("{}")
    before = list_files(tmp_path)
    sections = {"run": {"max_steps": 20, "overwrite": overwrite}, "log": {"tensorboard": True}}
    with RunFolder(make_config(tmp_path, **sections), []) as run:
        run.rewind(0)
        with (tmp_path / "log.txt").open("a") as file:
            file.write("two\n")
        for name in ("heartbeat.json", "samples.jsonl"):
            (tmp_path / "new").write_text("new")
            (tmp_path / "new").replace(tmp_path / name)
        (tmp_path / "tensorboard").mkdir()
    assert list_files(tmp_path) == before
    assert not (tmp_path / "tensorboard").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".s")]
    assert len(open_run(tmp_path, **sections).changes) == (0 if overwrite else 2)


def test_a_start_that_was_killed_brings_back_what_it_set_aside(tmp_path):
    open_run(tmp_path)
    fake_steps(tmp_path)
    before = list_files(tmp_path)
    for moved in range(len(list_own(tmp_path)) + 1):
        (tmp_path / SET_ASIDE).mkdir()
        for path in list_own(tmp_path)[:moved]:
            path.rename(tmp_path / SET_ASIDE / path.name)
        if moved == len(before):
            claim_names(tmp_path, ["log.txt"])
            (tmp_path / "log.txt").write_text("of the start that was killed")
        put_back(tmp_path)
        assert list_files(tmp_path) == before


def test_outputs_of_several_at_once_are_whole(tmp_path):
    """One writes while another one begins, ends and cleans up."""
    open_run(tmp_path)
    abandoned = tmp_path / ".model.1-x.unfinished"
    abandoned.mkdir()
    with replace_folder(tmp_path / "model") as first:
        assert not abandoned.exists()
        (first / "a").write_text("first")
        with replace_folder(tmp_path / "model") as second:
            assert first != second and first.is_dir()
            (second / "a").write_text("second")
        assert (tmp_path / "model/a").read_text() == "second"
        (first / "b").write_text("first")
    assert {p.name: p.read_text() for p in (tmp_path / "model").iterdir()} == {
        "a": "first",
        "b": "first",
    }
    with pytest.raises(ValueError), replace_folder(tmp_path / "model") as third:
        (third / "a").write_text("third")
        raise ValueError
    assert (tmp_path / "model/a").read_text() == "first"
    assert not list(tmp_path.glob(".model*"))


def test_a_base_that_was_moved_is_the_same_and_replaced_weights_are_not(tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    write_folder(base, {"w": ((4,), np.dtype(np.float32))}, [piece(1.0)])
    model = {"path": str(base), "architecture": None}
    with RunFolder(make_config(run, model=model), [], base, True) as folder:
        folder.accept()
    fake_steps(run)
    claim_names(run, ["base"])
    (run / "base").mkdir()
    record = {"path": str(base), "fingerprint": fingerprint(base)}
    (run / "base/base_of_run.json").write_text(json.dumps(record))
    base = base.rename(tmp_path / "moved")
    model["path"] = str(base)
    with RunFolder(make_config(run, model=model), [], base, True) as folder:
        assert len(folder.changes) == 1
    write_folder(base, {"w": ((4,), np.dtype(np.float32))}, [piece(2.0)])
    with pytest.raises(UserError, match="model.path: .*other weights now"):
        open_with_base(run, model, base, True)
    model["path"] = record["path"]
    open_with_base(run, model, base, False)  # all weights are in the checkpoints


def open_with_base(run: Path, model: dict, base: Path, needs_base: bool) -> None:
    with RunFolder(make_config(run, model=model), [], base, needs_base):
        pass


def piece(value: float) -> SplitPiece:
    return SplitPiece("w", (4,), (slice(None),), np.full(4, value, np.float32))


def test_folders_of_several_policies_are_written_within_one(tmp_path):
    with replace_folder(tmp_path / "model") as folder, replace_folder(folder / "a") as inner:
        (inner / "x").write_text("1")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["a"]
    assert (tmp_path / "model" / "a" / "x").read_text() == "1"
