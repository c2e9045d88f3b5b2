"""Tuned configs: argument, table, heuristic; what the tables in version control hold."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from jaxtrain_kernels import autotune
from jaxtrain_kernels.tree_attention import gpu_dkv, gpu_dq, gpu_fused, gpu_fwd


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64
    stages: int = 2


@pytest.fixture
def tables(monkeypatch, tmp_path):
    monkeypatch.setattr(autotune, "TABLES", tmp_path)
    monkeypatch.setattr(autotune, "device_kind", lambda: "NVIDIA H200")
    autotune.table.cache_clear()
    yield tmp_path
    autotune.table.cache_clear()


def test_no_table_leaves_the_heuristic(tables):
    assert autotune.tuned("op", Config(), width=128) == Config()


def test_the_entry_of_the_key_goes_over_the_heuristic(tables):
    entries = [
        {"key": {"width": 64}, "config": {"block": 32}},
        {"key": {"width": 128}, "config": {"stages": 3}},
    ]
    autotune.save("op", "NVIDIA H200", "a test", entries)
    assert autotune.tuned("op", Config(), width=128) == Config(stages=3)
    assert autotune.tuned("op", Config(), width=256) == Config()
    assert autotune.tuned("op", Config(), width=128, window=True) == Config()


def test_the_closest_size_by_ratio(tables):
    entries = [
        {"key": {}, "near": {"tokens": 1024}, "config": {"block": 1}},
        {"key": {}, "near": {"tokens": 8192}, "config": {"block": 2}},
    ]
    autotune.save("op", "NVIDIA H200", "a test", entries)
    for tokens, block in ((100, 1), (2800, 1), (3000, 2), (10**6, 2)):
        assert autotune.tuned("op", Config(), near={"tokens": tokens}).block == block


def test_saving_replaces_the_same_key_and_keeps_the_rest(tables):
    item = {"key": {"width": 64}, "near": {"tokens": 8}, "config": {"block": 1}, "ms": 2.0}
    two = {"key": {"width": 64}, "near": {"tokens": 9}, "config": {"block": 2}, "ms": 2.0}
    better = item | {"config": {"block": 3}, "ms": 1.0}
    autotune.save("op", "NVIDIA H200", "a test", [item, two])
    path = autotune.save("op", "NVIDIA H200", "another", [better])
    assert json.loads(path.read_text()) == {"source": "another", "entries": [better, two]}


def test_the_heuristic_is_kept_only_where_it_bounds_another_config(tables):
    plain = {"key": {"width": 64}, "near": {"tokens": 8}, "config": {}, "ms": 2.0}
    second = {"key": {"width": 64}, "near": {"tokens": 9}, "config": {"block": 2}, "ms": 2.0}
    assert not autotune.save("op", "NVIDIA H200", "a test", [plain]).exists()
    path = autotune.save("op", "NVIDIA H200", "a test", [plain, second])
    assert json.loads(path.read_text())["entries"] == [plain, second]
    assert autotune.tuned("op", Config(), near={"tokens": 8}, width=64) == Config()
    path = autotune.save("op", "NVIDIA H200", "a test", [second | {"config": {}}])
    assert not path.exists() and autotune.tuned("op", Config(), width=64) == Config()


CONFIGS = {
    "tree_attention_fwd": (gpu_fwd.Config, gpu_fwd.heuristic),
    "tree_attention_dkv": (gpu_dkv.Config, gpu_dkv.heuristic),
    "tree_attention_dq": (gpu_dq.Config, gpu_dq.heuristic),
    "tree_attention_fused": (gpu_fused.Config, gpu_fused.heuristic),
}


def test_tables_of_attention_hold_what_differs_from_the_heuristic():
    actual = [p for p in autotune.TABLES.glob("*/*.json") if p.stem in CONFIGS]
    assert actual, "no tuned table is in the package"
    for path in actual:
        config, heuristic = CONFIGS[path.stem]
        entries = json.loads(path.read_text())["entries"]
        for entry in entries:
            dataclasses.replace(config(), **entry["config"])
            assert entry["key"].keys() == {"head_dim", "window"}, path
            start = heuristic(entry["key"]["head_dim"])
            for field, value in entry["config"].items():
                assert getattr(start, field) != value, f"{path}: {entry}"
        assert any(entry["config"] for entry in entries), path


@pytest.fixture
def sweep(monkeypatch):
    """benchmarks/sweep.py with times by formula instead of by a GPU; scripts are no package."""
    folder = Path(__file__).parents[2] / "benchmarks"
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        spec = importlib.util.spec_from_file_location("sweep", folder / "sweep.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    for name in set(sys.modules) - before:
        if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


class NoInputs:
    """A sweep's inputs of which a kernel's are only the config that it would be compiled for."""

    def __init__(self, case):
        pass

    def arrays(self, kernel, config):
        return (config,)


def test_a_sweep_saves_its_winners(tables, sweep, monkeypatch, capsys):
    def milliseconds(run, config, budget_s):
        if isinstance(config, gpu_fwd.Config):
            return {"ms": 1.0 if config.k_block == 256 else 2.0}
        if isinstance(config, gpu_dkv.Config):
            return {"ms": 1.995 if config.q_stages == 4 else 2.0}  # too little to be told apart
        if config.k_block == 128:
            raise NotImplementedError("too large")
        return {"ms": 1.5 if config.in_registers else 2.0}

    monkeypatch.setattr(sweep, "HopperInputs", NoInputs)
    monkeypatch.setattr(sweep, "jax_ms", milliseconds)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--case", "32k_h16_8_d64", "--save"])
    sweep.main()
    key = {"near": {"tokens": 32768}, "head_dim": 64, "window": False}
    start = gpu_fwd.heuristic(64)
    actual = autotune.tuned("tree_attention_fwd", start, **key)
    assert actual == dataclasses.replace(start, k_block=256)
    start = gpu_dq.heuristic(64)
    actual = autotune.tuned("tree_attention_dq", start, **key)
    assert actual == dataclasses.replace(start, in_registers=True)
    assert sorted(p.stem for p in tables.glob("*/*.json")) == [
        "tree_attention_dq",
        "tree_attention_fwd",
    ]
    (entry,) = autotune.table("tree_attention_fwd", "NVIDIA H200")
    assert entry["ms"] == 1.0 and "failed=too large" in capsys.readouterr().out
