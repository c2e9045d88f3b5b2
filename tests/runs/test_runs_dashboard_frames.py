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
from watching import NOW, Watching, watch

from jaxtrain.runs.dashboard.marks import list_marks, place_marks
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.run_data import WatchedRun, find_runs
from jaxtrain.runs.dashboard.status import facts, read_state, time_left
from jaxtrain.text_safety import UNSEEN

FRAMES = Path(__file__).parent / "frames"
CASES = {
    "metrics_120x40": (120, 40, ""),
    "metrics_180x50": (180, 50, ""),
    "metrics_80x24": (80, 24, ""),
    "metrics_60x15": (60, 15, ""),
    "open_100x30": (100, 30, "enter left left plus y"),
    "samples_120x20": (120, 20, "escape y 2 b"),
    "sample_80x24": (80, 24, "m down enter t"),
    "log_80x16": (80, 16, "3 w"),
    "runs_120x30": (120, 30, "4 down d up"),
    "servers_100x20": (100, 20, "5"),
}
"""Width and height, and the keys pressed since the case before."""


def write_two(folder: Path) -> list[Path]:
    """Two runs of reinforcement learning, the second finished."""
    finished = write_run(folder / "agent-s1", seed=1, steps=90, state="finished")
    return [write_run(folder / "agent"), finished]


def draw_frames(folder: Path) -> dict[str, str]:
    """All cases, one after the other."""
    frames = {}

    async def script(watching: Watching) -> None:
        for name, (width, height, keys) in CASES.items():
            frames[name] = await watching.press(keys, (width, height))

    watch(write_two(folder), script)
    return frames


@pytest.mark.slow
def test_frames(tmp_path):
    for name, shown in draw_frames(tmp_path).items():
        assert shown == (FRAMES / f"{name}.txt").read_text(), name


@pytest.mark.thorough  # 5 to 10 s: many pictures
def test_every_size_has_its_picture(tmp_path):
    async def script(watching: Watching) -> None:
        for size, keys in {(20, 5): "1", (47, 11): "enter 2", (240, 20): "enter 3"}.items():
            await watching.press(keys, size)
            await watching.press("4 question_mark 5 question_mark 1 escape r")

    watch(write_two(tmp_path), script)


@pytest.mark.thorough
def test_keys_do_what_the_help_says(tmp_path):
    async def script(watching: Watching) -> None:
        press, app = watching.press, watching.app
        first = await press()
        changes = {"y": "log y  smooth", "s": "smooth 5%", "x": "x: time", "r": "╭─ runs"}
        for key, text in changes.items():
            assert text not in first and text in await press(key)
        assert "page 1/" in first and "page 2/" in await press("pagedown")
        shown = await press("slash r e w a r d enter")
        assert "─ reward ─" in shown and "─ entropy ─" not in shown and "/reward" in shown
        assert "no metric has this name" in await press("slash ( enter")
        assert "─ entropy ─" in await press("escape")
        await press("4 down space")
        assert [run.name for run in app.view.shown] == ["agent"]
        assert "agent-s1" in (await press("1")).splitlines()[0]
        assert "worst first" in await press("2 w", (80, 24))
        shown = await press("3 slash v l l m enter n")
        assert "2 hits" in shown and app.pane.hit_line == 2
        await press("n n")
        assert app.pane.hit_line == 2  # two hits; around the end
        await press("tab 1 enter slash q")
        assert app.is_running and app.focused.value == "q"  # typed, not obeyed

    watch(write_two(tmp_path), script)


@pytest.mark.thorough  # 5 to 10 s: many pictures
def test_any_keys_leave_a_picture(tmp_path):
    keys = (
        "1 2 3 4 5 tab shift+tab up down left right pageup pagedown enter escape plus minus 0 y s x"
        " c r g G n N b w m t d space question_mark"
    ).split()

    async def script(watching: Watching) -> None:
        for start in range(0, 120, 20):  # a fixed walk through all of them
            walk = (keys[(p * p + 7 * p) % len(keys)] for p in range(start, start + 20))
            await watching.press(" ".join(walk))

    watch(write_two(tmp_path), script, (80, 24))


@pytest.mark.slow
def test_untrusted_texts_stay_texts(tmp_path):
    paths = write_two(tmp_path)
    write_lines(paths[0] / "samples.jsonl", [HOSTILE], "a")
    evil = {"[red]a\x1b[2J/b": 1.0, "x" * 100_000: 2.0, "日本語": 3.0}
    write_lines(paths[0] / "metrics.jsonl", [{"step": 61, **evil}], "a")
    with (paths[0] / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 62, "loss": \xff\n{"step')
    with (paths[0] / "log.txt").open("ab") as file:
        file.write(b"\x1b[31mred \xff\xfe [/bold]\n" + b"y" * 1_000_000 + b"\n")
    (paths[0] / "servers.json").write_text('[{"url": ["\\u001b[2J"], "state": 5, "since": "x"}, 3]')
    (paths[0] / "heartbeat.json").write_text('{"state": "failed", "message": "[/a]\\u001b[2J"}')

    async def script(watching: Watching) -> None:
        for keys in ("1", "enter", "escape 2", "3 G", "4", "5", "1 pagedown pagedown"):
            shown = await watching.press(keys)
            assert not UNSEEN.search(shown) and "\x1b" not in shown
        assert "[red]a\\x1b[2J/b" in await watching.press("slash r e d enter")
        shown = await watching.press("2 enter")
        assert "a [/nope] [bold]markup[/bold]" in shown and "日本語の答え🙂" in shown
        assert "[31mred" in await watching.press("3")

    watch(paths, script, (90, 30), now=None)


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


def test_events_of_a_run(tmp_path):
    run = WatchedRun(write_run(tmp_path / "run"))
    later = {"attempt": 2, "time": "2026-11-18T11:07:15+0000"}  # between steps 23 and 24
    write_lines(run.path / "attempts.jsonl", [later, {"time": "damaged"}], "a")
    run.read()
    marks = list_marks(run)
    assert [mark.step for mark in marks if mark.kind == "evaluation"] == [10, 20, 30, 40, 50, 60]
    assert [mark for mark in marks if mark.kind != "evaluation"] == [
        ("checkpoint", 25),
        ("restart", 24),
    ]
    assert dict(place_marks(run, "tokens"))[25 * 4096.0] == "▴"
    (run.path / "checkpoints" / "60").mkdir()
    assert run.read() and run.checkpoints == [25, 60]


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
    reading = RunReader([tmp_path])
    reading.read()
    assert sorted(run.name for run in reading.runs) == ["b/run", "c/run", "newer"]


def test_facts_are_json_of_numbers(tmp_path):
    run = WatchedRun(write_two(tmp_path)[1])
    run.read()
    payload = json.loads(json.dumps(facts(run), allow_nan=False))
    assert payload["state"] == "finished" and payload["step"] == payload["total_steps"] == 90
    assert (
        payload["metrics"]["eval/accuracy"] == 0.9 and payload["best"]["metric"] == "eval/accuracy"
    )
    assert payload["warnings"] and payload["servers"][1]["state"] == "down"
    run.beat["attempt"] = {"loss": float("nan")}  # a damaged heartbeat
    assert json.loads(json.dumps(facts(run), allow_nan=False))["attempt"] == {"loss": None}


@pytest.mark.slow
def test_the_verb_needs_no_jax(tmp_path):
    write_run(tmp_path / "run", steps=90, state="finished")
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from jaxtrain.main import main\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--json']) == 0\n"
        "assert not {'textual', 'pydantic', 'transformers'} & set(sys.modules)\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--once', '--size', '100x30']) == 0\n"
        f"assert main(['watch', {str(tmp_path)!r}, '--svg', {str(tmp_path / 'x.svg')!r}]) == 0\n"
        f"assert main(['watch', {str(tmp_path)!r}]) == 0, 'no terminal: as --once'\n"
        f"assert main(['watch', {str(tmp_path / 'gone')!r}, '--once']) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "\n ✓ finished  run  grpo · Qwen3-0.6B · 4 × H200  step 90/90" in done.stdout
    assert "gone does not exist" in done.stderr
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def rewrite() -> None:
    """Write all frames anew."""
    with tempfile.TemporaryDirectory() as folder:
        for name, shown in draw_frames(Path(folder)).items():
            (FRAMES / f"{name}.txt").write_text(shown)


if __name__ == "__main__":
    rewrite()
