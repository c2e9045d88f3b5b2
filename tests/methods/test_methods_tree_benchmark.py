"""The benchmark of trees against flat samples runs at its small size, and measures what it says."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "tree_vs_flat.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("tree_vs_flat", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(PATH.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PATH.parent))
    yield module
    del sys.modules[spec.name]


def test_the_full_work_is_the_agent_tree_of_the_recorded_peers(benchmark):
    """7,889 packed tokens, 20 leaves, 70,761 branch tokens: what PyTorch was measured on."""
    size = benchmark.SIZES["full"]
    tree, samples = benchmark.make_trajectory(size, 1000)
    assert tree.num_tokens == 7889 and tree.num_branches == len(samples) == 20
    assert sum(tree.branch_lengths()) == 70761
    assert max(tree.branch_lengths()) <= size.buckets[-1]
    works = [benchmark.make_work(mode, tree, samples, size) for mode in benchmark.MODES]
    assert [work.units for work in works] == [20] * 4
    # The same weight on every token in the three modes of one objective, but for a factor of K.
    totals = [sum(b.weights["nll"].sum() for b in work.batches) for work in works]
    np.testing.assert_allclose(totals[1] / 20, totals[0], rtol=1e-5)
    np.testing.assert_allclose(totals[2], totals[0], rtol=1e-5)
    # A flat sample ends in the turn's answer: every thought and every answer trains once.
    mask = np.concatenate([node.weights["nll"] for node in tree.nodes]) > 0
    assert totals[3] == mask.sum()


@pytest.mark.thorough
def test_the_small_size_runs_and_writes_table_json_and_plot(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "WARM_UP", 1)
    monkeypatch.setattr(benchmark, "TIMED", 3)
    out = tmp_path / "result"
    benchmark.main(["--size", "tiny", "--out", str(out)])
    report = json.loads(out.with_suffix(".json").read_text())
    rows = {row["mode"]: row for row in report["rows"]}
    assert tuple(rows) == benchmark.MODES and report["torch"] is None
    # float32 sums of about a hundred token losses in another order.
    for mode in ("per_branch", "grouped"):
        np.testing.assert_allclose(rows[mode]["loss"], rows["tree"]["loss"], rtol=1e-5)
    assert abs(rows["current_rl"]["loss"] - rows["tree"]["loss"]) > 1e-3
    for row in rows.values():
        assert row["step_s"] > 0 and row["peak_gib"] > 0
        assert row["slots"] >= report["packed_tokens"]
    assert rows["tree"]["slots"] < rows["grouped"]["slots"]
    assert "per_branch" in out.with_suffix(".txt").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
