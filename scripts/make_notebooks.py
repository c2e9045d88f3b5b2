"""Write docs/notebooks/*.ipynb from the Markdown beside them, for Colab, which opens nothing else.

python scripts/make_notebooks.py            # takes over changes of the pages; outputs stay
python scripts/make_notebooks.py --check    # names those that are old; 1 where there are any
python scripts/make_notebooks.py --execute [NAME ...]   # runs them here and stores their outputs
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
FULL_SIZE = {"trees"}
"""Notebooks that are executed as they stand; of the others, tests run a tiny model."""
UNSHOWN = ("!jaxtrain doctor", "%%writefile")
"""Cells whose output is about the machine that ran them."""


def build(page: Path) -> NotebookNode:
    """The notebook of a page, without outputs; the same every time."""
    notebook = jupytext.read(page)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    nbformat.validate(notebook)
    return notebook


def render(page: Path) -> str:
    """The notebook's text, with the outputs that its .ipynb has for the same cells."""
    notebook = build(page)
    target = page.with_suffix(".ipynb")
    if target.exists():
        stored = nbformat.read(target, as_version=4)
        outputs = {
            cell.source: (cell.outputs, cell.execution_count)
            for cell in stored.cells
            if cell.cell_type == "code"
        }
        for cell in notebook.cells:
            if cell.cell_type == "code" and cell.source in outputs:
                cell.outputs, cell.execution_count = outputs[cell.source]
    return nbformat.writes(notebook) + "\n"


def execute(page: Path) -> str:
    """Run a page in an empty folder, and return the notebook's text with what its cells print."""
    from nbclient import NotebookClient

    notebook = build(page)
    os.environ["JAXTRAIN_NOTEBOOK"] = "" if page.stem in FULL_SIZE else "ci"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources).execute()
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.metadata.pop("execution", None)
                cell.outputs = [] if cell.source.startswith(UNSHOWN) else cell.outputs
                for output in cell.outputs:
                    clean(output, folder)
    notebook.metadata.pop("language_info", None)
    return nbformat.writes(notebook) + "\n"


def clean(output: NotebookNode, folder: str) -> None:
    """Leave out what belongs to one machine: its folders, and what a terminal would obey."""
    if "text" in output:
        text = output.text.replace(f"{folder}/", "").replace(f"{ROOT}/", "").replace("\r\n", "\n")
        text = re.sub(r"\S*/bin/python\S* -m jaxtrain\.main", "jaxtrain", text)
        output.text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks; all without names")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--execute", action="store_true", help="run them and store the outputs")
    options = parser.parse_args()
    old = False
    for page in sorted(FOLDER.glob("*.md")):
        if options.names and page.stem not in options.names:
            continue
        target = page.with_suffix(".ipynb")
        text = execute(page) if options.execute else render(page)
        if target.exists() and target.read_text() == text:
            continue
        old = True
        print(f"{target.name} is old" if options.check else target.name)
        if not options.check:
            target.write_text(text)
    return int(options.check and old)


if __name__ == "__main__":
    sys.exit(main())
