"""docs/scale.md: its tables are those of code and committed results, and its errors small."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "make_scale_tables.py"
    spec = importlib.util.spec_from_file_location("make_scale_tables", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_the_page_and_what_was_measured(script):
    rows = list(script.measured())
    assert len(rows) >= 18 and {row["devices"] for row, _ in rows} == {1, 2, 4}
    time = [abs(actual.seconds / row["step_s"] - 1) for row, actual in rows]
    memory = [abs(actual.memory / row["plan_gib"] - 1) for row, actual in rows]
    assert np.median(time) < 0.06 and max(time) < 0.16
    assert np.median(memory) < 0.04 and max(memory) < 0.13
    page = (ROOT / "docs" / "scale.md").read_text()
    assert script.render(page) == page, "run scripts/make_scale_tables.py"
