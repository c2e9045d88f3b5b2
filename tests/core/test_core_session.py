"""Resources of a session are closed again when opening it fails midway."""

import contextlib
import dataclasses
import tomllib
from types import SimpleNamespace

import pytest
from toy_run import EVEN_TOKENS, MODEL

from jaxtrain.adapters.spec import Adapter
from jaxtrain.config import validate_config
from jaxtrain.config.evals import EvalConfig
from jaxtrain.core import session
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.evaluation import EvaluationHook
from jaxtrain.core.hooks import is_due
from jaxtrain.data.pipeline import BatchSource
from jaxtrain.environments.rewards import pool
from jaxtrain.errors import UserError
from jaxtrain.generation.local import publishers
from jaxtrain.methods.registry import make_task
from jaxtrain.methods.rl import method as rl

SFT = {
    **tomllib.loads(MODEL),
    "run": {"max_steps": 1},
    "data": {
        "sequence_len": 64,
        "datasets": [{"path": "builtin:calculator", "options": {"num_rows": 20}}],
    },
}
RL = {
    **SFT,
    **tomllib.loads(EVEN_TOKENS),
    "task": {"kind": "rl", "beta": 0.1},
    "rewards": [{"function": "length", "options": {"max_tokens": 4}}],
    "rollout": {"reward_workers": 1},
}


@pytest.fixture
def workers(monkeypatch):
    """Processes of all reward workers that were started."""
    started = []

    class Watched(pool.Worker):
        def __init__(self):
            super().__init__()
            started.append(self.process)

    monkeypatch.setattr(pool, "Worker", Watched)
    return started


def refuse(*_, **options):
    raise UserError("it is broken")


def test_a_reference_that_cannot_be_is_told_before_anything_opens(workers, monkeypatch):
    config = validate_config(
        {**RL, "task": {**RL["task"], "reference": "adapter_off"}, "adapter": {"kind": "lora"}},
        "a test",
    )
    broken = dataclasses.replace(
        build_model_bundle(config), adapter=Adapter({}, ("embed.embedding",))
    )
    monkeypatch.setattr(rl, "build_model_bundle", lambda *_: broken)
    with pytest.raises(UserError, match="embed.embedding"):
        session.open_session(config, make_task(config), print)
    assert not workers


def test_reward_workers_end_when_a_later_part_fails(workers, monkeypatch):
    config = validate_config(RL, "a test")
    closed = []
    close = publishers.LocalPublisher.close
    monkeypatch.setattr(
        publishers.LocalPublisher, "close", lambda self: (closed.append(self), close(self))
    )
    monkeypatch.setattr(session, "make_step", refuse)
    with pytest.raises(UserError, match="it is broken"):
        session.open_session(config, make_task(config), lambda line: None)
    assert [process.poll() is not None for process in workers] == [True]
    assert len(closed) == 1


def test_the_source_is_closed_when_a_later_part_fails(monkeypatch):
    config, closed = validate_config(SFT, "a test"), []
    close = BatchSource.close
    monkeypatch.setattr(BatchSource, "close", lambda self: (closed.append(self), close(self)))
    task = make_task(config)
    with monkeypatch.context() as patch:
        patch.setattr(session, "open_optimizer", refuse)
        with pytest.raises(UserError, match="it is broken"):
            session.open_session(config, task, print)
    assert len(closed) == 1
    opened = session.open_session(config, task, print)
    assert len(closed) == 1  # one that opened stays open until it is told to close
    opened.rounds.close()
    assert closed[1:] == [opened.rounds.source]


def test_servers_are_let_go_when_what_publishes_to_them_fails(monkeypatch):
    told = []

    class Servers:
        def __init__(self, *_):
            self.closing, self.all = contextlib.ExitStack(), []

        def open(self, wait=True, should_stop=None):
            told.append("open")
            return True

        def close(self):
            told.append("close")

    publishing = pytest.importorskip("jaxtrain.generation.vllm.factory")
    monkeypatch.setattr(publishing, "Servers", Servers)
    monkeypatch.setattr(publishing, "VllmEngine", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(publishing, "open_weights", lambda *_, **__: refuse())
    vllm = {"servers": ["http://localhost:1"], "sync": "full"}
    rollout = {"engine": "vllm", "vllm": vllm, "reward_workers": 1}
    config = validate_config({**RL, "rollout": rollout}, "a test")
    with pytest.raises(UserError, match="it is broken"):
        session.open_session(config, make_task(config), lambda line: None)
    assert told == ["open", "open", "close"]


@pytest.mark.parametrize(("every", "evaluated"), [(None, 1), (4, 1), ("never", 0)])
def test_the_last_step_is_evaluated_but_where_eval_says_never(every, evaluated):
    config = SimpleNamespace(eval=EvalConfig(every=every), run=SimpleNamespace(num_epochs=None))
    rounds, calls = SimpleNamespace(total_steps=4), []
    hook = SimpleNamespace(
        session=SimpleNamespace(step=4, rounds=rounds, config=config),
        collect=lambda: False,
        recorded=0,
        evaluated_step=0,
        evaluate=lambda: calls.append("evaluated"),
    )
    EvaluationHook.on_round_end(hook, 3)
    assert len(calls) == evaluated


def test_what_comes_so_often_an_epoch_is_even_and_lands_on_the_last_step():
    """10 steps in 2 epochs: twice an epoch, every second one, three times; rounds of 4 steps."""

    def steps(times, total, stride=1, every=None):
        ends = range(stride, total + 1, stride)
        return [end for end in ends if is_due(end, end - stride, every, times, total)]

    assert steps(4, 10) == [3, 5, 8, 10]
    assert steps(1, 10) == [10]
    assert steps(3, 10) == [4, 7, 10]
    assert steps(0, 10) == [] and steps(0, 10, every=4) == [4, 8]
    assert steps(4, 12, stride=4) == [4, 8, 12]
    # 49 x 49 / 49: no share of a step is lost to rounding.
    assert len(steps(49, 49)) == 49 and len(steps(7, 1001)) == 7
