"""Heartbeat, stall reports, signals and the profile window."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxtrain.runs.profile import ProfileWindow
from jaxtrain.runs.watchdog import Watchdog

REPO = Path(__file__).parents[2]


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_a_stall_is_reported_with_its_phase_and_stacks_at_doubling_intervals(tmp_path):
    output = []
    with Watchdog(tmp_path, 0.2, output.append) as watchdog:
        watchdog.beat(5)
        began = time.monotonic()
        with watchdog.phase("waiting for data"):
            wait_until(lambda: len(output) == 2)
        assert time.monotonic() - began >= 0.4  # the second report waits for twice the time
    assert all("after step 5: waiting for data" in text for text in output)
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks.count("waiting for data") == 2
    assert "test_a_stall_is_reported" in stacks  # the loop thread's own stack is there


def test_no_report_while_things_move(tmp_path):
    output = []
    with Watchdog(tmp_path, 0.5, output.append) as watchdog:
        for step in range(30):
            watchdog.beat(step)
            time.sleep(0.03)
    assert output == [] and not (tmp_path / "stacks.txt").exists()


def test_heartbeat_tells_step_and_phase(tmp_path):
    path = tmp_path / "heartbeat.json"
    with Watchdog(tmp_path, 0.4, print) as watchdog:
        watchdog.start(9, 3)
        with watchdog.phase("saving"):
            wait_until(lambda: path.exists() and "saving" in path.read_text())
            beat = json.loads(path.read_text())
    assert beat["step"] == 3 and abs(beat["time"] - time.time()) < 60
    assert json.loads(path.read_text())["phase"] == "training"


def test_heartbeat_goes_on_without_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.runs.watchdog.BEAT_SECONDS", 0.02)
    path = tmp_path / "heartbeat.json"
    with Watchdog(tmp_path, 0.1, lambda text: None, attempt=2) as watchdog:
        watchdog.start(90, 40)
        wait_until(lambda: path.exists() and json.loads(path.read_text())["total_steps"])
        first = json.loads(path.read_text())
        wait_until(lambda: json.loads(path.read_text())["time"] > first["time"])
        beat = json.loads(path.read_text())
    assert beat["state"] == "running" and beat["moved"] == first["moved"]
    assert [beat[k] for k in ("step", "start_step", "total_steps", "attempt")] == [40, 40, 90, 2]
    assert beat["pid"] == os.getpid() and beat["started"] <= beat["moved"]


@pytest.mark.parametrize(
    ("error", "stopped", "state", "message"),
    [
        (None, "", "finished", ""),
        (None, "SIGTERM", "stopped", "SIGTERM"),
        (ValueError("bad \x1b[2J"), "", "failed", "ValueError: bad \\x1b[2J"),
        (KeyboardInterrupt(), "", "stopped", "SIGINT"),
    ],
)
def test_heartbeat_tells_how_a_run_ended(tmp_path, error, stopped, state, message):
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        with Watchdog(tmp_path, 9, print) as watchdog:
            if stopped:
                watchdog.stopped(stopped)
            if error:
                raise error
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (beat["state"], beat["message"]) == (state, message)


def test_heartbeat_survives_a_folder_that_goes_away(tmp_path):
    output = []
    with Watchdog(tmp_path / "gone", 0.1, output.append):
        wait_until(lambda: output)
    assert "stacks" not in output[0]


LOOP = """
import sys, time
from jaxtrain.runs.watchdog import Signals
def say(text):  # in one write: two threads speak
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

with Signals(say) as signals:
    say("ready")
    while not signals.stop:
        {busy}
    say("saved after " + signals.name)
    {after}
"""


def start_loop(busy="time.sleep(0.01)", after="pass"):
    child = subprocess.Popen(
        [sys.executable, "-c", LOOP.format(busy=busy, after=after)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{REPO}:{REPO}/tests/plain"},
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_cleanly(number):
    child = start_loop()
    child.send_signal(number)
    out, _ = child.communicate(timeout=20)
    name = signal.Signals(number).name
    assert child.returncode == 0
    assert f"{name}: stopping after this step; once more to exit at once" in out
    assert f"saved after {name}" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + 15), (signal.SIGINT, 128 + 2)])
def test_the_second_signal_exits_at_once(number, code):
    child = start_loop(after="time.sleep(60)")
    child.send_signal(signal.SIGTERM)
    output = {child.stdout.readline().split()[0] for _ in range(2)}
    assert output == {"SIGTERM:", "saved"}  # the signal thread and the loop, in either order
    began = time.monotonic()
    child.send_signal(number)
    child.communicate(timeout=20)
    assert child.returncode == code and time.monotonic() - began < 10


def test_the_second_signal_works_while_the_main_thread_is_in_native_code():
    """Like a compilation, this hash keeps Python's own handlers from running."""
    native = "__import__('hashlib').pbkdf2_hmac('sha256', b'', b'', 1_000_000_000)"
    child = start_loop(busy=native)
    time.sleep(0.2)
    child.send_signal(signal.SIGTERM)
    assert "stopping" in child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=20)
    assert child.returncode == 143


def test_with_several_processes_a_signal_stops_none_alone():
    from jaxtrain.runs.watchdog import Signals

    passed = queue.Queue()
    with Signals(print, passed.put) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert passed.get(timeout=20) == "SIGTERM" and not signals.stop


def test_handlers_are_put_back():
    from jaxtrain.runs.watchdog import Signals

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with Signals(print) as signals:
        assert signal.getsignal(signal.SIGTERM) != before[0] and not signals.stop
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("start", "traced"), [(3, [3, 4]), pytest.param(9, [9], marks=pytest.mark.slow), (None, [])]
)
def test_profile_window_covers_its_steps(tmp_path, start, traced):
    state, seen = jnp.zeros(3), []
    with ProfileWindow(tmp_path / "profile", start, 2) as window:
        for step in range(2, 10):
            window.before(step, state)
            state = state + 1
            seen += [step] if window.tracing else []
    assert seen == traced
    for written in ("*.xplane.pb", "memory-0.prof"):
        assert bool(list(tmp_path.rglob(written))) == bool(traced)
