"""docs/metrics.md has a row for every number that the code logs."""

import ast
import re
from pathlib import Path

from tests.docs.metric_names import ROOT, is_known, list_names

ROOMS = ("core", "data", "generation", "methods")
NAME = re.compile(r"[a-z][a-z_0-9]*(/[a-z][a-z_0-9]*)+")
NO_METRICS = {
    *("vllm/sessions_asked", "vllm/sessions_at_first"),  # vllm/affinity is made of them
    *("m2/epsilon_low", "m2/epsilon_high"),  # streams of a batch
    "sampling/importance_sampling_ratio",  # the beginning of names
}
HEADS = {name.partition("/")[0] for name in list_names() if "/" in name}
"""What the names with a slash begin with."""


def logged(path: Path) -> set[str]:
    """Texts in a module that can only be names of metrics: "group/name", the group one of those."""
    actual = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {name for name in actual if NAME.fullmatch(name) and name.partition("/")[0] in HEADS}


def test_every_name_in_the_code_has_a_row():
    actual = {
        name: path.relative_to(ROOT)
        for room in ROOMS
        for path in ROOT.glob(f"jaxtrain/{room}/**/*.py")
        for name in logged(path)
    }
    assert len(actual) > 60
    missing = {name: position for name, position in actual.items() if not is_known(name)}
    assert not set(missing) - NO_METRICS, f"docs/metrics.md has no row for {missing}"


def test_names_of_rows():
    for name in ("loss", "eval/gsm8k/pass@16", "eval/1/loss", "dropped/stale", "draft/acc/3"):
        assert is_known(name), name
    for name in ("los", "eval/los", "dropped", "acc/x", "sync/second", "eval/1/reward_stdd"):
        assert not is_known(name), name
