"""Reference log-probs on disk: a damaged table, and one of other weights, are refused by name."""

import json
import shutil

import numpy as np
import pytest

from jaxtrain.data.sources.cache import DONE
from jaxtrain.errors import UserError
from jaxtrain.methods.preference.logp_table import (
    ABOUT,
    TABLE,
    Arrays,
    LogpTable,
    read_table,
    write_table,
)
from jaxtrain.runs.manifest import NAME

ABOUT_IT = {"weights": "a" * 64, "model": "b" * 64}


def make_arrays(seed: int = 0, **changes) -> Arrays:
    draw = np.random.default_rng(seed)
    counts = np.array([3, 1, 4], np.int64)
    values = -draw.random(8).astype(np.float32)
    arrays = Arrays(draw.integers(0, 256, (3, 16)).astype(np.uint8), counts, values)
    return arrays._replace(**changes)


@pytest.fixture
def folder(tmp_path):
    write_table(LogpTable(make_arrays()), tmp_path / "key", {**ABOUT_IT, "datasets": ["c"]})
    return tmp_path / "key"


def refuse(folder, message):
    with pytest.raises(UserError, match=message) as error:
        read_table(folder, ABOUT_IT)
    assert str(folder) in str(error.value) and "Delete that folder" in str(error.value)


def test_a_table_comes_back_as_it_was(folder):
    arrays = read_table(folder, ABOUT_IT)
    assert arrays is not None
    for actual, expected in zip(arrays, make_arrays(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    (folder / DONE).unlink()
    assert read_table(folder, ABOUT_IT) is None  # writing it was interrupted


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_table_that_was_cut_is_refused(folder, size):
    content = (folder / TABLE).read_bytes()
    (folder / TABLE).write_bytes(content[:size])
    refuse(folder, r"table.npz has .* bytes instead of")
    (folder / NAME).unlink()  # as early versions wrote it
    refuse(folder, r"table.npz is not readable \(")


def test_the_numbers_of_other_answers_are_refused(folder, tmp_path):
    write_table(LogpTable(make_arrays(1)), tmp_path / "other", {**ABOUT_IT, "weights": "d" * 64})
    shutil.copy(tmp_path / "other" / TABLE, folder / TABLE)
    refuse(folder, "the content of table.npz has changed")
    shutil.rmtree(folder)
    (tmp_path / "other").rename(folder)
    refuse(folder, "they are of other weights")
    about = json.loads((folder / ABOUT).read_text())
    (folder / ABOUT).write_text(json.dumps({**about, **ABOUT_IT}))
    refuse(folder, "about.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": np.full(8, np.nan, np.float32)}, "8 of 8 log-probs are NaN or infinite"),
        ({"values": np.zeros(7, np.float32)}, "do not belong together"),
        ({"values": np.zeros(8, np.int32)}, "do not belong together"),
        ({"counts": np.array([3, 0, 5], np.int64)}, "do not belong together"),
        ({"counts": np.array([8], np.int64)}, "do not belong together"),
        ({"keys": np.zeros((3, 8), np.uint8)}, "do not belong together"),
    ],
)
def test_arrays_that_are_no_table_are_refused(folder, changes, message):
    """Whatever wrote them, and with checksums that agree."""
    np.savez(folder / TABLE, **make_arrays(**changes)._asdict())
    (folder / NAME).unlink()
    refuse(folder, message)
