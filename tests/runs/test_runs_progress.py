"""Phases, what is announced of them and when, and their seconds, by a scripted clock."""

import io
import json

import pytest

from jaxtrain.runs.console import Console
from jaxtrain.runs.progress import CLEAR, Progress, ProgressTicker
from jaxtrain.runs.watchdog import Watchdog


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Compiling:
    blocked, current = 0.0, ""


@pytest.fixture
def clock():
    return Clock()


def test_seconds_of_phases_are_those_without_what_lies_within(clock):
    progress = Progress(print, clock=clock)
    progress.rename("training")
    with progress.phase("outer"):
        clock.now = 4.0
        with progress.phase("inner"):
            clock.now = 10.0
        clock.now = 11.0
        with progress.phase("short"):
            clock.now = 11.2
    clock.now = 14.0
    assert progress.describe_times() == "seconds: inner 6.0, outer 5.0, training 2.8"


def test_compiling_is_taken_off_the_phase_around_it(clock):
    compiling = Compiling()
    progress = Progress(print, compiling, clock)
    with progress.phase("running a step"):
        compiling.blocked = 7.0
        clock.now = 10.0
    with progress.phase("evaluating"):
        # Two threads at once: no phase takes less than no time.
        compiling.blocked += 8.0
        clock.now = 14.0
    assert progress.describe_times() == "seconds: compiling 11.0, running a step 3.0"


def test_what_takes_long_is_announced_at_growing_intervals(clock):
    lines, count = [], 0
    progress = Progress(lines.append, clock=clock)

    def second(until):
        while clock.now < until:
            clock.now += 1.0
            progress.tick()

    with progress.phase("evaluating", lambda: f"{count} of 8 answers"):
        second(1.0)
        assert lines == []
        count = 1
        second(5.0)
        assert lines == ["evaluating: 1 of 8 answers (2 s)"]
        count = 5
        second(130.0)
    assert [line.split("(")[1] for line in lines] == ["2 s)", "30 s)", "60 s)", "120 s)"]
    assert lines[-1].startswith("evaluating: 5 of 8 answers")
    # The next time people know what it is, and hear of it where it is slow.
    with progress.phase("evaluating"):
        second(159.0)
        assert len(lines) == 4
        second(160.0)
    assert lines[4:] == ["evaluating (30 s)"]


def test_the_program_that_is_compiled_is_named(clock):
    compiling = Compiling()
    progress = Progress(print, compiling, clock)
    with progress.phase("waiting for answers", lambda: "3 groups to come"):
        compiling.current = "decode_chunk"
        assert progress.describe() == (
            "waiting for answers: 3 groups to come, compiling decode_chunk"
        )


def test_the_heartbeat_has_how_far_a_phase_is_before_any_step(tmp_path):
    watchdog = Watchdog(tmp_path, 100, print)
    with watchdog.phase("evaluating", lambda: "1 of 8 answers"):
        watchdog._write_heartbeat()
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (beat["phase"], beat["step"]) == ("evaluating: 1 of 8 answers", 0)


def test_a_terminal_shows_it_beside_the_bar():
    stream = io.StringIO()
    console = Console("rich", stream=stream)
    console.show("reading the weights (3 s)")  # no bar yet
    console.start(10, 0)
    console.show("evaluating: 1 of 8 answers (4 s)")
    console.close(None)
    assert "1 of 8 answers (4 s)" in stream.getvalue()
    assert "reading the weights" not in stream.getvalue()


def test_a_command_shows_lines_or_on_a_terminal_one_line_that_changes(clock):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = []
    for stream in (io.StringIO(), Terminal()):
        ticker = ProgressTicker(stream=stream)
        ticker.progress.clock = clock
        clock.now = 0.0
        with ticker.progress.phase("answering", lambda: "2 of 8 prompts\x1b"):
            with ticker.progress.phase("decoding"):
                clock.now = 3.0
                ticker.show()
                clock.now = 4.0
                ticker.show()
        clock.now = 5.0
        ticker.show()
        shown.append(stream.getvalue())
    line = "answering: 2 of 8 prompts\\x1b, decoding"
    assert shown == [f"{line} (3 s)\n", f"{CLEAR}{line} (3 s){CLEAR}{line} (4 s){CLEAR}"]
