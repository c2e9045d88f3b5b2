"""Write docs/notebooks/*.ipynb from the Markdown beside them, for Colab, which opens nothing else.

python scripts/make_notebooks.py          # writes them (make notebooks)
python scripts/make_notebooks.py --check  # names those that are old; 1 where there are any
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"


def render(page: Path) -> str:
    """A notebook without outputs; the same text every time."""
    notebook = jupytext.read(page)
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    old = False
    for page in sorted(FOLDER.glob("*.md")):
        text, target = render(page), page.with_suffix(".ipynb")
        if target.exists() and target.read_text() == text:
            continue
        old = True
        print(f"{target.name} is old" if check else target.name)
        if not check:
            target.write_text(text)
    return int(check and old)


if __name__ == "__main__":
    sys.exit(main())
