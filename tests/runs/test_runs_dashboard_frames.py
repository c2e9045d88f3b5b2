"""Screens as text, as `jaxtrain watch --once` prints them.

After an intended change, run `PYTHONPATH=.:kernels python tests/runs/test_runs_dashboard_frames.py`
and read the difference.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from folders import HOSTILE, START, lines, write_lines, write_run
from rich.cells import cell_len

from jaxtrain.runs.dashboard.frame import draw_frame
from jaxtrain.runs.dashboard.keys import press
from jaxtrain.runs.dashboard.print import render_text
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.run_data import WatchedRun, find_runs
from jaxtrain.runs.dashboard.status import facts, read_state, time_left
from jaxtrain.runs.dashboard.view import SCREENS, DashboardView
from jaxtrain.text_safety import UNSEEN

FRAMES = Path(__file__).parent / "frames"
NOW = START + 1.5 * 60 + 2
CASES = {
    "metrics_120x40": (120, 40, ""),
    "metrics_180x50": (180, 50, ""),
    "metrics_80x24": (80, 24, ""),
    "metrics_60x15": (60, 15, ""),
    "open_100x30": (100, 30, "enter left left plus y"),
    "samples_120x20": (120, 20, "2 b"),
    "sample_80x24": (80, 24, "2 down enter t"),
    "log_80x16": (80, 16, "3 w"),
    "runs_120x30": (120, 30, "4 down d up"),
    "servers_100x20": (100, 20, "5"),
}


def look_at(folder: Path, current_time: float | None = NOW) -> DashboardView:
    """Two runs of reinforcement learning, the second finished."""
    paths = [
        write_run(folder / "agent"),
        write_run(folder / "agent-s1", seed=1, steps=90, state="finished"),
    ]
    look = DashboardView([WatchedRun(path) for path in paths], timestamp=current_time)
    for run in look.runs:
        run.read()
    return look


def draw(look: DashboardView, width: int, height: int, keys: str = "") -> str:
    """The screen after some keys, drawn after each, as a person sees it."""
    frame = draw_frame(look, width, height)
    for key in keys.split():
        press(look, key, key if len(key) == 1 else None, height)
        frame = draw_frame(look, width, height)
    assert len(frame.lines) == height
    assert {cell_len(line.plain) for line in frame.lines} == {width}, keys
    return render_text(frame)


@pytest.mark.parametrize("name", CASES)
def test_frames(name, tmp_path):
    width, height, keys = CASES[name]
    shown = draw(look_at(tmp_path), width, height, keys)
    assert shown == (FRAMES / f"{name}.txt").read_text()


def test_every_size_has_its_frame(tmp_path):
    look = look_at(tmp_path)
    for screen in "12345":
        for width, height in [(20, 5), (30, 8), (47, 11), (100, 36), (163, 61), (240, 20)]:
            draw(look, width, height, screen)
            draw(look, width, height, f"{screen} enter r question_mark question_mark")


KEYS = (
    "1 2 3 4 5 tab shift+tab up down left right pageup pagedown enter escape plus minus 0 y s x c r"
    " g G n N b w m t d space question_mark slash e"
).split()


def test_keys_do_what_the_help_says(tmp_path):
    look = look_at(tmp_path)
    choice = look.choice
    first = draw(look, 120, 40)
    for key, messages in (("y", "log y"), ("s", "smooth 5%"), ("x", "x: time"), ("r", "╭─ runs")):
        assert messages not in first and messages in draw(look, 120, 40, key)
    assert "page 1/" in first and "page 2/" in draw(look, 120, 40, "pagedown")
    draw(look, 120, 40, "slash r e w a r d enter")
    shown = draw(look, 120, 40)
    assert "─ reward ─" in shown and "─ entropy ─" not in shown and "/reward" in shown
    assert "no metric has this name" in draw(look, 120, 40, "slash ( enter")
    assert "─ entropy ─" in draw(look, 120, 40, "escape")
    draw(look, 120, 40, "4 down space")
    assert [run.name for run in look.shown] == ["agent"]
    assert "agent-s1" in draw(look, 120, 40, "1").splitlines()[0]
    draw(look, 80, 24, "2 w")
    assert choice.order == "worst" and "worst first" in draw(look, 80, 24)
    draw(look, 80, 24, "3 slash v l l m enter n")
    assert not choice.follow and choice.selected["log"] == 2
    draw(look, 80, 24, "n n")
    assert choice.selected["log"] == 2  # two hits; around the end
    assert press(look, "q") == "quit" and press(look, "e") == "export"
    draw(look, 80, 24, "1 enter slash")
    assert press(look, "q", "q") is None and choice.typed is not None  # typed, not obeyed


def test_any_keys_leave_a_picture(tmp_path):
    look = look_at(tmp_path)
    for position in range(400):  # a fixed walk through all of them
        key = KEYS[(position * position + 7 * position) % len(KEYS)]
        if press(look, key, key if len(key) == 1 else None, 24) is None and position % 3 == 0:
            draw(look, 80, 24)
        if look.choice.typed is not None:
            press(look, "escape")


def test_strangers_texts_stay_texts(tmp_path):
    look = look_at(tmp_path, None)
    run = look.runs[0]
    write_lines(run.path / "samples.jsonl", [HOSTILE], "a")
    evil = {"[red]a\x1b[2J/b": 1.0, "x" * 3000: 2.0, "日本語": 3.0}
    write_lines(run.path / "metrics.jsonl", [{"step": 61, **evil}], "a")
    with (run.path / "log.txt").open("ab") as file:
        file.write(b"\x1b[31mred \xff\xfe [/bold]\n" + b"y" * 1_000_000 + b"\n")
    (run.path / "servers.json").write_text('[{"url": ["\\u001b[2J"], "state": 5, "since": "x"}, 3]')
    (run.path / "heartbeat.json").write_text('{"state": "failed", "message": "[/a]\\u001b[2J"}')
    run.read()
    for screen in SCREENS:
        look.choice.screen = screen
        for keys in ("", "enter", "t", "G"):
            shown = draw(look, 90, 30, keys)
            assert not UNSEEN.search(shown) and "\x1b" not in shown
    look.choice.open, look.choice.screen, look.choice.selected["samples"] = True, "samples", 0
    shown = draw(look, 90, 30)
    assert "a [/nope] [bold]markup[/bold]" in shown and "日本語の答え🙂" in shown


def test_states(tmp_path):
    path = write_run(tmp_path / "run")
    run = WatchedRun(path)
    run.read()
    beat, current_time = run.beat, NOW
    assert read_state(run, current_time).kind == "running"
    assert read_state(run, current_time + 300).kind == "silent"
    run.beat = beat | {"time": current_time, "moved": current_time - 400}
    assert (
        read_state(run, current_time).kind == "waiting"
        and "400 s" not in read_state(run, current_time).text
    )
    run.beat = beat | {
        "time": current_time + 9000
    }  # a host whose clock is ahead: its file's time counts
    run.beat_seen = current_time - 200
    assert read_state(run, current_time).kind == "silent"
    for state in ("finished", "stopped", "failed"):
        run.beat = beat | {"state": state, "message": "why"}
        assert read_state(run, current_time + 1e6) == (state, "why")
    run.beat = {"step": 3, "phase": "training", "time": current_time}  # of an older version
    assert read_state(run, current_time).kind == "silent"
    run.beat = {}
    assert read_state(run, current_time).kind == "unknown"


def test_time_left_is_by_the_last_steps(tmp_path):
    run = WatchedRun(write_run(tmp_path / "run"))
    run.read()
    assert time_left(run) == pytest.approx(30 * 1.5, rel=0.02)  # evaluations cost, too
    # An attempt that began an hour later, with a slow first step.
    later = [dict(lines(step)[0], time=START + 4000 + 3 * step) for step in range(61, 71)]
    write_lines(run.path / "metrics.jsonl", later, "a")
    run.read()
    run.beat["started"] = START + 4100
    assert time_left(run) == pytest.approx(20 * 3.0)


def test_a_resumed_run_is_read_anew(tmp_path):
    run = WatchedRun(write_run(tmp_path / "run"))
    run.read()
    assert run.last("eval/accuracy") == 0.6
    new = tmp_path / "new"
    write_lines(new, [line for step in range(1, 31) for line in lines(step)])
    new.replace(run.path / "metrics.jsonl")
    assert run.read() and len(run.metrics["loss"]) == 30 and run.last("eval/accuracy") == 0.3
    x, y = run.curve("loss", "tokens")
    assert x[-1] == 30 * 4096 and len(y) == 30 and (x[1:] > x[:-1]).all()
    assert run.curve("loss", "time")[0][-1] == pytest.approx(29 * 1.5)


def test_runs_are_found_below_folders(tmp_path):
    write_run(tmp_path / "a" / "b" / "run")
    write_run(tmp_path / "a" / "newer", steps=80)
    (tmp_path / "a" / "model").mkdir()
    (tmp_path / "a" / "model" / "config.json").write_text("{}")
    assert sorted(path.name for path in find_runs([tmp_path])) == ["newer", "run"]
    assert find_runs([tmp_path / "a" / "newer", tmp_path])[0].name == "newer"
    assert find_runs([tmp_path / "gone"]) == []
    write_run(tmp_path / "c" / "run")
    reading = RunReader([tmp_path], DashboardView([]))
    reading.read()
    assert sorted(run.name for run in reading.look.runs) == ["b/run", "c/run", "newer"]


def test_facts_are_json_of_numbers(tmp_path):
    payload = json.loads(json.dumps(facts(look_at(tmp_path).runs[1]), allow_nan=False))
    assert payload["state"] == "finished" and payload["step"] == payload["total_steps"] == 90
    assert (
        payload["metrics"]["eval/accuracy"] == 0.9 and payload["best"]["metric"] == "eval/accuracy"
    )
    assert payload["warnings"] and payload["servers"][1]["state"] == "down"


def test_the_verb_needs_no_jax(tmp_path):
    write_run(tmp_path / "run", steps=90, state="finished")
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from jaxtrain.main import main\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--once', '--size', '100x30']) == 0\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--json']) == 0\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--svg', {str(tmp_path / 'x.svg')!r}]) == 0\n"
        f"assert main(['watch', {str(tmp_path)!r}]) == 0, 'no terminal: as --once'\n"
        f"assert main(['watch', {str(tmp_path / 'gone')!r}, '--once']) == 2\n"
        "assert not {'textual', 'pydantic', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ✓ finished  run  grpo · Qwen3-0.6B · 4 × H200  step 90/90")
    assert "no run in" in done.stderr and (tmp_path / "x.svg").read_text().startswith("<svg")


def rewrite() -> None:
    """Write all frames anew."""
    for name, (width, height, keys) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            shown = draw(look_at(Path(folder)), width, height, keys)
        (FRAMES / f"{name}.txt").write_text(shown)


if __name__ == "__main__":
    rewrite()
