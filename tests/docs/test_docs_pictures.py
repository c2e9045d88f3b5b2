"""Pictures of docs/images: drawn from committed results, and shown by a page."""

import re
import sys

import pytest

from tests.docs.blocks import ROOT, list_pages

IMAGES = ROOT / "docs" / "images"
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module")
def pictures():
    sys.path.insert(0, str(SCRIPTS))
    try:
        import picture_idea
        import picture_results
        from picture_style import write_svg
    finally:
        sys.path.pop(0)
    return picture_idea.PICTURES | picture_results.PICTURES, write_svg


def list_texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.slow
def test_pictures_show_the_committed_results(pictures, tmp_path):
    """Their words and numbers are those that the script draws now."""
    drawings, write_svg = pictures
    assert {path.stem for path in IMAGES.glob("*.svg")} >= set(drawings)
    for name, draw in drawings.items():
        write_svg(draw(), tmp_path / f"{name}.svg")
        drawn = list_texts((tmp_path / f"{name}.svg").read_text())
        stored = list_texts((IMAGES / f"{name}.svg").read_text())
        assert drawn and drawn == stored, f"python scripts/draw_pictures.py {name}"


def test_every_picture_is_on_a_page():
    shown = {
        match
        for page in list_pages()
        for match in re.findall(r"!\[[^\]]+\]\((?:\S*/)?images/([\w.]+)\)", page.read_text())
    }
    assert shown == {path.name for path in IMAGES.iterdir()}
    assert len(shown) >= 15
