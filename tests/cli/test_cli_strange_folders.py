"""Run folders as they are found: damaged, cut off, of other types. A sentence, or repaired."""

import asyncio
import errno
import gc
import io
import json
import logging

import pytest
from doors import DAMAGES, damage, run_verb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.runs.checkpoint import Checkpoints
from jaxtrain.runs.checkpoint_folder import find_good_step, find_steps
from jaxtrain.runs.console import Console
from jaxtrain.runs.folder import RunFolder, cut_lines
from jaxtrain.runs.manifest import find_damage, write_manifest
from jaxtrain.runs.plot import read_metrics
from jaxtrain.runs.samples import append_samples
from jaxtrain.runs.sinks import Sinks
from jaxtrain.text_safety import UNSEEN

QUICK = ("config.json", "metrics.jsonl", "checkpoints/2/manifest.json")
FILES = ["config.json", "attempts.jsonl", "metrics.jsonl", "samples.jsonl", "log.txt", "run.json"]


def make_config(folder, **run) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(folder), "max_steps": 10, **run},
            "model": {"architecture": {"hidden_size": 8}, "tokenizer": "builtin"},
            "data": {"datasets": [{"path": "a"}]},
        }
    )


@pytest.fixture
def run(tmp_path):
    """The folder of a run that wrote everything but a real checkpoint."""
    folder = tmp_path / "run"
    with RunFolder(make_config(folder), ["jaxtrain"]):
        pass
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "samples.jsonl").write_text('{"step": 1}\n')
    (folder / "log.txt").write_text("hello\n")
    (folder / "checkpoints" / "2").mkdir(parents=True)
    (folder / "checkpoints" / "2" / "state").write_text("x")
    write_manifest(folder / "checkpoints" / "2", {"step": 2, "metrics": {}, "arrays": {}})
    return folder


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in FILES if name not in QUICK),
    ],
)
def test_whatever_a_file_has_become(run, capsys, name, how):
    damage(run / name, how)
    try:
        with RunFolder(make_config(run), ["jaxtrain"]) as folder:
            folder.rewind(2)
            folder.accept()
            Console("off", run / "log.txt").close(None)
        # What goes on from here finds whole lines.
        for record in (run / "attempts.jsonl").read_text(errors="replace").splitlines()[-1:]:
            assert json.loads(record)["command"] == ["jaxtrain"]
    except UserError as error:
        assert len(str(error)) <= 2000 and not UNSEEN.search(str(error))
        assert str(run) in str(error)
    find_steps(run / "checkpoints")
    assert find_good_step(run / "checkpoints")[0] in (2, -1)
    run_verb(["plot", str(run), "--output", str(run / "x.png")], capsys)


@pytest.mark.parametrize("how", DAMAGES)
def test_verbs_on_a_damaged_config(run, capsys, how):
    damage(run / "config.json", how)
    for verb in (["eval"], ["export"], ["generate", "--prompt", "x"], ["merge"]):
        code, output = run_verb([verb[0], str(run), *verb[1:]], capsys)
        # A slow machine says before that it is starting.
        assert code == 2 and "\nerror: " in f"\n{output}"


def test_checkpoint_folders_of_odd_names(run):
    for name in ("3²", "5x.orbax-checkpoint-tmp", "9"):
        (run / "checkpoints" / name).write_text("")
    assert find_steps(run / "checkpoints") == [2]
    step, problems = find_good_step(run / "checkpoints")
    assert step == 2 and [problem.step for problem in problems] == [9]
    assert find_damage(run / "metrics.jsonl") == "manifest.json is not readable"


def test_a_cut_line_is_repaired(run):
    with (run / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 2, "dev')
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n\xff{}\n{"step": 3}\n{"st')
    with RunFolder(make_config(run), ["again"]) as folder:
        folder.rewind(2)
        folder.accept()
    assert (run / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert json.loads((run / "attempts.jsonl").read_text().splitlines()[-1])["attempt"] == 3


LINES = st.lists(
    st.binary(max_size=20)
    | st.dictionaries(
        st.sampled_from(["step", "loss", "$x_{", "_a", "eval/\x1b[31m"]),
        st.integers() | st.floats() | st.text(max_size=5) | st.none() | st.booleans(),
    ).map(lambda row: json.dumps(row).encode()),
    max_size=8,
).map(b"\n".join)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(LINES, st.integers(-1, 5))
def test_any_metrics(tmp_path, content, step):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    try:
        read_metrics(path)
    except UserError as error:
        assert len(str(error)) <= 2000 and not UNSEEN.search(str(error))
    cut_lines(path, step)
    for line in path.read_text().splitlines():
        assert json.loads(line)["step"] <= step


def test_odd_names_and_sizes_are_drawn(tmp_path, capsys):
    folder = tmp_path / "$x_{"
    folder.mkdir()
    rows = [
        {"step": n, "loss": 1e300 * n, "reward": 10**400, "eval/$a_accuracy": True}
        for n in range(3)
    ]
    rows += [{"step": 10**30, "loss": 1}, {"step": 4, "loss": float("nan"), "mfu": -1e-300}]
    rows += [{"step": 5, "eval/$a_{accuracy": 0.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = run_verb(["plot", str(folder)], capsys)
    assert code == 0, output


def test_what_models_say_is_shown_without_control_characters(tmp_path):
    stream = io.StringIO()
    console = Console("plain", tmp_path / "log.txt", stream)
    console.log("answer: \x1b[2J\x9b31m\u202eabc\r\ud800 fine\nnext\ttab")
    console.close(None)
    for shown in (stream.getvalue(), (tmp_path / "log.txt").read_text()):
        assert not UNSEEN.search(shown) and "\\x1b[2J" in shown and "fine\nnext\ttab" in shown


def test_samples_that_json_cannot_hold(tmp_path):
    append_samples(tmp_path, 1, [{"completion": "\ud800", "reward": float("nan")}, {"x": "é"}])
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["reward"] is None and "é" in lines[1]


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_log_and_samples_one_message_each(tmp_path, monkeypatch, capsys):
    config = make_config(tmp_path).model_copy(
        update={"log": Config.model_fields["log"].default.model_copy(update={"console": "plain"})}
    )
    with Sinks(config, tmp_path) as sinks:
        sinks.start(5)
        monkeypatch.setattr("pathlib.Path.open", lambda *a, **k: Full())
        sinks.console._log = Full()
        sinks.console._log.name = "log.txt"
        for step in range(3):
            sinks.sampled(step, [{"completion": "x"}])
            sinks.log("still here")
    out = capsys.readouterr().out
    assert out.count("log.txt is no longer written") == out.count("samples.jsonl is not") == 1
    assert out.count("still here") == 3


def test_a_full_disk_is_told_once_by_the_event_loop(tmp_path, caplog):
    async def write(error):
        raise error

    async def run():
        for error in (OSError(errno.ENOSPC, "No space left on device"), KeyError("a bug")):
            asyncio.get_running_loop().create_task(write(error))
        await asyncio.sleep(0)

    checkpoints = Checkpoints(tmp_path)
    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(run())
        gc.collect()
    checkpoints.close()
    messages = [record for record in caplog.records if "never retrieved" in record.getMessage()]
    assert len(messages) == 1 and "a bug" in str(messages[0].exc_info)


@pytest.mark.parametrize(
    "argv",
    [
        ["\x1b[31m"],
        ["--config"],
        ["--config", "x.toml", "--\x1b[31m"],
        ["run.seed=1", "--config", "missing.toml", "task.beta=1", "--dry-run"],
        ["export", "missing", "--step", "\x1b"],
        ["plot", "missing"],
        ["eval"],
        ["generate", "x", "--input", "missing"],
    ],
)
def test_command_lines_of_all_kinds(argv, capsys, monkeypatch):
    code, output = run_verb(argv, capsys)
    assert code == 2 and output.startswith("error: ")


def test_overrides_stand_anywhere(tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text('model = "tiny"\n[run]\nmax_steps = 3\n[[data.datasets]]\npath = "a.jsonl"\n')
    words = [
        "run.seed=7",
        "--print-config",
        "optim.beta1=0.5",
        "--config",
        str(path),
        "log.every=2",
    ]
    code, output = run_verb(words, capsys)
    payload = json.loads(output)
    assert code == 0 and payload["optim"]["beta1"] == 0.5
    assert (payload["run"]["seed"], payload["log"]["every"]) == (7, 2)


def test_secrets_stay_out_of_the_folder(tmp_path):
    rewards = [{"function": "length", "options": {"api_key": "sk-123"}}]
    table = make_config(tmp_path).model_dump()
    sets = [{"path": "x.jsonl"}]
    config = Config.model_validate({**table, "rewards": rewards, "eval": {"sets": sets}})
    words = ["jaxtrain", "rewards.0.options.api_key=sk-123"]
    for _ in range(2):  # a resume compares without them
        with RunFolder(config, words) as folder:
            (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
        assert folder.changes == []
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or "sk-123" not in path.read_text()
