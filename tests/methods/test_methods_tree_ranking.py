"""Datasets ranked by what trees save, runs compared, and the guard of the speed against a peer."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import DataConfig
from jaxtrain.data.pipeline import open_source
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.data import Trees
from jaxtrain.methods.trees.ranking import measure_top, show_ranking
from jaxtrain.runs.console import SafeConsole

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import compare_runs
import speed_guard


def dataset(turns, seed=0):
    options = {"vocab_size": 90, "num_rows": 12, "num_turns": turns, "seed": seed}
    return {"path": "builtin:caterpillar", "name": f"turns{turns}", "options": options}


def test_datasets_are_ranked_by_the_pairs_that_trees_save(capsys):
    data = DataConfig(sequence_len=512, datasets=[dataset(1), dataset(6), dataset(3)])
    recipe = Trees(TreeTask(), data, None)
    found = {d.name: measure_top(d, recipe, 4) for d in data.datasets}
    for one, (trees, sizes) in zip(data.datasets, found.values(), strict=True):
        assert trees == 12 and len(sizes) == 4
        # By the definition: pairs of all branches apart over the sum of position + 1.
        ratios = []
        for index in range(12):
            (tree,) = recipe.open(one).tokenize(recipe.open(one).rows[index], "")
            apart = sum(n * (n + 1) / 2 for n in tree.branch_lengths())
            starts = zip(tree.nodes, tree.depths, strict=True)
            shared = sum(depth + i + 1 for node, depth in starts for i in range(len(node.tokens)))
            ratios.append(apart / shared)
        best = sorted(ratios, reverse=True)[:4]
        np.testing.assert_allclose([size.pair_ratio for size in sizes], best)
    show_ranking(data.datasets, recipe, 4, SafeConsole(width=160))
    shown = capsys.readouterr().out
    places = [shown.index(f"turns{turns}") for turns in (6, 3, 1)]
    assert places == sorted(places) and "7.0 / 7" in shown
    flat = Trees(TreeTask(mode="per_branch"), data, None)
    with pytest.raises(UserError, match='set task.kind and task.mode to "tree"'):
        show_ranking(data.datasets, flat, 4, SafeConsole())


def test_a_step_has_the_same_trees_on_every_mesh():
    """Rows of a microstep follow the devices; the trees of a step do not."""
    data = DataConfig(sequence_len=512, packing=True, datasets=[dataset(3)])
    steps = []
    for rows in (1, 2, 8):
        source = open_source(
            data, Trees(TreeTask(units_per_step=3), data, None),
            seed=0, rows_per_microstep=rows, microsteps=1,
        )  # fmt: skip
        batches = [next(source)[0] for _ in range(5)]
        source.close()
        assert all(batch.tokens.shape[1] == rows for batch in batches)
        trained = [(batch.tokens.ravel(), batch.weights["nll"].ravel()) for batch in batches]
        steps.append([sorted(zip(*map(np.ndarray.tolist, p), strict=True)) for p in trained])
    for other in steps[1:]:
        for first, second in zip(steps[0], other, strict=True):
            assert [p for p in first if p[1]] == [p for p in second if p[1]]


def rows(ours, theirs, **setting):
    keys = {"model": "m", "work": "tree8k", "param_dtype": "float32", "dtype": "bfloat16"}
    keys |= {"lora": 0, "rows": 1, **setting}
    sides = [("jaxtrain", ours), ("jaxtrain", 2 * ours), ("PyTorch", theirs)]
    return [{**keys, "by": by, "step_s": seconds} for by, seconds in sides]


def test_the_speed_guard_fails_where_a_tenth_of_the_ratio_is_lost(tmp_path, capsys):
    assert min(speed_guard.read_file(speed_guard.STORED).values()) > 1
    assert speed_guard.main([str(speed_guard.STORED)]) == 0
    stored, now = tmp_path / "stored.json", tmp_path / "now.json"
    reports = [{"rows": rows(0.1, 0.14) + rows(0.2, 0.2, work="docs8k")}, {"rows": rows(0.1, 0.15)}]
    stored.write_text(json.dumps(reports))
    # Another card, half as fast for both: the same ratio.
    for ours, status in ((0.2, 0), (0.2 * 1.11, 0), (0.2 * 1.12, 1)):
        now.write_text(json.dumps({"rows": rows(ours, 0.3)}))
        assert speed_guard.main([str(now), "--stored", str(stored)]) == status
    assert "SLOWER 1.34x the peer's speed, stored 1.50x (-10.7%)" in capsys.readouterr().out
    now.write_text(json.dumps({"rows": rows(0.1, 0.2, work="other")}))
    assert speed_guard.main([str(now), "--stored", str(stored)]) == 1
    assert "share no setting" in capsys.readouterr().out
    with pytest.raises(ValueError, match="a row has no model"):
        speed_guard.read_ratios([{"rows": [{"by": "jaxtrain"}]}])


def test_drift_is_that_of_the_tensor_furthest_apart():
    first = {
        "params/a": np.array([1.0, -4.0]),
        "params/b": np.array([2.0]),
        "opt_state/0/mu/a": np.array([1.0]),
        "opt_state/0/count": np.array(3),
    }
    second = {**first, "params/a": np.array([1.0, -4.4]), "params/b": np.array([2.02])}
    drift = compare_runs.measure_drift(first, second)
    assert drift["params"].tensor == "params/a" and drift["mu"].largest == 0
    np.testing.assert_allclose(drift["params"].largest, 0.1)
    np.testing.assert_allclose(drift["params"].rms, np.sqrt((0.16 + 0.0004) / 21))
    with pytest.raises(ValueError, match="only one has params/b"):
        compare_runs.measure_drift(first, {k: v for k, v in second.items() if k != "params/b"})
