"""Evaluations beside training: one at a time, dated, asked anew where they were broken off."""

import json
import threading

import pytest

from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.generation.engine import KeepLost
from jaxtrain.generation.evaluation.background import (
    MAX_LOSSES,
    NOTE,
    BackgroundEval,
    find_broken_off,
)


class Engine:
    """Keeps what is its newest version; `spare` says whether it can."""

    def __init__(self):
        self.version, self.spare, self.released = 0, True, 0

    def keep(self):
        return Kept(self) if self.spare else None


class Kept:
    def __init__(self, engine):
        self.engine, self.version = engine, engine.version

    def release(self):
        self.engine.released += 1


class Sets:
    """Answers once it is let go; `ends` is raised instead."""

    def __init__(self):
        self.go, self.ends, self.said = threading.Event(), None, []
        self.log = self.said.append

    def run(self, engine, step, sampled, should_stop):
        while not self.go.wait(0.005):
            if should_stop():
                raise Interrupted
        if self.ends is not None:
            raise self.ends
        sampled(step, [{"set": "a", "step": step}])
        return {"eval/a/avg@1": 0.5}


@pytest.fixture
def background(tmp_path):
    beside = BackgroundEval(Engine(), Sets(), tmp_path)
    yield beside
    beside.close()


def test_numbers_come_later_with_their_version_and_step(background):
    background.engine.version = 7
    assert background.begin(14)
    background.engine.version = 9  # training went on
    assert background.collect() == (None, False) and background.step == 14
    background.sets.go.set()
    actual, again = background.collect(wait=True)
    assert actual.step == 14 and not again and background.engine.released == 1
    assert actual.numbers.pop("eval/seconds") >= 0
    assert actual.numbers == {"eval/a/avg@1": 0.5, "eval/policy_version": 7.0}
    assert actual.samples == [{"set": "a", "step": 14}]
    assert background.note.exists()
    background.written()
    assert not background.note.exists() and background.collect() == (None, False)
    background.engine.spare = False
    assert not background.begin(20) and not background.note.exists()


def test_what_lost_its_servers_is_asked_again_and_in_the_end_of_all(background):
    background.sets.go.set()
    background.sets.ends = KeepLost("gone")
    for count in range(1, MAX_LOSSES + 1):
        assert background.begin(count)
        assert background.collect(wait=True) == (None, True) and background.asked_again == count
    assert not background.begin(9), "all servers answer it, between rounds"
    assert "asked again: gone" in background.sets.said[0]
    background._in_a_row, background.sets.ends = 0, None
    assert background.begin(9)
    assert background.collect(wait=True)[0].numbers["eval/asked_again"] == 3


def test_other_errors_end_the_run(background):
    background.sets.go.set()
    background.sets.ends = RunStopped("no reward judges")
    background.begin(1)
    with pytest.raises(RunStopped, match="no reward judges"):
        background.collect(wait=True)
    assert background.engine.released == 1


def test_what_the_end_broke_off_is_asked_again_once(background, tmp_path):
    background.begin(6)
    background.should_stop = lambda: True
    with pytest.raises(Interrupted):
        background.collect(wait=True)
    background.close()
    assert background.engine.released == 1
    lines = [{"step": 4, "eval/a/avg@1": 0.1}, {"step": 8, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert find_broken_off(tmp_path, 8) == 6
    assert find_broken_off(tmp_path, 8) is None, "said once"
    (tmp_path / NOTE).write_text('{"step": 6}')
    assert find_broken_off(tmp_path, 4) is None, "a run that goes on before it comes to it again"
    (tmp_path / NOTE).write_text('{"step": 6}')
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "eval/a/avg@1": 0.2}\n')
    assert find_broken_off(tmp_path, 8) is None, "its numbers were written just before the end"
    (tmp_path / NOTE).write_text("{")
    assert find_broken_off(tmp_path, 8) is None
