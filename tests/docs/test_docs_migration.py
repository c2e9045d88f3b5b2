"""The pages for who comes from elsewhere are those of the converter's tables."""

import sys
from pathlib import Path

import pytest

from jaxtrain.convert import SYSTEMS

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from migration_pages import render_migration, walk

DOCS = Path(__file__).parents[2] / "docs"
PAGES = render_migration()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name):
    text = (DOCS / name).read_text()
    assert text == PAGES[name], "run python scripts/make_reference.py"


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_page_has_every_key_of_its_table(system):
    text = PAGES[f"from_{system.replace('-', '_')}.md"]
    keys = [key for key, _ in walk(SYSTEMS[system].RULES)]
    assert len(keys) > 50
    for key in keys:
        assert f"| `{key}` |" in text
