"""The dashboard as a program: keys, clicks, a folder that appears later, a real terminal."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from folders import HOSTILE, lines, write_lines, write_run
from watching import Watching, watch

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_dashboard_follows_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "agent"

    async def script(watching: Watching) -> None:
        app, press = watching.app, watching.press

        async def shown() -> str:
            app.tick()
            return await press()

        assert "no run is there yet" in await shown()
        write_run(run, kind="sft")
        screen = await shown()
        assert "step 60/90" in screen and "─ loss ─" in screen
        write_lines(run / "metrics.jsonl", lines(61, "sft"), "a")
        assert "step 61/90" in await shown()
        new = tmp_path / "new"  # as a resumed run cuts it
        write_lines(new, [line for step in range(1, 31) for line in lines(step, "sft")])
        new.replace(run / "metrics.jsonl")
        assert "30│" in await shown()
        write_lines(run / "samples.jsonl", [HOSTILE], "a")
        app.tick()
        assert "a [/nope] [bold]markup[/bold]" in await press("2 enter")
        assert "2 hits" in await press("tab slash v l l m enter N")
        await watching.pilot.click(offset=(4, 2))
        assert app.tabs.active == "metrics" and "paused" in await press("space")
        await press("e")
        assert list(tmp_path.glob("jaxtrain-watch-*.svg"))
        assert "step 60/90" in await press(size=(60, 15))
        await press("enter")
        await watching.pilot.press("q")

    app = watch([tmp_path / "runs"], script, now=None)
    assert app.return_code == 0
    created = {path.name for path in run.iterdir()}
    assert created == {
        *("config.json", "attempts.jsonl", "metrics.jsonl", "samples.jsonl", "log.txt"),
        *("heartbeat.json", "hardware", "servers.json", "checkpoints"),
    }, "it only reads"


@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
def test_a_real_terminal(tmp_path):
    write_run(tmp_path / "agent", steps=90, state="finished")
    socket, code = ["tmux", "-L", f"jaxtrain{os.getpid()}"], tmp_path / "code"
    program = f"{sys.executable} -m jaxtrain.main watch {tmp_path / 'agent'}; echo $? > {code}; cat"

    def screen() -> str:
        done = subprocess.run([*socket, "capture-pane", "-p"], capture_output=True, text=True)
        return done.stdout

    def wait_for(condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, screen()
            time.sleep(0.1)

    environment = os.environ | {"PYTHONPATH": ".:kernels", "LANG": "C.UTF-8", "TERM": "xterm"}
    start = [
        *socket,
        "-f",
        "/dev/null",
        "-u",
        "new-session",
        "-d",
        "-x",
        "100",
        "-y",
        "30",
        program,
    ]
    subprocess.run(start, check=True, cwd=REPO, env=environment)
    try:
        wait_for(lambda: "finished  agent" in screen() and "q quit" in screen())
        subprocess.run([*socket, "resize-window", "-x", "80", "-y", "24"], check=True)
        wait_for(lambda: "MFU" in screen())  # the lines of small screens
        subprocess.run([*socket, "send-keys", "q"], check=True)
        wait_for(lambda: code.exists() and code.read_text().strip())
        assert code.read_text().strip() == "0" and "q quit" not in screen()
    finally:
        subprocess.run([*socket, "kill-server"], check=False)
