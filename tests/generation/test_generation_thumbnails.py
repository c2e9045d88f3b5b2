"""Thumbnails of samples: small copies in samples.jsonl and the report, names in the dashboard."""

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from jaxtrain.data.images import decode
from jaxtrain.data.images.decode import THUMBNAIL, make_thumbnail
from jaxtrain.data.images.placing import describe_part
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.generation.episode_metrics import (
    DRAWN,
    MAX_DRAWN,
    MAX_THUMBNAILS,
    describe_sample,
    draw_thumbnail,
)
from jaxtrain.generation.episodes import Episode
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.samples import draw_conversation
from jaxtrain.runs.report import collect as report
from jaxtrain.runs.report.page import render
from jaxtrain.runs.samples import write_line

sys.path.append(str(Path(__file__).parents[1] / "runs"))
from folders import write_run


@pytest.fixture(autouse=True)
def forget():
    """Pictures of these tests have the same keys."""
    DRAWN.clear()


def write_picture(path: Path, size: tuple[int, int], color: str) -> Path:
    Pillow.new("RGB", size, color).save(path)
    return path


def make_episode(sources: list[Path | bytes]) -> Episode:
    """Return an answer to a prompt with these pictures, of 10 x 10 pixels as far as it knows."""
    images = tuple(Image(f"{n:064x}", (10, 10), 1, 1, source) for n, source in enumerate(sources))
    slot = np.arange(len(images), dtype=np.int32)
    parts = [{"type": "image", **describe_part(image)} for image in images]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    return make_text_episode(prompt=prompt, images=PlacedImages(images, slot))


def make_text_episode(**fields) -> Episode:
    return Episode([0], [True], [0.0], [0], "stop", completion="red", **fields)


def read(url: str) -> Pillow.Image:
    head, _, content = url.partition(",")
    assert head == "data:image/jpeg;base64"
    return Pillow.open(io.BytesIO(base64.b64decode(content)))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_thumbnail_is_small(suffix, tmp_path):
    path = write_picture(tmp_path / f"a.{suffix}", (3000, 1500), "red")
    picture = read(make_thumbnail(path))
    assert picture.size == (THUMBNAIL, THUMBNAIL // 2) and picture.format == "JPEG"
    assert np.abs(np.asarray(picture, int) - [255, 0, 0]).max() <= 3
    noise = np.random.default_rng(0).integers(0, 256, (640, 640, 3), np.uint8)
    Pillow.fromarray(noise).save(tmp_path / "noise.png")
    assert len(make_thumbnail(tmp_path / "noise.png")) < 20_000, "the page refuses larger ones"
    small = write_picture(tmp_path / f"small.{suffix}", (20, 10), "blue")
    assert read(make_thumbnail(small.read_bytes())).size == (20, 10)


def test_lines_hold_the_first_pictures_that_can_be_read(tmp_path):
    path = write_picture(tmp_path / "a.png", (20, 10), "red")
    inline = write_picture(tmp_path / "b.png", (10, 20), "blue").read_bytes()
    line = describe_sample(
        make_episode([path, inline, tmp_path / "gone.png", b"no image"]), 1.0, {}
    )
    assert [read(url).size for url in line["thumbnails"].values()] == [(20, 10), (10, 20)]
    assert [int(key, 16) for key in line["thumbnails"]] == [0, 1]
    DRAWN.clear()
    many = describe_sample(make_episode([path] * 20), 1.0, {})
    assert len(many["thumbnails"]) == MAX_THUMBNAILS
    assert "thumbnails" not in describe_sample(make_text_episode(prompt="Which?"), 1.0, {})


def test_a_thumbnail_is_drawn_once_for_all_answers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(decode, "make_thumbnail", lambda source: drawn.append(source) or "url")
    path = write_picture(tmp_path / "a.png", (20, 10), "red")
    lines = [describe_sample(make_episode([path]), 1.0, {}) for _ in range(4)]
    assert all(list(line["thumbnails"].values()) == ["url"] for line in lines)
    assert drawn == [path]
    for number in range(1, MAX_DRAWN + 1):
        draw_thumbnail(Image(f"{number:064x}", (10, 10), 1, 1, b""))
    assert len(DRAWN) == MAX_DRAWN and f"{0:064x}" not in DRAWN


def test_the_report_shows_pictures_and_the_dashboard_their_names(tmp_path, monkeypatch):
    path = write_picture(tmp_path / "a.png", (20, 10), "red")
    line = describe_sample(make_episode([path, path]), 1.0, {})
    hostile = {f"{n:064x}": url for n, url in enumerate(["javascript:alert(1)", "x" * 10**6], 2)}
    folder = write_run(tmp_path / "run")
    (folder / "samples.jsonl").write_text(
        write_line({"step": 1, **line, "thumbnails": line["thumbnails"] | hostile}) + "\n"
    )
    run = WatchedRun(folder)
    run.read()
    data = report.collect([run])
    [shown] = data["runs"][0]["samples"][0]["samples"]
    [(role, text, _, keys)] = shown["prompt"]
    assert (role, keys) == ("user", [f"{n:064x}" for n in range(2)])
    assert text == f"[image 10x10 {path}]\n[image 10x10 {path}]\nWhich?"
    assert data["runs"][0]["thumbnails"] == line["thumbnails"]
    assert not any("thumbnails" in name for name, _ in shown["facts"])
    page = render(data)
    assert len(page) < 200_000 and all(
        json.dumps(url) in page for url in line["thumbnails"].values()
    )
    assert "javascript:alert" not in page
    monkeypatch.setattr(report, "MAX_THUMBNAILS", 1)
    assert len(report.collect([run])["runs"][0]["thumbnails"]) == 1
    conversation = draw_conversation(run.samples[0], False).plain
    assert f"[image 10x10 {path}]" in conversation and "base64" not in conversation
