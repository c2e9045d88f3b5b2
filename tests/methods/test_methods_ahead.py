"""Batches whose target states are made ahead: order, cursor, bounds, and who waited for whom."""

import threading
import time
from contextlib import nullcontext

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import Batch
from jaxtrain.errors import Interrupted, UserError
from jaxtrain.methods.drafts.prefetch import PrefetchedRounds
from jaxtrain.methods.drafts.target_stages import find_split
from jaxtrain.methods.offline import OfflineRounds


class Numbers:
    """A source of batches that count from 0."""

    def __init__(self, end: int | None = None):
        self.place, self.end = 0, end

    def __next__(self):
        if self.place == self.end:
            raise StopIteration
        self.place += 1
        token = np.full((1, 1, 4), self.place - 1, np.int32)
        return [Batch(token, token, token, token, {})]

    def state(self):
        return {"place": self.place}

    def restore(self, state):
        self.place = state["place"]

    def counters(self):
        return {"counts": {"draws": self.place}, "metrics": {"data/x": 1.0}}

    def close(self):
        self.end = self.place


class Doubles:
    """A stage that says twice the token; `gate` holds it back, `fail` breaks it."""

    name = "the target"

    def __init__(self, seconds: float = 0.0, fail: int | None = None):
        self.seconds, self.fail, self.filled = seconds, fail, []
        self.gate = threading.Event()
        self.gate.set()

    def fill(self, batch):
        self.gate.wait()
        number = int(batch.tokens[0, 0, 0])
        if number == self.fail:
            raise UserError("the disk is gone")
        self.filled.append(number)
        time.sleep(self.seconds)
        return batch._replace(streams={"target_states": jnp.asarray(2.0 * batch.tokens)})

    def advise(self, busy, waiting):
        return f"target {busy:.1f} s a batch"

    def close(self):
        pass


class Session:
    """core.task.Live, as far as rounds ask."""

    def __init__(self):
        self.step, self.stopped = 0, False

    def snapshot(self):
        return self

    def params(self):
        return {"w": jnp.zeros(())}

    def prepare(self, round):
        return round

    def phase(self, name, detail=None):
        return nullcontext()

    def stop_requested(self):
        return self.stopped


def open_rounds(stage, depth=2, source=None, total=100, output=None):
    rounds = OfflineRounds(source or Numbers(), total)
    return PrefetchedRounds(rounds, stage, depth, (output if output is not None else []).append)


def train(rounds, live, steps):
    actual = []
    for _ in range(steps):
        (batch,) = rounds.next(live).batches
        actual.append((int(batch.tokens[0, 0, 0]), float(batch.streams["target_states"][0, 0, 0])))
        live.step += 1
    return actual


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize("depth", [1, 3])
def test_at_most_as_many_batches_wait_as_the_queue_holds(depth):
    stage, live = Doubles(), Session()
    rounds = open_rounds(stage, depth)
    assert train(rounds, live, 2) == [(0, 0.0), (1, 2.0)]
    wait_for(lambda: len(stage.filled) == 2 + depth)
    time.sleep(0.3)  # longer than the stage's patience
    assert stage.filled == list(range(2 + depth))
    rounds.close()
    assert not rounds._thread.is_alive()


def test_a_cursor_is_that_of_the_last_batch_that_came_out():
    stage, live = Doubles(), Session()
    rounds = open_rounds(stage)
    assert rounds.state() == {"place": 0}
    train(rounds, live, 3)
    wait_for(lambda: len(stage.filled) == 5)
    assert rounds.state() == {"place": 3}
    assert rounds.counters()["counts"] == {"draws": 3}
    again = open_rounds(Doubles())
    again.restore(rounds.state())
    assert train(again, live, 2) == train(rounds, live, 2) == [(3, 6.0), (4, 8.0)]
    rounds.close()
    again.close()


def test_the_end_of_the_data_and_errors_come_in_their_turn():
    rounds, live = open_rounds(Doubles(), source=Numbers(3)), Session()
    assert len(train(rounds, live, 3)) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            rounds.next(live)
    rounds.close()
    rounds = open_rounds(Doubles(fail=2), depth=4)
    assert len(train(rounds, live, 2)) == 2
    with pytest.raises(UserError, match="the disk is gone"):
        rounds.next(live)
    rounds.close()


def test_a_run_that_is_to_stop_waits_no_longer():
    stage, live = Doubles(), Session()
    rounds = open_rounds(stage)
    train(rounds, live, 1)
    stage.gate.clear()
    live.stopped = True
    with pytest.raises(Interrupted):
        train(rounds, live, 5)
    stage.gate.set()
    rounds.close()


@pytest.mark.parametrize("slow", ["target", "training"])
def test_people_see_who_waited(slow):
    output, live = [], Session()
    stage = Doubles(0.1 if slow == "target" else 0.0)
    rounds = open_rounds(stage, total=8, output=output)
    for _ in range(8):
        train(rounds, live, 1)
        time.sleep(0.0 if slow == "target" else 0.1)
        rounds.finish(live, interrupted=False)
    metrics = rounds.counters()["metrics"]
    assert metrics["data/x"] == 1.0 and len(output) == 1
    assert "target 0." in output[0]
    if slow == "target":
        assert metrics["target/busy"] > 0.6 and metrics["target/starved"] > 0.5
    else:
        assert metrics["target/busy"] < 0.3 and metrics["target/starved"] < 0.2
        assert rounds.times.blocked > 0.3
    rounds.close()


@pytest.mark.parametrize(
    "local_value, peers, busy, step, best, gain",
    [
        (2, 6, 1.0, 1.0, 2, 1.0),
        (1, 7, 3.0, 1.0, 3, 3 / 1.4),
        (4, 4, 0.25, 1.0, 2, 1 / (4 / 6)),
        (1, 1, 9.0, 1.0, 1, 1.0),
    ],
)
def test_the_best_split_by_what_was_measured(local_value, peers, busy, step, best, gain):
    actual, times = find_split(local_value, peers, busy, step)
    assert actual == best
    np.testing.assert_allclose(times, gain)
