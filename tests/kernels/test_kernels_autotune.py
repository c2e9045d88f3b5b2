"""Tuned configs: argument, table, heuristic; what the tables in version control hold."""

import dataclasses
import json

import pytest
from jaxtrain_kernels import autotune
from jaxtrain_kernels.tree_attention import gpu_bwd, gpu_fwd


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
    one = {"key": {"width": 64}, "near": {"tokens": 8}, "config": {"block": 1}, "ms": 2.0}
    two = {"key": {"width": 64}, "near": {"tokens": 9}, "config": {"block": 2}, "ms": 2.0}
    better = one | {"config": {"block": 3}, "ms": 1.0}
    autotune.save("op", "NVIDIA H200", "a test", [one, two])
    path = autotune.save("op", "NVIDIA H200", "another", [better])
    assert json.loads(path.read_text()) == {"source": "another", "entries": [better, two]}


CONFIGS = {
    "tree_attention_fwd": gpu_fwd.Config,
    "tree_attention_dkv": gpu_bwd.DkvConfig,
    "tree_attention_dq": gpu_bwd.DqConfig,
}


def test_tables_of_attention_hold_fields_that_exist():
    found = [p for p in autotune.TABLES.glob("*/*.json") if p.stem in CONFIGS]
    assert found, "no tuned table is in the package"
    for path in found:
        for entry in json.loads(path.read_text())["entries"]:
            dataclasses.replace(CONFIGS[path.stem](), **entry["config"])
            assert entry["key"].keys() == {"head_dim", "window"}, path
