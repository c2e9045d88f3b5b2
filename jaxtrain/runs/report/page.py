"""The page: data, scripts and styles in one file, which asks nobody for anything.

Its Content-Security-Policy names the hashes of its own two scripts and two styles, so that nothing
else runs, whatever a text from a model holds; texts are put in as text nodes only.
"""

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[2] / "assets"


def render(data: dict[str, Any]) -> str:
    """The whole HTML file of what collect() found."""
    scripts = [read("uplot/uPlot.iife.min.js"), read("report/page.js")]
    styles = [read("uplot/uPlot.min.css"), read("report/page.css")]
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:;"
        f" script-src {' '.join(map(fingerprint, scripts))};"
        f" style-src {' '.join(map(fingerprint, styles))}"
    )
    title = ", ".join(run["name"] for run in data["runs"])[:200] or "runs"
    # "<" never stands in the data, so that nothing in it can end its script or begin a comment.
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(title)} · jaxtrain</title>",
            *(f"<style>{style}</style>" for style in styles),
            "</head><body><main></main><noscript>This page needs its script.</noscript>",
            f'<script type="application/json" id="data">{embedded}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def read(name: str) -> str:
    """A file of jaxtrain/assets."""
    return (ASSETS / name).read_text(encoding="utf-8")


def fingerprint(source: str) -> str:
    """Return the hash by which a content security policy allows an inline script or style."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
