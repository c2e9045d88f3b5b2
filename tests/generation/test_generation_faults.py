"""Faults of environments and judges in a run: raise, hang, give nonsense. Every prompt is trained
or dropped under a reason, and only failures that persist end the run."""

import asyncio
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_policy import GROUP, SAMPLING, Judge, KnownPolicy, OneToken, make_rounds

from jaxtrain.environments.guarded import GuardedEnv
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation import event_loop, group_player
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.group_player import GroupPlayer, GroupRules
from jaxtrain.generation.producer import Producer, ProducerOptions
from jaxtrain.generation.prompts import PromptOrder


class Scripted(OneToken):
    """Does what `script(row, index, try)` says instead of playing; None: plays."""

    def __init__(self, script):
        super().__init__()
        self.script, self.tries = script, {}

    async def run(self, row, engine, sampling, index):
        count = self.tries[index] = self.tries.get(index, -1) + 1
        episode = await super().run(row, engine, sampling, index)
        match self.script(row["id"], index, count):
            case "raise":
                raise KeyError("a bug\x1b[31m in the world")
            case "exit":
                raise SystemExit(3)
            case "user":
                raise UserError("row has no prompt")
            case "hang":
                await asyncio.sleep(60)
            case "nan":
                episode.rewards = {"r": float("nan")}
            case "inf":
                episode.turn_rewards = [{"r": float("inf")}]
            case "text":
                episode.rewards = {"r": "good"}
            case "none":
                return None
            case "short":
                episode.logprobs = []
            case "cancel":
                raise asyncio.CancelledError
        return episode


FAULTS = "raise exit hang nan inf text none short cancel".split()


@pytest.fixture(scope="module", autouse=True)
def short_pauses():
    patch = pytest.MonkeyPatch()
    patch.setattr(group_player, "pause_before", lambda attempt: 0.001)
    yield
    patch.undo()


def open_producer(
    script, judge=None, output=None, share=1.0, rows=100, retries=1, window=64, step=60.0, **options
):
    prompts = PromptOrder([[{"id": i} for i in range(rows)]], seed=0, shuffle=False)
    log = (lambda text: None) if output is None else output.append
    env = GuardedEnv(Scripted(script), "env.path 'world.py:World'", 60.0, step)
    player = GroupPlayer(
        DatasetEnvs(env, judge or Judge()),
        KnownPolicy(),
        SAMPLING,
        GroupRules(GROUP, {"r": 1.0}, retries=retries),
        Failures(share, window, log),
    )
    return Producer(prompts, player, ProducerOptions(**options), log=log)


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("raise", "environment raised KeyError"),
        ("exit", "environment raised SystemExit"),
        ("hang", "environment timed out"),
        ("nan", "reward r is NaN"),
        ("inf", "reward r is infinite"),
        ("text", "reward r is no number"),
        ("none", "environment returned a NoneType"),
        ("short", "environment returned lists of different lengths"),
        ("cancel", "environment was cancelled"),
    ],
)
def test_a_fault_costs_a_try_then_the_group_and_is_told_once(fault, reason):
    """Episode 0 of prompt 0 fails once, episode 1 of prompt 1 always."""
    output = []
    bad = {(0, 0), (4 * GROUP + 1, 0), (4 * GROUP + 1, 1)}
    producer = open_producer(
        lambda row, index, count: fault if (index, count) in bad else None,
        output=output,
        step=0.2 if fault == "hang" else 60.0,
    )
    try:
        retained, lost, second = producer.next_slots(3)
    finally:
        producer.close()
    assert retained.group is not None and retained.redone == 1 and second.group is not None
    (dropped,) = lost.dropped
    assert lost.group is None and dropped.startswith(f"failed: {reason}")
    (line,) = output
    assert "env.path 'world.py:World'" in line and len(line) < 2000 and "\x1b" not in line
    assert ("Traceback" in line) == (fault in ("raise", "exit"))


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(st.integers(0, 11), st.sampled_from([*FAULTS, "user"]), max_size=8))
def test_every_prompt_is_trained_or_dropped_whatever_its_world_does(faults):
    """Faults by prompt: each place comes out once, and its prompt is done."""

    def script(row, index, count):
        # The first prompt works, so that a mistake in a row is a failure as any other.
        return faults.get(row - 1) if row and index % GROUP == 2 else None

    producer = open_producer(
        script, rows=13, retries=0, step=0.2 if "hang" in faults.values() else 60.0
    )
    try:
        slots = producer.next_slots(13)
        producer.mark_done(slots)
        state = producer.state()
    finally:
        producer.close()
    for slot in slots:
        row = slot.requests[0].row["id"]
        assert (slot.group is None) == ((row - 1) in faults) == bool(slot.dropped)
    assert state["low"] == 13 and not state["beyond"]


def test_only_a_persistent_share_of_failures_ends_the_run():
    # All are under way at once, and those that fail come out last.
    subset = {"share": 0.5, "window": 240}
    third = open_producer(lambda row, index, count: "raise" if row % 3 == 0 else None, **subset)
    always = open_producer(lambda row, index, count: "raise", share=0.5)
    try:
        assert sum(slot.group is None for slot in third.next_slots(60)) == 20
        with pytest.raises(RunStopped) as stopped:
            always.next_slots(60)
    finally:
        third.close()
        always.close()
    for words in ("64 of the last 64", "rollout.max_failures 0.5", "KeyError", "world.py:World"):
        assert words in str(stopped.value)


def test_a_mistake_ends_at_once_where_nothing_ever_worked():
    first = open_producer(lambda row, index, count: "user" if row == 0 else None)
    later = open_producer(lambda row, index, count: "user" if row >= 2 else None, share=0.4)
    try:
        with pytest.raises(UserError, match="row has no prompt"):
            first.next_slots(1)
        later.next_slots(2)
        with pytest.raises(
            UserError, match=r"more than rollout.max_failures 0.4.*row has no prompt"
        ):
            later.next_slots(60)
    finally:
        first.close()
        later.close()


def test_a_judge_that_fails_drops_its_groups_and_counts():
    class Broken(Judge):
        async def score(self, episodes, row):
            if row["id"] % 2:
                raise EpisodeFailed("reward x timed out", cause="rewards.0 (function 'x'): late")
            return await super().score(episodes, row)

    producer = open_producer(lambda *_: None, Broken(), share=0.4)
    try:
        slots = producer.next_slots(4)
        assert [slot.dropped["failed: reward x timed out"] for slot in slots] == [0, 1, 0, 1]
        with pytest.raises(RunStopped, match=r"rewards.0 \(function 'x'\): late"):
            producer.next_slots(60)
    finally:
        producer.close()


@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_signal_ends_a_hanging_world_within_a_second(blocks, monkeypatch):
    """Also one that blocks the event loop, which is left behind and named."""
    monkeypatch.setattr(event_loop, "CLOSE_SECONDS", 0.5)
    asleep, release = threading.Event(), threading.Event()

    class Hangs(KnownPolicy):
        async def generate(self, *args, **kwargs):
            asleep.set()
            if blocks:
                release.wait(30)
            await asyncio.sleep(30)

    output = []
    producer = open_producer(lambda *_: None, output=output)
    producer.player.engine = Hangs()
    producer.stop_when(asleep.is_set)
    begin = time.monotonic()
    with pytest.raises(Interrupted):
        producer.next_slots(1)
    assert producer.state()["low"] == 0  # the cursor is there, whatever the event loop does
    producer.close()
    assert time.monotonic() - begin < 15  # not the 30 that it sleeps
    assert any("test_generation_faults.py" in line for line in output) == blocks
    release.set()


def test_a_world_that_blocks_the_event_loop_is_named_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(event_loop, "WARN_SECONDS", 0.6)
    monkeypatch.setattr(event_loop, "CLOSE_SECONDS", 0.2)
    release = threading.Event()

    class Blocks(KnownPolicy):
        async def generate(self, *args, **kwargs):
            release.wait(30)

    output = []
    producer = open_producer(lambda *_: None, output=output, patience=0.5)
    producer.player.engine = Blocks()
    try:
        with pytest.raises(RunStopped, match=r"env.step_timeout.*test_generation_faults.py:\d+"):
            producer.next_slots(1)
    finally:
        release.set()
        producer.close()
    assert "asyncio.to_thread" in output[0]


def test_epochs_end_by_prompts_not_by_steps():
    producer = open_producer(lambda *_: None, rows=6)
    source = make_rounds(producer, per_round=2, max_prompts=12.0)
    try:
        rounds, shares = 0, []
        with pytest.raises(StopIteration):
            while True:
                source.draw()
                rounds += 1
                shares.append(source.progress)
                source.version += 1
    finally:
        source.close()
    assert rounds == 6 and shares[2] == 0.5 and isinstance(shares[-1], float)
