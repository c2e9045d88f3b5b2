"""The pages: generated ones are up to date, links lead somewhere, the front page names them."""

import re

import pytest

from jaxtrain.cli import VERBS
from jaxtrain.cli.reference import render_commands
from jaxtrain.config.root import TASKS
from tests.docs.blocks import ROOT, list_pages

DOCS = ROOT / "docs"


def test_the_command_line_is_up_to_date():
    page = (DOCS / "command_line.md").read_text()
    assert page == render_commands(), "run `make docs`"
    for name in VERBS:
        assert f"\n## {name}\n" in page
    assert "| `--draft` | DRAFT | required; folder of a draft model, or mtp |" in page


def test_the_api_reference_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from api_page import render_api

    page = (DOCS / "reference" / "api.md").read_text()
    assert page == render_api(), "run `make docs`"
    assert "Model.logprobs(texts: Sequence[Text]" in page and "\nNone\n" not in page


def test_every_method_has_a_row_in_the_supported_matrix():
    page = (DOCS / "support.md").read_text()
    for kind in TASKS:
        rows = [line for line in page.splitlines() if line.startswith(f"| `{kind}` |")]
        assert len(rows) >= 2, f"{kind}: python scripts/make_support_table.py"


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_anchors_of_pages_exist():
    recorded = {page: _anchors(page.read_text()) for page in DOCS.glob("**/*.md")}
    for page in list_pages():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            aim = (page.parent / target).resolve() if target else page
            if aim in recorded:
                assert anchor in recorded[aim], f"{page.name}: {target}#{anchor}"


def _anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub and the site create them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_front_page_names_pages_that_exist():
    named = re.findall(r"^[a-z][\w/]+$", (DOCS / "index.md").read_text(), flags=re.M)
    assert len(named) > 40 and len(set(named)) == len(named)
    assert not [name for name in named if not (DOCS / f"{name}.md").exists()]
