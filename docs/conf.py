"""The site: what Sphinx makes of this folder. `make site` builds it into build/site.

Everything is Markdown, as the repository shows it. Generated pages lie here ready made, so that a
build imports nothing of jaxtrain.
"""

import json
import re
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from llms import write_llms  # noqa: E402

PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project = PROJECT["name"]
release = version = PROJECT["version"]
html_title = f"{project} {release}"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["**/__pycache__", "reference/tree.md"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# A code block is a block of code: without a language it is shown as it stands.
highlight_language = "none"

smartquotes = False  # of values and code that a sentence quotes

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_favicon = "_static/favicon.svg"
html_extra_path = ["schema.json"]
html_copy_source = True
html_sourcelink_suffix = ""
html_show_sphinx = False
html_show_copyright = False
html_last_updated_fmt = None
copybutton_prompt_text = "$ "


class CodeCell(SphinxDirective):
    """A cell of a notebook's Markdown, with the outputs that the notebook stores for it."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    option_spec = {"tags": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        """The block."""
        text = "\n".join(self.content)
        shell = [line.lstrip().startswith(("!", "%")) for line in self.content if line.strip()]
        language = "sh" if all(shell) else "none" if any(shell) else "python"
        page = Path(self.env.doc2path(self.env.docname))
        return [nodes.literal_block(text, text, language=language), *list_outputs(page, text)]


def list_outputs(page: Path, source: str) -> list[nodes.Node]:
    """Return what a cell printed and drew, of the notebook beside a page."""
    cells = json.loads(page.with_suffix(".ipynb").read_text())["cells"]
    outputs = [
        output
        for cell in cells
        if cell["cell_type"] == "code" and "".join(cell["source"]) == source
        for output in cell["outputs"]
    ]
    text = "".join("".join(output.get("text", "")) for output in outputs).rstrip()
    images = [output.get("data", {}).get("image/png") for output in outputs]
    return [
        *([nodes.literal_block(text, text, language="none", classes=["output"])] if text else []),
        *(
            nodes.raw(
                "", f'<img alt="output" src="data:image/png;base64,{image.strip()}">', format="html"
            )
            for image in images
            if image
        ),
    ]


def leave_as_text(app, doctree) -> None:
    """Replace links to folders of the repository, which a site does not have, by their text.

    Links to files are downloads already; links to missing targets stay warnings.
    """
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for node in list(doctree.findall(addnodes.pending_xref)):
        for start in (folder, HERE.parent):  # the README's are seen from the repository
            target = (start / node.get("reftarget", "")).resolve()
            is_page = target.with_name(f"{target.name}.md").exists()  # beside a folder of its name
            in_here = HERE.parent in target.parents and not is_page
            if target.is_dir() and in_here and node.parent is not None:
                node.replace_self(node.children)
                break


def list_unlisted(app, docname: str, source: list[str]) -> None:
    """Append tables of contents for the pages that the front page's tables omit."""
    if docname != "index":
        return
    named = set(re.findall(r"^[\w/]+$", source[0], flags=re.M)) | {"index"}
    unlisted = sorted(set(app.env.found_docs) - named)
    unlisted = [page for page in unlisted if not page.startswith("reference/config/")]
    for caption, names in (
        ("Notebooks", [page for page in unlisted if page.startswith("notebooks/")]),
        ("More", [page for page in unlisted if not page.startswith("notebooks/")]),
    ):
        if names:
            pages = "\n".join(names)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app) -> None:
    """Register directives and hooks with Sphinx."""
    app.add_directive("code-cell", CodeCell)
    app.connect("source-read", list_unlisted)
    # A new page changes the front page's tables, though not its file.
    app.connect("env-get-outdated", lambda *_: ["index"])
    app.connect("doctree-read", leave_as_text)
    app.connect("build-finished", write_llms)
