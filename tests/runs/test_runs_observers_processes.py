"""Verdicts of process 0's observers: every process does the same after the same step."""

from collections import deque
from types import SimpleNamespace

import pytest

from jaxtrain.core import observation
from jaxtrain.core.observation import ObserverHook


def make_process(take, pauses=False):
    """An observer hook of one process, and the actions that it took."""
    actions = []
    session = SimpleNamespace(
        step=0, start=0, ended=False, rounds=SimpleNamespace(pauses=pauses, total_steps=100)
    )

    def act(name):
        return lambda: actions.append((name, session.step))

    evaluation = SimpleNamespace(evaluated_step=-1, evaluate=act("evaluate"))
    checkpoints = SimpleNamespace(tried=0, save=act("save"))
    observers = SimpleNamespace(take=take)
    return ObserverHook(session, observers, evaluation, checkpoints, print), actions


@pytest.mark.parametrize(
    ("pauses", "polls", "index"), [(False, (), 8), (True, (), 3), (False, (3,), 3)]
)
def test_all_processes_obey_the_observers_of_process_0(monkeypatch, pauses, polls, index):
    """Steps that may be short are not held up by a question each: only every 8th is, and where an
    evaluation has just made all of them wait."""
    sent, verdicts = deque(), {}

    def take():
        taken = dict(verdicts)
        verdicts.clear()
        return taken

    def never():
        raise AssertionError("only process 0 has observers")

    (first, first_actions), (second, second_actions) = (
        make_process(take, pauses),
        make_process(never, pauses),
    )
    monkeypatch.setattr(observation.jax, "process_count", lambda: 2)

    def broadcast(name, make):
        if hook is first:
            sent.append(make())
            return sent[-1]
        return sent.popleft()

    monkeypatch.setattr(observation, "broadcast", broadcast)
    for step in range(1, 10):
        if step == 3:
            verdicts.update(evaluate="one", save="one", stop="two")
        for hook in (first, second):
            hook.session.step = step
            hook.obey(poll=step in polls)
        assert not sent, "process 0 sent what the other did not ask for"
        if first.session.ended:
            break
    assert first_actions == second_actions == [("evaluate", index), ("save", index)]
    assert first.session.ended and second.session.ended and step == index
