"""builtin:digits: pictures of scikit-learn's digits, with a stand-in of the same form for it."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.images.decode import decode
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError

TARGETS = np.arange(1797) % 10
IMAGES = np.random.default_rng(0).integers(0, 17, (1797, 8, 8)).astype(np.float64)


@pytest.fixture
def stand_in(monkeypatch):
    package, datasets = ModuleType("sklearn"), ModuleType("sklearn.datasets")
    datasets.load_digits = lambda: SimpleNamespace(images=IMAGES, target=TARGETS)
    monkeypatch.setitem(sys.modules, "sklearn", package)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)


def open_digits(split="train", **options):
    return open_rows(DatasetConfig(path="builtin:digits", split=split, options=options))


def test_a_row_shows_the_ink_of_its_digit(stand_in):
    for split, first, count in (("train", 0, 1500), ("test", 1500, 297)):
        rows = open_digits(split, size=24)
        assert len(rows) == count == len([*rows])
        for index in (0, 7, count - 1):
            user, assistant = rows[index]["messages"]
            picture, text = user["content"]
            assert text["text"] == "Which digit is this?"
            assert assistant["content"] == rows[index]["answer"] == str(TARGETS[first + index])
            pixels = np.asarray(decode(picture["image"]["bytes"]), int)
            ink = np.kron(IMAGES[first + index], np.ones((3, 3)))
            gray = 255 - np.rint(ink * 255 / 16)
            np.testing.assert_array_equal(pixels, np.stack([gray] * 3, -1))
    assert len(open_digits("test", num_rows=5)) == 5


@pytest.mark.parametrize(
    ("split", "options", "message"),
    [
        ("other", {}, "has no split 'other'"),
        ("train", {"size": 20}, "size is 20, not a multiple of 8"),
        ("test", {"num_rows": 298}, "num_rows is 298; split test has 1 to 297"),
        ("test", {"seed": 1}, "builtin:digits has no option 'seed'"),
    ],
)
def test_options_that_are_not_read_are_named(split, options, message):
    with pytest.raises(UserError, match=message):
        open_digits(split, **options)


def test_it_is_named_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"jaxtrain\[digits\]"):
        len(open_digits())


def test_they_are_the_digits_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason='pip install "jaxtrain[digits]"')
    targets = datasets.load_digits().target
    answers = [row["answer"] for split in ("train", "test") for row in open_digits(split)]
    assert answers == [str(target) for target in targets]
