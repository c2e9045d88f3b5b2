"""The source: epochs, resume at any point, workers, streams, drops, eval; on in-memory rows."""

import gc
import json
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.config.data import DataConfig
from jaxtrain.data import pipeline
from jaxtrain.data.packing.pack import NLL
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.data.sources.readers import IndexedReader, MixturePart
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class Tokenize:
    """Row {"id", "n"} -> n tokens that all equal the id; longer than `limit` is dropped."""

    limit: int = 32

    def __call__(self, row, origin):
        if row["n"] > self.limit:
            return [Dropped("too long", origin)]
        weights = np.ones(row["n"], np.float32)
        return [Sample(np.full(row["n"], row["id"], np.int32), weights, origin)]


class Once:
    """An iterable without a length and without a state of its own."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def make_rows(count, first=1, low=3, high=30, seed=0):
    lengths = np.random.default_rng(seed).integers(low, high + 1, count)
    return [{"id": first + i, "n": int(n)} for i, n in enumerate(lengths)]


def make_data(**changes):
    return DataConfig(sequence_len=32, **{"packing_window": 8, **changes})


RECIPE = SimpleNamespace(
    row_tokens=32, normalize="token", held_out_normalize="token", units=None, fields=NLL
)


def open_source(parts, data, **changes):
    options = {"seed": 3, "rows_per_microstep": 2, "microsteps": 2, **changes}
    return pipeline.open_source(data, RECIPE, opened=parts, **options)


def make_parts(kind="indexed", tokenize=None):
    tokenize = tokenize or Tokenize()
    entry, two = make_rows(23), make_rows(11, first=100, seed=1)
    if kind == "indexed":
        return [MixturePart("one", entry, tokenize), MixturePart("two", two, tokenize)]
    if kind == "weighted":
        return [MixturePart("one", entry, tokenize, 3.0), MixturePart("two", two, tokenize, 1.0)]
    if kind == "stream":
        return [
            MixturePart("one", Once(entry), tokenize, 2.0),
            MixturePart("two", Once(two), tokenize, 1.0),
        ]
    if kind == "mixed":
        return [MixturePart("one", Once(entry), tokenize), MixturePart("two", two, tokenize)]
    import datasets

    stream = datasets.Dataset.from_list(entry).to_iterable_dataset(num_shards=3)
    return [MixturePart("hub", stream, tokenize)]


def read(source, count):
    return [batch for batch, *_ in islice(source, count)]


def ids_of(batches):
    """Ids of the trees in the order of rows, once for each tree."""
    actual = []
    for batch in batches:
        roots = (np.asarray(batch.prev) == -1) & (batch.owner >= 0)
        actual += batch.tokens[roots].tolist()
    return actual


def assert_same(first, right):
    assert len(first) == len(right)
    for a, b in zip(first, right, strict=True):
        for x, y in zip(a[:4], b[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(a.weights["nll"], b.weights["nll"])
        np.testing.assert_array_equal(a.owner, b.owner)


def test_an_epoch_holds_every_row_once_and_the_next_is_shuffled_anew():
    source = open_source(make_parts(), make_data(), num_epochs=2)
    batches = read(source, 100)
    for batch in batches:
        check_batch(batch)
        assert batch.tokens.shape == (2, 2, 32)
    ids = ids_of(batches)
    expected = sorted([*range(1, 24), *range(100, 111)])
    assert sorted(ids) == sorted(expected * 2)
    first = ids_of(read(open_source(make_parts(), make_data(), num_epochs=1), 100))
    assert sorted(first) == expected
    assert first != expected
    other_seed = ids_of(read(open_source(make_parts(), make_data(), num_epochs=1, seed=4), 100))
    assert other_seed != first


@pytest.mark.parametrize("kind", ["indexed", "weighted", "stream", "mixed", "hub"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"packing": False}, marks=pytest.mark.slow),
        {"shuffle": False, "prefetch": 1},
    ],
)
def test_resume_continues_with_the_identical_next_batch(kind, changes):
    data = make_data(shuffle_buffer=7, **changes)
    source = open_source(make_parts(kind), data)
    states, expected, counters = [], [], []
    for _ in range(12):
        states.append(json.loads(json.dumps(source.state())))
        expected.append(next(source)[0])
        counters.append(source.counters())
    source.close()
    for cut, state in enumerate(states):
        resumed = open_source(make_parts(kind), data)
        if cut % 2:
            next(resumed)  # a source that has already run can go back as well
        resumed.restore(state)
        assert_same(read(resumed, 12 - cut), expected[cut:])
        assert resumed.counters() == counters[-1]
        resumed.close()


@pytest.mark.slow
def test_workers_give_the_same_batches_and_take_over_each_others_cursor():
    alone = open_source(make_parts(), make_data())
    with_workers = open_source(make_parts(), make_data(num_workers=2))
    expected = read(alone, 400)
    assert_same(read(with_workers, 4), expected[:4])
    state = with_workers.state()
    # As `timeout` and schedulers of jobs signal all processes: the loop ends the workers.
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert_same(read(with_workers, 396), expected[4:])
    with_workers.close()
    alone.restore(state)
    assert_same(read(alone, 5), expected[4:9])


def test_a_cursor_of_other_data_is_refused_and_what_it_no_longer_needs_is_ignored():
    source = open_source(make_parts(), make_data())
    state, first = source.state(), read(source, 1)
    second = open_source(make_parts(), make_data(packing_window=2), seed=4)
    with pytest.raises(UserError, match=r"seed: 3 then, 4 now; packing_window: \d+ then, 2 now"):
        second.restore(state)
    source.restore({**state, "layout": {**state["layout"], "gone": 1}})
    assert_same(read(source, 1), first)
    source.close()
    second.close()


def test_weights_share_out_the_draws_and_restart_the_smaller_dataset():
    source = open_source(make_parts("weighted"), make_data())
    ids = np.array(ids_of(read(source, 200)))
    assert abs((ids < 100).mean() - 0.75) < 0.02
    counts = np.bincount(ids)[1:24]
    assert counts.max() - counts.min() <= 2  # passes of the dataset, each row once a pass


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_drops_are_counted_by_reason(kind):
    source = open_source(make_parts(kind, Tokenize(limit=20)), make_data(shuffle_buffer=5))
    read(source, 6)
    counters = source.counters()
    assert counters["dropped"]["too long"] > 0
    assert counters["samples"] + counters["dropped"]["too long"] == counters["rows_read"]
    assert 0.5 < counters["packing_efficiency"] <= 1


def test_a_row_that_gave_nothing_is_not_read_again():
    seen = []

    class Rows(list):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    rows = Rows(make_rows(4))
    part = MixturePart(
        "x",
        rows,
        lambda row, origin: [Dropped("odd", origin)] if row is list.__getitem__(rows, 1) else [],
    )
    reader = IndexedReader([part], row_tokens=32, shuffle=False)
    drawn = [next(reader) for _ in range(40)]
    assert [items != [] for items in drawn] == [False, True, False, False] * 10
    assert seen.count(1) == 1
    assert sum(len(items) for items in drawn) == 10, "each draw of it is counted"


@pytest.mark.parametrize("kind", ["indexed", "weighted", "stream", "mixed", "hub"])
def test_data_of_which_nothing_survives_is_an_error_not_a_loop(kind):
    source = open_source(make_parts(kind, Tokenize(limit=2)), make_data(shuffle_buffer=5))
    with pytest.raises(UserError, match=r"no example of the data trains: .* x too long"):
        next(source)


def test_the_first_token_alone_does_not_train():
    rows = [{"id": 5, "n": 1}] * 4
    with pytest.raises(UserError, match="4 x no trained token"):
        next(open_source([MixturePart("x", rows, Tokenize())], make_data()))


@pytest.mark.parametrize("rows", [[], Once([])])
def test_an_empty_dataset_is_named(rows):
    with pytest.raises(UserError, match="some.jsonl has no rows"):
        next(open_source([MixturePart("some.jsonl", rows, Tokenize())], make_data()))


def test_a_user_error_of_the_tokenizer_arrives_unchanged():
    def refuse(row, origin):
        raise UserError(f"{origin}: too long")

    with pytest.raises(UserError, match=r"^x row 0: too long$"):
        next(open_source([MixturePart("x", make_rows(1), refuse)], make_data()))


@pytest.mark.parametrize("error", [KeyError("text"), SystemExit("a plugin's end")])
def test_an_error_of_the_tokenizer_comes_again_until_a_state_is_restored(error):
    rows = make_rows(40)
    fails = [True]

    def tokenize(row, origin):
        if row["id"] == 30 and fails:
            raise error
        return Tokenize()(row, origin)

    source = open_source([MixturePart("a", rows, tokenize)], make_data(shuffle=False), num_epochs=1)
    state = None
    for _ in range(2):
        with pytest.raises(type(error)):
            while True:
                next(source)
                state = source.state()
    assert state is not None
    fails.clear()
    source.restore(state)
    rest = list(source)
    whole = list(
        open_source([MixturePart("a", rows, Tokenize())], make_data(shuffle=False), num_epochs=1)
    )
    for expected, got in zip(whole[-len(rest) :], rest, strict=True):
        np.testing.assert_array_equal(got[0].tokens, expected[0].tokens)
    source.close()


def test_a_source_that_is_collected_on_its_reading_thread_is_closed(monkeypatch):
    ready, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(IndexedReader, "close", lambda reader: closed.set())

    def tokenize(row, origin):
        if row["id"] > 60:
            ready.wait(30)
            gc.collect()
        return Tokenize()(row, origin)

    part = MixturePart("a", make_rows(100), tokenize)
    source = open_source([part], make_data(shuffle=False, prefetch=100))
    next(source)
    source.cycle = source
    del source
    ready.set()
    assert closed.wait(30)


def test_a_dataset_smaller_than_a_batch_repeats_or_is_padded():
    parts = [MixturePart("tiny", make_rows(2), Tokenize())]
    endless = open_source(parts, make_data())
    assert set(ids_of(read(endless, 5))) == {1, 2}
    finite = read(open_source(parts, make_data(), num_epochs=1), 5)
    assert sorted(ids_of(finite)) == [1, 2]
    assert len(finite) == 1 and finite[0].tokens.shape == (2, 2, 32)


@pytest.mark.parametrize("num_epochs", [1, 2.5])
@pytest.mark.parametrize("kind", ["indexed", "weighted"])
@pytest.mark.parametrize("packing", [True, False])
def test_counted_steps_are_those_that_come_out(num_epochs, kind, packing):
    data = make_data(packing=packing)
    options = {"seed": 3, "rows_per_microstep": 2, "microsteps": 2, "num_epochs": num_epochs}
    steps, _ = pipeline.plan_steps(data, RECIPE, opened=make_parts(kind), **options)
    assert len(read(open_source(make_parts(kind), data, **options), 1000)) == steps


@pytest.mark.parametrize("kind", [0, 1, "stream"])
def test_eval_sees_every_row_exactly_once(kind):
    part = make_parts("stream")[0] if kind == "stream" else make_parts()[kind]
    batches = list(pipeline.eval_batches(None, make_data(), RECIPE, 3, opened=part))
    assert all(batch.tokens.shape == (1, 3, 32) for batch in batches)
    assert sorted(ids_of(batches)) == sorted(row["id"] for row in part.rows)


def test_buckets_cut_a_step_to_its_longest_row():
    rows = [{"id": 1, "n": 5}] * 6 + [{"id": 2, "n": 20}] * 2
    data = make_data(packing=False, shuffle=False, length_buckets=[8, 16])
    source = open_source([MixturePart("x", rows, Tokenize())], data, num_epochs=1)
    assert source.lengths == (8, 16, 32)
    batches = read(source, 5)
    assert [batch.tokens.shape[-1] for batch in batches] == [8, 32]
    assert source.counters()["batch_shapes"] == 2
    for batch in batches:
        check_batch(batch)


def test_a_cursor_of_other_data_is_refused():
    state = open_source(make_parts(), make_data()).state()
    source = open_source([MixturePart("one", make_rows(9), Tokenize())], make_data())
    with pytest.raises(UserError, match="rows: .* then, .* now"):
        source.restore(state)


def test_microsteps_follow_the_rows_of_a_step_unless_their_number_is_fixed():
    shape = StepShape(rows=2, microsteps=None, row_tokens=8)
    assert [len(shape.build([[]] * rows).tokens) for rows in (1, 2, 3, 9, 10)] == [1, 1, 2, 5, 5]
    assert len(StepShape(rows=2, microsteps=5, row_tokens=8).build([[]]).tokens) == 5
