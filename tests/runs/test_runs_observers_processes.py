"""Verdicts of process 0's observers: every process does the same after the same step."""

from collections import deque
from types import SimpleNamespace

import pytest

from jaxtrain.core import loop
from jaxtrain.core.loop import Loop


def make_half(take, pauses=False):
    """A loop of one process that notes what it does."""
    half = Loop.__new__(Loop)
    half.acts = []
    half.session = SimpleNamespace(step=0, start=0, rounds=SimpleNamespace(pauses=pauses))
    half.observed, half.over, half.evaluated = True, False, -1
    half.saves = SimpleNamespace(tried=0)
    half.observers = SimpleNamespace(take=take)
    half.sinks = SimpleNamespace(log=lambda text: None)
    for name in ("report", "evaluate", "save"):
        setattr(half, name, lambda name=name: half.acts.append((name, half.session.step)))
    return half


@pytest.mark.parametrize(
    ("pauses", "look", "at"), [(False, (), 8), (True, (), 3), (False, (3,), 3)]
)
def test_all_processes_do_what_process_0_is_asked(monkeypatch, pauses, look, at):
    """Steps that may be short are not held up by a question each: only every 8th is, and where an
    evaluation has just made all of them wait."""
    told, wanted = deque(), {}

    def take():
        found = dict(wanted)
        wanted.clear()
        return found

    def never():
        raise AssertionError("only process 0 has observers")

    halves = [make_half(take, pauses), make_half(never, pauses)]
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)

    def broadcast(name, make):
        if asked is halves[0]:
            told.append(make())
            return told[-1]
        return told.popleft()

    monkeypatch.setattr(loop, "broadcast", broadcast)
    for step in range(1, 10):
        if step == 3:
            wanted.update(evaluate="one", save="one", stop="two")
        for asked in halves:
            asked.session.step = step
            asked.obey(look=step in look)
        assert not told, "process 0 told what the other did not ask for"
        if halves[0].over:
            break
    assert halves[0].acts == halves[1].acts == [("report", at), ("evaluate", at), ("save", at)]
    assert halves[0].over and halves[1].over and step == at
