"""builtin:shapes: the pictures are what the answers say, and the same everywhere."""

import base64
import hashlib
import re
from collections import Counter

import numpy as np
import pytest
from smolvlm_text import open_tokenizer

from jaxtrain.cli.preview_page import PageConsole
from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.images.decode import decode
from jaxtrain.data.preview import print_pairs
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.shapes import COLORS, SIDE
from jaxtrain.errors import UserError
from jaxtrain.main import main


def open_shapes(split="train", **options):
    return open_rows(DatasetConfig(path="builtin:shapes", split=split, options=options))


def pixels_of(row):
    return np.asarray(decode(row["messages"][0]["content"][0]["image"]["bytes"]))


def look(pixels):
    """(color, shape) of each place by single pixels: a disc has no corners, a triangle has only
    those at the bottom."""
    cell = len(pixels) // SIDE
    colors = {color: name for name, color in COLORS.items()}
    low, high = round(0.5 * cell - 0.4 * cell), round(0.5 * cell + 0.4 * cell) - 1
    seen = {}
    for row in range(SIDE):
        for col in range(SIDE):
            place = pixels[row * cell : (row + 1) * cell, col * cell : (col + 1) * cell]
            if (color := colors.get(tuple(place[cell // 2, cell // 2].tolist()))) is None:
                continue
            top, bottom = (tuple(place[y, low].tolist()) in colors for y in (low, high))
            seen[row, col] = color, "square" if top else "triangle" if bottom else "disc"
    return seen


def test_answers_are_what_the_picture_shows():
    asked = Counter()
    for row in open_shapes(num_rows=300):
        words = row["messages"][0]["content"][1]["text"].rstrip("?").split()
        seen, answer = look(pixels_of(row)), row["answer"]
        if row["question"] == "count":
            target = words[2], words[3].removesuffix("s")
            assert answer == str(sum(shown == target for shown in seen.values())), row
        elif row["question"] == "color":
            assert [color for color, shape in seen.values() if shape == words[-1]] == [answer]
        else:
            [(y, x)] = [place for place, shown in seen.items() if shown == (words[3], words[4])]
            assert answer == f"{('top', 'bottom')[y > 1]} {('left', 'right')[x > 1]}"
        asked[row["question"], answer] += 1
    assert len({question for question, _ in asked}) == 3
    assert {answer for question, answer in asked if question == "count"} == set("01234")


def test_rows_are_the_same_everywhere_and_differ_between_splits_and_seeds():
    digest = hashlib.sha256()
    for row in open_shapes(num_rows=20):
        digest.update(pixels_of(row).tobytes() + repr(row["messages"][0]["content"][1]).encode())
    assert digest.hexdigest()[:16] == "2ac7d8a4edd2a294"
    kinds = [("train", 0), ("test", 0), ("train", 1)]
    rows = [open_shapes(split, num_rows=9, seed=seed)[3] for split, seed in kinds]
    assert len({pixels_of(row).tobytes() for row in rows}) == 3
    assert pixels_of(open_shapes(size=20, num_rows=1)[0]).shape == (20, 20, 3)


def test_rows_are_read_with_their_pictures(tmp_path):
    tokenizer = open_tokenizer(tmp_path)
    dataset = DatasetConfig(path="builtin:shapes", options={"num_rows": 3, "questions": ["count"]})
    rows = open_rows(dataset)
    [sample, *notes] = RowTokenizer(dataset, tokenizer, 400, "drop")(rows[0], rows.origin(0))
    assert sample.images.images[0].size == (48, 48)
    assert {note.reason for note in notes} <= {"column 'answer'", "column 'question'"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 8}, "size is 8, not a whole number between 16 and 1024"),
        ({"questions": ["why"]}, "it lists some of count, color, place"),
        ({"max_value": 9}, "builtin:shapes has no option 'max_value'"),
    ],
)
def test_options_that_are_not_read_are_named(options, message):
    with pytest.raises(UserError, match=message):
        open_shapes(**options)
    with pytest.raises(UserError, match="has no split 'other'"):
        open_shapes("other")


def test_preprocess_writes_a_page_with_thumbnails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the config comes with jaxtrain, and so does its template
    page = tmp_path / "page.html"
    words = ["preprocess", "--config", "vision_shapes", "--samples", "2"]
    words += ["--show", str(page), "data.datasets.0.options.num_rows=4", "data.eval_datasets=[]"]
    words += ["data.micro_batch_size=1"]
    assert (main(words) or 0) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    assert shown.count("image 1: 48x48, in the row") == 2 and shown.endswith(f"{page}\n")
    urls = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', text)
    assert len(urls) == 2 and len(text) < 20_000
    actual = np.asarray(decode(base64.b64decode(urls[0])), int)
    difference = np.abs(actual - pixels_of(open_shapes(num_rows=4)[0]))
    assert difference.mean() < 6, "a JPEG of the picture"
    assert "&lt;|im_start|&gt;user" in text and "<|im_start|>" not in text
    assert main(words) == 2 and "is there already" in capsys.readouterr().err
    assert (main([*words, "--overwrite"]) or 0) == 0


def test_a_page_has_names_of_the_data_as_text():
    console = PageConsole()
    print_pairs("title", [('not read: [link=x"><script>]y[/link]', "1")], console)
    text = console.render_page().decode()
    assert "[link=x&quot;&gt;&lt;script&gt;]y[/link]" in text and "<script>" not in text
