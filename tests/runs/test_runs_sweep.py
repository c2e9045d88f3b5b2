"""Sweeps: what is tried, what is checked before anything starts, trials that end in every way,
as scripted processes that write what a run writes."""

import csv
import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.parse import read_table
from jaxtrain.errors import UserError
from jaxtrain.runs.sweep import space
from jaxtrain.runs.sweep.run import Sweep, split_gpus, sweep_command
from jaxtrain.runs.sweep.space import check_sweep, list_grid, name_trial, read_values

sys.path.insert(0, str(Path(__file__).parents[1]))
from doors import run_verb
from toy_run import MODEL

pytest.importorskip("optuna", reason="pip install 'jaxtrain[sweep]'")

from jaxtrain.runs.sweep.study import Study

CONFIG = """
[model]
path = "none"
[data]
datasets = [{ path = "none.jsonl" }]
[run]
output_dir = "runs/none"
max_steps = 9
"""


def read_sweep(path):
    return check_sweep(read_table(path), str(path))


@pytest.fixture
def write(tmp_path):
    """Makes a sweep's file: text behind section sweep, and more keys of that section."""
    (tmp_path / "config.toml").write_text(CONFIG)

    def make(text: str, **sweep):
        keys = {"config": str(tmp_path / "config.toml"), "output_dir": str(tmp_path / "out")}
        lines = "\n".join(
            f"{key} = {json.dumps(value)}" for key, value in {**keys, **sweep}.items()
        )
        path = tmp_path / "sweep.toml"
        path.write_text(f"[sweep]\n{lines}\n{text}")
        return path

    return make


GRID = '[grid]\n"optim.learning_rate" = [1e-4, 3e-4]\n"optim.weight_decay" = [0.0, 0.1]\n'


class Scripted:
    """A process that does one thing of its script each time it is looked at: writes a line of
    metrics, or ends. Stopped, it ends as a run does, saved."""

    def __init__(self, command, env, log: Path, script):
        words = dict(word.split("=", 1) for word in command if "=" in word)
        self.folder = Path(json.loads(words["run.output_dir"]))
        self.rate, self.env, self.log = float(words["optim.learning_rate"]), env, log
        self.script, self.code, self.stopped = script, None, False

    def start(self):
        self.folder.mkdir(exist_ok=True)
        self.steps = iter(self.script(self.rate))

    def beat(self, state):
        (self.folder / "heartbeat.json").write_text(json.dumps({"state": state}))

    def poll(self):
        if self.code is None:
            actual = None if self.stopped else next(self.steps, None)
            if isinstance(actual, dict):
                with (self.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(actual) + "\n")
            elif actual is None:
                self.beat("stopped" if self.stopped else "finished")
                self.code = 0
            else:
                self.log.write_text("first\nerror: data.path is not there\n")
                self.code = actual
        return self.code

    def stop(self, seconds=10.0):
        self.stopped = True
        return 0


def run(path, script, wait=lambda stopped: None):
    """A sweep with such processes: (sweep, what it said)."""
    file, output = read_sweep(path), []
    sweep = Sweep(
        file,
        Study(file),
        output.append,
        make=lambda command, env, log: Scripted(command, env, log, script),
        wait=wait,
        environ={"JAX_PLATFORMS": "cpu"},
    )
    sweep.run()
    return sweep, output


def table(tmp_path):
    with (tmp_path / "out/sweep.csv").open() as file:
        return list(csv.DictReader(file))


def learn(rate):
    """Two evaluations; the loss is worse the larger the rate."""
    yield {"step": 1, "time": 1.0, "eval/loss": 9.0}
    yield {"step": 2, "time": 2.0, "eval/loss": rate * 1e4}


def test_a_grid_is_all_combinations_and_pairs_stay_together(write):
    pairs = '[[together]]\n"data.micro_batch_size" = [1, 2]\n"data.sequence_len" = [64, 32]\n'
    actual = [read_values(entry) for entry in list_grid(read_sweep(write(GRID + pairs)))]
    assert len(actual) == 8
    assert {(v["data.micro_batch_size"], v["data.sequence_len"]) for v in actual} == {
        (1, 64),
        (2, 32),
    }
    assert name_trial(3, actual[0]) == (
        "003-learning_rate_0.0001-weight_decay_0-micro_batch_size_1-sequence_len_64"
    )


def test_every_trial_is_told_and_a_second_start_has_nothing_to_do(write, tmp_path):
    sweep, output = run(write(GRID, jobs=2), learn)
    rows = table(tmp_path)
    assert [row["state"] for row in rows] == ["complete"] * 4
    assert [float(row["eval/loss"]) for row in rows] == pytest.approx([1, 1, 3, 3])
    assert rows[1]["optim.weight_decay"] == "0.1" and rows[1]["folder"].startswith("001-")
    sweep.log_best()
    assert "000-learning_rate_0.0001-weight_decay_0" in output[8]
    assert run(write(GRID, jobs=2), learn)[1] == []
    with pytest.raises(UserError, match="sweep with other axes"):
        run(write(GRID.replace("3e-4", "5e-4")), learn)
    with pytest.raises(UserError, match="sweep with other metric"):
        run(write(GRID, metric="loss"), learn)


@pytest.mark.parametrize("damage", ["{", '{"op_code": 4}\n', "[1]\n", "\0\0\n\n"])
def test_a_damaged_journal_is_refused_by_name(write, tmp_path, damage):
    path = write(GRID)
    Study(read_sweep(path))
    journal = tmp_path / "out" / "study.journal"
    first, *rest = journal.read_text().splitlines(keepends=True)
    journal.write_text(first + damage + "\n" + "".join(rest))
    with pytest.raises(UserError, match=r"study.journal is damaged \(.*new sweep.output_dir"):
        Study(read_sweep(path))


def test_finished_elsewhere_is_taken_and_not_run(write, tmp_path):
    """Simulate `--print` with the commands run by hand."""
    path, printed = write(GRID), []
    assert sweep_command(read_sweep(path), show_only=True, retry=False, log=printed.append) == 0
    assert not (tmp_path / "out").exists() and len(printed) == 4
    folder = tmp_path / "out/002-learning_rate_0.0003-weight_decay_0"
    assert str(folder) in printed[2]
    Study(read_sweep(path))
    folder.mkdir()
    (folder / "heartbeat.json").write_text('{"state": "finished"}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "eval/loss": 0.5}\n')
    _, output = run(path, learn)
    assert table(tmp_path)[2]["eval/loss"] == "0.5"
    assert not any("started" in line for line in output if line.startswith("002"))


def test_a_failure_is_told_with_its_log_and_tried_again_when_asked(write, tmp_path):
    def broken(rate):
        return learn(rate) if rate < 2e-4 else [2]

    sweep, output = run(write(GRID), broken)
    assert sweep.failed == 2
    messages = next(line for line in output if "failed (exit code 2)" in line)
    assert "error: data.path is not there" in messages
    assert [row["state"] for row in table(tmp_path)] == ["complete"] * 2 + ["fail"] * 2
    study = Study(read_sweep(write(GRID)))
    assert study.retry() == 2 and study.retry() == 0
    run(write(GRID), learn)
    assert [row["state"] for row in table(tmp_path)][4:] == ["complete"] * 2


def test_a_metric_that_no_run_has_ends_the_sweep_at_once(write, tmp_path):
    sweep, output = run(write(GRID, metric="eval/acuracy"), learn)
    assert sweep.failed == 1 and sum("started" in line for line in output) == 1
    assert "it has eval/loss" in output[-1]


def test_interrupted_trials_go_on_in_the_next_start(write, tmp_path):
    looks = []

    def interrupt(stopped: threading.Event):
        looks.append(0)
        if len(looks) == 2:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    _, output = run(write(GRID, jobs=2), learn, wait=interrupt)
    assert signal.getsignal(signal.SIGTERM) is before
    assert sum("interrupted" in line for line in output) == 2 and len(output) == 4
    assert [row["state"] for row in table(tmp_path)] == ["running"] * 2 + ["waiting"] * 2
    _, output = run(write(GRID, jobs=2), learn)
    assert sorted(line for line in output if "goes on" in line)[0].startswith("000-")
    assert [row["state"] for row in table(tmp_path)] == ["complete"] * 4


def test_a_trial_of_another_process_is_left_to_it(write):
    first, second = (Study(read_sweep(write(GRID, jobs=2))) for _ in range(2))
    requests = [study.ask() for study in (first, second, first, second, second)]
    assert [entry and entry.number for entry in requests] == [0, 1, 2, 3, None]
    requests[2].lock.close()  # that process has died
    again = second.ask()
    assert again.number == 2 and again.resumed and again.params == requests[2].params


def test_a_trial_behind_the_median_is_stopped(write, tmp_path):
    def slow(rate):
        for step in range(1, 5):
            yield {"step": step, "time": 1.0, "eval/loss": rate * 1e4 / step}

    text = '[grid]\n"optim.learning_rate" = [1e-4, 2e-4, 9e-4, 1.1e-4]\n'
    path = write(text, prune="median", prune_after_trials=2, prune_after_step=2)
    _, output = run(path, slow)
    assert [row["state"] for row in table(tmp_path)] == ["complete"] * 2 + ["pruned", "complete"]
    assert any("pruned at step 3" in line or "pruned at step 2" in line for line in output)
    assert (
        len((tmp_path / "out/002-learning_rate_0.0009/metrics.jsonl").read_text().split("\n")) < 5
    )


@pytest.mark.slow
def test_tpe_goes_where_the_losses_are_small(write, tmp_path):
    text = '[ranges]\n"optim.learning_rate" = { low = 1e-6, high = 1e-2, log = true }\n'

    def bowl(rate):
        yield {"step": 1, "time": 1.0, "eval/loss": abs(math.log(rate / 1e-4))}

    run(write(text, method="tpe", trials=40), bowl)
    far = [float(row["eval/loss"]) for row in table(tmp_path)]
    # Drawn at random, as the first ten, they would lie 2.3 away (deviation of this mean: 0.34).
    assert len(far) == 40 and np.mean(far[25:]) < 1.4


def test_random_trials_hang_on_the_seed_alone(write):
    text = '[ranges]\n"optim.learning_rate" = { low = 1e-6, high = 1e-2, log = true }\n'
    text += (
        '"data.sequence_len" = { low = 8, high = 64 }\n[grid]\n"optim.weight_decay" = [0.0, 0.1]\n'
    )
    file = read_sweep(write(text, method="random", trials=9, seed=3))
    printed = []
    sweep_command(file, show_only=True, retry=False, log=printed.append)
    requests = [Study(file).ask().params for _ in range(1)]
    rate = read_values(requests[0])["optim.learning_rate"]
    assert len(set(printed)) == 9 and f"optim.learning_rate={rate!r}" in printed[0]
    assert all(8 <= read_values(p)["data.sequence_len"] <= 64 for p in Study(file).list_known())


def test_gpus_are_shared_out(write):
    assert split_gpus(2, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}) == [["0", "1"], ["2", "3"]]
    assert split_gpus(1, {"CUDA_VISIBLE_DEVICES": "0,1"}) == [None]
    with pytest.raises(UserError, match="sweep.jobs 3 is more than the 2 GPUs"):
        split_gpus(3, {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("text", "sweep", "messages"),
    [
        ("", {}, "nothing is varied"),
        ('[grid]\n"optim.learning_rate" = []', {}, "an empty list"),
        ('[ranges]\n"optim.learning_rate" = { low = 1, high = 2 }', {}, "a grid tries lists"),
        (GRID, {"method": "random"}, "needs a number of trials"),
        (GRID, {"mode": "least"}, "sweep.mode"),
        (GRID + '[[together]]\n"a.b" = [1]\n"a.c" = [1, 2]', {}, "equally many values"),
        (GRID + '[ranges]\n"a.b" = { low = 2, high = 1 }', {"method": "tpe", "trials": 1}, "below"),
        ('[grid]\n"run.output_dir" = ["a"]', {}, "names the folders itself"),
    ],
)
def test_mistakes_of_the_file(write, text, sweep, messages):
    with pytest.raises(UserError, match=messages):
        read_sweep(write(text, **sweep))


def test_mistakes_of_any_trial_are_told_before_the_first(write, tmp_path):
    for text, messages in [
        ('[grid]\n"optim.learning_rat" = [1.0]', "learning_rate"),
        ("[grid]\noptim.learning_rate = [1e-4, -1.0]", "with optim.learning_rate=-1.0"),
    ]:
        with pytest.raises(UserError, match=messages):
            sweep_command(read_sweep(write(text)), show_only=False, retry=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("kept")
    with pytest.raises(UserError, match="not empty"):
        sweep_command(read_sweep(write(GRID)), show_only=False, retry=False)
    assert space.LONGEST_NAME > len(name_trial(1, {"a.b": "x/../../y" * 20, "c": None}))


def test_axolotls_form(tmp_path, write, capsys):
    write(GRID)
    (tmp_path / "sweep.yaml").write_text(
        "learning_rate: [0.0003, 0.0006]\n"
        "_:\n  - {sequence_len: 1024, weight_decay: 0.1}\n"
        "  - {sequence_len: 2048, weight_decay: 0.0}\n"
    )
    argv = ["sweep", str(tmp_path / "sweep.yaml"), "--config", str(tmp_path / "config.toml")]
    code, output = run_verb([*argv, "--output", str(tmp_path / "out"), "--print"], capsys)
    lines = output.strip().splitlines()
    assert code == 0 and len(lines) == 4, output
    assert "optim.learning_rate=0.0003 data.sequence_len=2048 optim.weight_decay=0.0" in lines[1]
    (tmp_path / "sweep.yaml").write_text("load_in_8bit_please: [true, false]\n")
    code, output = run_verb([*argv, "--output", str(tmp_path / "out"), "--print"], capsys)
    assert code == 2 and "load_in_8bit_please" in output and "no counterpart" in output


@pytest.mark.slow
def test_two_real_runs(tmp_path):
    """From the command line, with models that train in milliseconds."""
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n' * 8)
    (tmp_path / "config.toml").write_text(
        f"""{MODEL}
[data]
datasets = [{{ path = "{tmp_path / "rows.jsonl"}" }}]
sequence_len = 32
[run]
max_steps = 2
output_dir = "none"
"""
    )
    (tmp_path / "sweep.toml").write_text(
        f"""
[sweep]
config = "{tmp_path / "config.toml"}"
output_dir = "{tmp_path / "out"}"
metric = "loss"
jobs = 2
[grid]
optim.learning_rate = [1e-3, 1e-2]
"""
    )
    command = [sys.executable, "-m", "jaxtrain.main", "sweep", str(tmp_path / "sweep.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 complete" in done.stdout
    rows = table(tmp_path)
    assert [row["state"] for row in rows] == ["complete"] * 2
    assert rows[0]["loss"] != rows[1]["loss"]
    for row in rows:
        beat = json.loads((tmp_path / "out" / row["folder"] / "heartbeat.json").read_text())
        assert beat["state"] == "finished" and beat["step"] == 2
