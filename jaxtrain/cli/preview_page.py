"""Console whose output is also an HTML page, with thumbnails of the samples' images."""

from typing import Any

from typing_extensions import override

from jaxtrain.data.images.decode import make_thumbnail
from jaxtrain.data.preview import ShownImage
from jaxtrain.runs.console import SafeConsole

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light"><title>preprocess</title>
<style>pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
img { display: block; margin: 4px 0; border: 1px solid #ccc }</style></head><body>
"""


class PageConsole(SafeConsole):
    """Prints to the terminal and keeps what it printed."""

    def __init__(self) -> None:
        super().__init__(record=True)
        self._pieces: list[str] = []

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        for shown in objects:
            if isinstance(shown, ShownImage) and (url := make_thumbnail(shown.image.source)):
                self._take_text()
                self._pieces.append(f'<img src="{url}" alt="image {shown.number}">')

    def render_page(self) -> bytes:
        """Return the file with all that was printed."""
        self._take_text()
        return "\n".join([HEAD, *self._pieces, "</body></html>\n"]).encode("utf-8", "replace")

    def _take_text(self) -> None:
        """Move the text printed since the last call into the page."""
        text = self.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
        self._pieces.append(text)
