"""Drops are told wherever data are read, and nothing is called untrainable that is not."""

import json

import pytest

from jaxtrain.config import DataConfig, DatasetConfig
from jaxtrain.data.counts import Counts, count_items, count_metrics, describe_counts
from jaxtrain.data.pipeline import eval_batches, open_source, plan_steps
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.order import Order
from jaxtrain.errors import UserError

STEP = {"seed": 3, "rows_per_microstep": 1, "microsteps": 1}


def make_data(tmp_path, texts, **changes):
    path = tmp_path / "x.jsonl"
    rows = ({"prompt": "q", "completion": text} for text in texts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"sequence_len": 16, "packing_window": 8, **changes}
    return DataConfig(datasets=[DatasetConfig(path=str(path))], **options)


def test_counts_and_metrics_say_what_was_dropped_and_why(tokenizer, tmp_path):
    data = make_data(tmp_path, ["1"] * 98 + ["1" * 99] * 200 + [3, None])
    steps, counts = plan_steps(data, Sequences(data, tokenizer), **STEP)
    assert steps > 0
    line = describe_counts(counts, 16, "stay text")
    assert line.startswith("202 of 300 rows give nothing to train on; dropped examples: 200 x too")
    assert "1 x malformed row: " in line and "kept: 98" in line and "sequence_len is 16" in line
    source = open_source(data, Sequences(data, tokenizer), **STEP, num_epochs=1)
    batches = list(source)
    actual = source.counters()
    source.close()
    assert len(batches) == steps and actual["counts"] == counts
    assert actual["metrics"] == count_metrics(counts)
    assert actual["metrics"]["data/rows"] == 300 and actual["metrics"]["data/lost_rows"] == 202
    assert actual["metrics"]["data/dropped/too_long"] == 200
    assert actual["metrics"]["data/dropped/malformed_row"] == 2
    seen = []
    held_out = eval_batches(data.datasets[0], data, Sequences(data, tokenizer), 1, seen.append)
    next(held_out)
    held_out.close()  # as eval.max_batches does
    assert seen and seen[0]["draws"] > 0


def test_nothing_is_told_where_nothing_was_dropped(tokenizer, tmp_path):
    data = make_data(tmp_path, ["1"] * 9)
    _, counts = plan_steps(data, Sequences(data, tokenizer), **STEP)
    assert describe_counts(counts, 16, "") == ""


@pytest.mark.parametrize("seed", range(6))
def test_one_example_that_trains_is_enough(tokenizer, tmp_path, seed):
    """It may come first in one epoch and last in the next: more than a pass between them."""
    data = make_data(tmp_path, ["1"] + ["1" * 99] * 40, packing_window=1, packing=False)
    source = open_source(data, Sequences(data, tokenizer), **{**STEP, "seed": seed})
    for _ in range(8):
        next(source)
    source.close()


def test_data_of_which_nothing_trains_are_refused_after_a_whole_pass(tokenizer, tmp_path):
    data = make_data(tmp_path, ["1" * 99] * 40)
    source = open_source(data, Sequences(data, tokenizer), **STEP)
    with pytest.raises(UserError, match="no example of the data trains: 40 rows read, 40 x too lo"):
        next(source)
    source.close()


def test_a_pass_of_weighted_data_sees_every_row():
    order = Order([100, 3], [0.1, 0.9], seed=1)
    seen = {order[draw] for draw in range(order.pass_len)}
    assert len(seen) == 103
    assert Order([5, 6]).pass_len == 11


def test_a_line_stays_short():
    counts = Counts({"draws": 9, "trees": 1})
    for number in range(500):
        counts[f"dropped:malformed row: {number}"] = number + 1
    line = describe_counts(counts, 16, "")
    assert "for other reasons" in line and len(line) < 500
    assert len(count_metrics(counts)) == 5
    with pytest.raises(UserError):
        count_items(Counts({"dropped:too long": 3, "draws": 3}), [], 4)
