"""docs/notebooks: the notebooks are those of the Markdown, and their cells run."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGES = sorted((ROOT / "docs" / "notebooks").glob("*.md"))


def test_notebooks_are_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from make_notebooks import render

    assert len(PAGES) == 6
    for page in PAGES:
        text = render(page)
        assert page.with_suffix(".ipynb").read_text() == text, "run make notebooks"
        code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        # The first cell installs where nothing is installed; the second is the doctor.
        assert 'SOURCE = ""' in "".join(code[0]["source"]) and "tags" not in code[0]["metadata"]
        assert "".join(code[1]["source"]) == "!jaxtrain doctor"
        assert "ot run on Colab" in page.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_notebooks_show_what_their_cells_print(page):
    """Outputs are stored, and name no folder of the machine that ran them."""
    text = page.with_suffix(".ipynb").read_text()
    assert not re.search(r"/(?:tmp|home|root|work|Users)/", text)
    assert not re.search(r'"output_type": "error"', text)
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    trained = [cell for cell in code if "".join(cell["source"]).startswith("!jaxtrain --config")]
    for cell in trained:
        if "skip-execution" not in cell["metadata"].get("tags", []):
            printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
            assert "step " in printed, "run python scripts/make_notebooks.py --execute"


IN_THE_KERNEL = """
import os, shlex
from jaxtrain.main import main

def run_here(command):
    words = shlex.split(get_ipython().var_expand(command, depth=1))
    assert words[0] == "jaxtrain", command
    assert main(words[1:]) == 0, command

get_ipython().system = run_here
"""
"""Commands are calls: the notebooks then import jax once."""


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs notebooks, one after the other in one kernel, as tests have them; returns the cells."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("JAXTRAIN_NOTEBOOK", "ci")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests/plain'}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    flags = os.environ["XLA_FLAGS"].split()
    monkeypatch.setenv("XLA_FLAGS", " ".join(f for f in flags if "device_count" not in f))

    def run(names, left_out, first):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(first)])
        for name in names:
            (tmp_path / name).mkdir()
            enter = f"import os; os.chdir({str(tmp_path / name)!r})"
            page = nbformat.read(ROOT / f"docs/notebooks/{name}.ipynb", as_version=4)
            notebook.cells += [nbformat.v4.new_code_cell(enter), *page.cells]
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        cells = [cell for cell in cells if not cell.source.startswith(left_out)]
        notebook.cells = cells
        try:
            NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
        except CellExecutionError as error:
            output = [said_by(cell)[-3000:] for cell in cells]
            pytest.fail("\n".join([*output, str(error)[-3000:]]))
        return cells

    return run


def said_by(cell) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


@pytest.mark.slow
def test_the_notebooks_run(execute):
    """Commands that an earlier page runs as well are skipped."""
    left_out = ("!jaxtrain doctor", "!jaxtrain preprocess", "!jaxtrain generate")
    names = [page.stem for page in PAGES]
    cells = execute(names, left_out, IN_THE_KERNEL)
    results = [said_by(cell) for cell in cells if "metrics.jsonl" in cell.source]
    assert len(results) == len(names) and all(
        "loss" in result or "reward" in result or "tree" in result for result in results
    )
    shown = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert any("image/png" in data for data in shown)
