"""A few rows of the table of verbs and configs: tests/cli/verb_table.py makes all of it."""

import pytest

from tests.cli.verb_table import fill_row, make_world

REFUSED = {
    "lora_qwen3": {"eval", "score"},
    "rl_draft_refresh": {"merge", "score"},
}
"""Verbs that these runs are nothing for."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_every_verb_works_or_is_refused(world, name):
    row = fill_row(name, world)
    assert not [cell for cell in row.items() if cell[1].startswith("WRONG")]
    refused = {verb: cell for verb, cell in row.items() if cell != "ok"}
    assert refused.keys() == REFUSED[name], refused
