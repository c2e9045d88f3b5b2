"""llms.txt and llms-full.txt at the site's root: a line a page, and all pages joined."""

import re
from collections.abc import Iterator
from pathlib import Path

from sphinx import addnodes

ROOT_PAGE = "index"


def write_llms(app, exception: Exception | None) -> None:
    """Write both beside index.html, once a build has gone well."""
    if exception or app.builder.format != "html":
        return
    out, env = Path(app.outdir), app.env
    summary = first_paragraph(source(app, ROOT_PAGE))
    short = [f"# {app.config.project}", "", f"> {summary}"]
    full = [source(app, ROOT_PAGE)]
    for caption, pages in list_pages(env):
        short += ["", f"## {caption}", ""]
        for page in pages:
            title = env.titles[page].astext()
            text = source(app, page)
            about = first_paragraph(text)
            short.append(f"- [{title}](_sources/{page}.md)" + (f": {about}" if about else ""))
            full.append(f"<!-- {page}.md -->\n\n{text}")
    (out / "llms.txt").write_text("\n".join(short) + "\n")
    (out / "llms-full.txt").write_text("\n\n".join(full) + "\n")


def list_pages(env) -> Iterator[tuple[str, list[str]]]:
    """(caption, pages) of each of the front page's tables of contents."""
    for toctree in env.get_doctree(ROOT_PAGE).findall(addnodes.toctree):
        pages = [page for _, page in toctree["entries"] if page in env.all_docs]
        if pages:
            yield toctree["caption"] or "Pages", pages


def source(app, page: str) -> str:
    """A page's Markdown, less the tables of contents."""
    text = Path(app.env.doc2path(page)).read_text()
    return re.sub(r"^```\{toctree\}\n.*?^```\n+", "", text, flags=re.M | re.S).strip()


def first_paragraph(text: str) -> str:
    """The first paragraph of prose behind the title, in one line, without marks; maybe empty."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for part in re.split(r"\n\s*\n", prose)[1:]:
        if re.match(r"[A-Za-z`*\[\"]", part.strip()):
            line = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*|`", r"\1", " ".join(part.split()))
            return line if len(line) < 240 else line[:240].rsplit(" ", 1)[0] + " ..."
    return ""
