"""Tokenized data come back as they were, only for what they were made of, and whole or not."""

import json
import pickle
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import DataConfig, DatasetConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.preferences import Preferences
from jaxtrain.data.counts import Progress
from jaxtrain.data.packing.pack import Fields
from jaxtrain.data.packing.tree import Forest, TreeGroup
from jaxtrain.data.pipeline import open_source, plan_steps
from jaxtrain.data.sample import RowNote, to_trees
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources import cache
from jaxtrain.data.sources.cache import cache_part, is_whole
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.data import Trees

STEP = {"seed": 5, "rows_per_microstep": 2, "microsteps": 1}


def make_data(tmp_path, texts=("one", "1" * 99, "two", None), **changes):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q", "completion": t}) + "\n" for t in texts))
    return DataConfig(datasets=[DatasetConfig(path=str(path))], **{"sequence_len": 32, **changes})


def keep(recipe, data, tokenizer, folder, output=None):
    [dataset] = data.datasets
    return cache_part(
        recipe.open(dataset),
        recipe.settings(dataset),
        tokenizer,
        folder,
        row_tokens=recipe.row_tokens,
        num_workers=0,
        log=(output if output is not None else []).append,
    )


def flat(items):
    """Everything of what a row became, to compare."""
    actual = []
    for item in items:
        for entry in item.trees if isinstance(item, TreeGroup | Forest) else [item]:
            if isinstance(entry, RowNote):
                actual.append(entry)
                continue
            nodes = [
                (n.parent, n.tokens.tolist(), n.role, _values(n.weights), n.streams.keys())
                for n in entry.nodes
            ]
            actual.append((type(item), nodes, entry.ends, entry.origin, entry.controls))
    return actual


def _values(named):
    return {name: values.tolist() for name, values in named.items()}


def assert_same(part, cached, row_tokens):
    assert len(part.rows) == len(cached.rows)
    for index in range(len(part.rows)):
        expected = to_trees(part.tokenize(part.rows[index], part.origin(index)), row_tokens)
        assert flat(cached.rows[index]) == flat(expected)


def test_rows_come_back_as_they_were(tokenizer, tmp_path):
    data, output = make_data(tmp_path), []
    recipe = Sequences(data, tokenizer)
    first = keep(recipe, data, tokenizer, tmp_path / "cache", output)
    assert not output
    again = keep(recipe, data, tokenizer, tmp_path / "cache", output)
    assert "tokenized before" in output[0]
    for cached in (first, again, pickle.loads(pickle.dumps(again))):
        assert_same(recipe.open(data.datasets[0]), cached, 32)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [again.rows.entry.name]


@pytest.mark.parametrize("mode", ["tree", "per_branch", "current_rl"])
def test_trees_come_back_as_they_were(tokenizer, tmp_path, mode):
    dataset = DatasetConfig(path="builtin:calculator", options={"num_rows": 12})
    data = DataConfig(datasets=[dataset], sequence_len=512)
    recipe = Trees(TreeTask(mode=mode), data, tokenizer)
    cached = keep(recipe, data, tokenizer, tmp_path)
    assert cached.rows.entry.parent == tmp_path
    assert_same(recipe.open(dataset), cached, 512)


def dataset_row(dataset):
    return open_rows(dataset)[0]


def trees_of(item):
    return item.trees if isinstance(item, Forest) else (item,)


@pytest.mark.parametrize("share", [True, False])
def test_pairs_come_back_as_they_were(tokenizer, tmp_path, share):
    dataset = DatasetConfig(path="builtin:calculator_pairs", options={"num_rows": 6})
    data = DataConfig(datasets=[dataset], sequence_len=512)
    fields = Fields(("preference", "score"), {"chosen": np.int32})
    recipe = Preferences(data, tokenizer, PairTrees(share_prompts=share), fields)
    cached = keep(recipe, data, tokenizer, tmp_path)
    assert_same(recipe.open(dataset), cached, recipe.row_tokens)
    assert cached.rows.entry.parent == tmp_path
    created, retained = (
        recipe.open(dataset).tokenize(dataset_row(dataset), "x")[0],
        cached.rows[0][0],
    )
    for tree, back in zip(*map(trees_of, (created, retained)), strict=True):
        for node, again in zip(tree.nodes, back.nodes, strict=True):
            assert {n: v.dtype for n, v in node.streams.items()} == {
                n: v.dtype for n, v in again.streams.items()
            }
            assert _values(node.streams) == _values(again.streams)
    preferences = Preferences(data, tokenizer, PairTrees(share, tail=0.5), fields)
    assert preferences.settings(dataset) != recipe.settings(dataset)
    outside = Preferences(data, tokenizer, lambda ranked: None, fields)
    assert outside.settings(dataset) is None


def test_batches_and_cursors_do_not_depend_on_the_cache(tokenizer, tmp_path):
    data = make_data(tmp_path, ["1" * (n % 40) for n in range(60)])
    recipe = Sequences(data, tokenizer)
    opened = [keep(recipe, data, tokenizer, tmp_path / "cache")]
    assert plan_steps(data, recipe, **STEP) == plan_steps(data, recipe, **STEP, opened=opened)
    plain = open_source(data, recipe, **STEP, num_epochs=2)
    cached = open_source(data, recipe, **STEP, num_epochs=2, opened=opened)
    for [first], [right] in zip(plain, cached, strict=True):
        np.testing.assert_array_equal(first.tokens, right.tokens)
        np.testing.assert_array_equal(first.weights["nll"], right.weights["nll"])
        assert plain.state() == cached.state()
    plain.close()
    cached.close()


def test_only_the_same_content_is_found(tokenizer, tmp_path):
    folder, entries = tmp_path / "cache", set()
    second = load_tokenizer("builtin")
    second.chat_template = second.chat_template + " "
    base = make_data(tmp_path)
    [dataset] = base.datasets
    changed = [dataset.model_copy(update=u) for u in ({"train_on": "all"}, {"as_chat": True})]
    variants = [
        (base, tokenizer),
        (base, second),
        (base.model_copy(update={"sequence_len": 31}), tokenizer),
        (base.model_copy(update={"too_long": "truncate"}), tokenizer),
        *((base.model_copy(update={"datasets": [entry]}), tokenizer) for entry in changed),
    ]
    for data, reader in variants:
        entries.add(keep(Sequences(data, reader), data, reader, folder).rows.entry)
    entries.add(keep(Sequences(base, tokenizer, trees=True), base, tokenizer, folder).rows.entry)
    make_data(tmp_path, ["one", "1" * 99, "twO", None])
    entries.add(keep(Sequences(base, tokenizer), base, tokenizer, folder).rows.entry)
    assert len(entries) == len(variants) + 2


def test_somebody_elses_code_is_not_cached(tokenizer, tmp_path):
    class Own(Sequences):
        pass

    data = make_data(tmp_path)
    assert not hasattr(keep(Own(data, tokenizer), data, tokenizer, tmp_path / "c").rows, "entry")
    stream = MixturePart("x", iter([{}]), lambda row, origin: [])
    options = {"row_tokens": 8, "num_workers": 0, "log": print}
    assert cache_part(stream, "", tokenizer, tmp_path, **options) is stream


@pytest.mark.parametrize("name", [*cache.FILES, cache.DONE])
def test_a_damaged_entry_is_made_anew(tokenizer, tmp_path, name):
    data = make_data(tmp_path)
    recipe = Sequences(data, tokenizer)
    entry = keep(recipe, data, tokenizer, tmp_path / "cache").rows.entry
    (entry / name).write_bytes((entry / name).read_bytes()[:-1] or b"1")
    assert not is_whole(entry)
    cached = keep(recipe, data, tokenizer, tmp_path / "cache")
    assert is_whole(entry)
    assert_same(recipe.open(data.datasets[0]), cached, 32)


def test_two_at_once_and_a_kill_leave_one_whole_entry(tokenizer, tmp_path):
    data, folder = make_data(tmp_path, ["one"] * 200), tmp_path / "cache"
    remaining = folder / ("0" * 64 + ".1-2.unfinished")
    remaining.mkdir(parents=True)
    (remaining / "tokens.bin").write_bytes(b"1")
    old = time.time() - 3 * 86400
    import os

    os.utime(remaining, (old, old))
    actual = []
    work = lambda: actual.append(keep(Sequences(data, tokenizer), data, tokenizer, folder))  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(actual) == 3 and [path.name for path in folder.iterdir()] == [
        actual[0].rows.entry.name
    ]


def test_a_disk_that_refuses_costs_the_cache_alone(tokenizer, tmp_path):
    data, output = make_data(tmp_path), []
    (tmp_path / "file").touch()
    part = keep(Sequences(data, tokenizer), data, tokenizer, tmp_path / "file" / "x", output)
    assert (
        "are not kept in" in output[0] and len(part.rows) == 4 and not hasattr(part.rows, "entry")
    )


def test_progress_is_told(monkeypatch):
    output, clock = [], iter(range(0, 1000, 4))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for _ in Progress("tokenizing x", 10, output.append).each(range(10)):
        pass
    assert output[0] == "tokenizing x: 3 of 10 rows (30%), 0 rows/s, 28 s left" and len(output) == 3


@pytest.mark.parametrize(
    "path", ["data/chat/template.py", "huggingface/chat_template.py", "methods/trees/turns.py"]
)
def test_key_follows_all_code_that_makes_tokens(path, tmp_path):
    source = Path(cache.__file__).parents[2]
    for folder in cache.TOKENIZING_CODE:
        shutil.copytree(source / folder, tmp_path / folder)
    assert cache.digest_code(tmp_path) == cache.digest_code()
    with (tmp_path / path).open("a") as file:
        file.write("# changed")
    assert cache.digest_code(tmp_path) != cache.digest_code()
