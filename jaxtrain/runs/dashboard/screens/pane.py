"""What the five screens have in common, and tables whose cells are plain text."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, cast

from rich.text import Text
from textual.widgets import DataTable, TabPane

from jaxtrain.runs.dashboard.view import DashboardView

Column = tuple[str, int]
"""Title and width in cells; 0: as its content needs."""


class Dashboard(Protocol):
    """Interface of the application to its screens."""

    def draw(self) -> None: ...

    def action_show(self, name: str) -> None: ...


class Pane(TabPane):
    """One screen; its tab has the same name."""

    NAME: ClassVar[str]
    MAIN: ClassVar[str]
    """Selector of the widget that takes the keys."""

    def __init__(self, title: str, view: DashboardView):
        super().__init__(title, id=self.NAME)
        self.view = view

    def focus_main(self) -> None:
        """Give the keys to this screen."""
        self.query_one(self.MAIN).focus()

    def legend(self) -> Text:
        """Return what stands at the right of the progress bar."""
        text = self.view.filters.get(self.NAME)
        return Text(f"/{text[:40]} ", "yellow") if text else Text()

    def draw(self) -> None:
        """Bring the widgets up to date."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw this screen and the head once the widgets have their sizes."""
        self.app.call_after_refresh(self.dashboard.draw)

    @property
    def dashboard(self) -> Dashboard:
        """The application, which draws the chosen screen."""
        return cast(Dashboard, self.app)


class TextTable(DataTable[Text]):
    """Table with a cursor on rows; its cells are never read as markup."""

    def __init__(self, **options: Any):
        super().__init__(cursor_type="row", **options)
        self._key: Hashable = None

    def fill(self, key: Hashable, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
        """Show rows, unless `key` (all that they depend on) is that of the last call; the cursor
        stays on its line."""
        if key == self._key:
            return
        self._key, line = key, self.cursor_row
        self.clear(columns=True)
        for title, width in columns:
            self.add_column(Text(title, no_wrap=True), width=width or None)
        for row in rows:
            cells = [cell if isinstance(cell, Text) else Text(str(cell)) for cell in row]
            for cell in cells:
                cell.no_wrap, cell.overflow = True, "ellipsis"
            self.add_row(*cells)
        self.move_cursor(row=min(line, max(self.row_count - 1, 0)))
