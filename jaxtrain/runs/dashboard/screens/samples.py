"""Screen 2: answers of the model, as a table and as full conversations."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static
from typing_extensions import override

from jaxtrain.runs.dashboard.screens.pane import Pane, TextTable
from jaxtrain.runs.dashboard.text import flat, plain
from jaxtrain.runs.plot import is_number
from jaxtrain.runs.samples import Sample, message_text, read_messages
from jaxtrain.text_safety import escape_control_chars

FOLDED, MAX_LINES, CELL = 3, 2000, 2000
"""Lines of a tool's result that are shown folded, and of any message; characters of a cell."""
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


class SamplesPane(Pane):
    """Screen 2."""

    NAME = "samples"
    DEFAULT_CSS = """
    SamplesPane TextTable, SamplesPane VerticalScroll { border: round $surface-lighten-2; }
    SamplesPane VerticalScroll { display: none; padding: 0 1; }
    """
    BINDINGS: ClassVar = [
        Binding("b", "sort('best')", "best"),
        Binding("w", "sort('worst')", "worst"),
        Binding("m", "sort('newest')", "newest"),
        Binding("t", "unfold", "tool calls"),
        Binding("escape", "open(False)", "back", show=False),
        Binding("right,n", "move(1)", "open: next", show=False),
        Binding("left,N,shift+n", "move(-1)", "open: before", show=False),
        Binding("g,home", "ends(True)", "top", show=False),
        Binding("G,shift+g,end", "ends(False)", "end", show=False),
    ]
    order, unfolded = "newest", False
    _source: Any = None
    _samples: list[Sample] = []

    def compose(self) -> ComposeResult:
        """Yield the table and one conversation."""
        yield TextTable()
        with VerticalScroll():
            yield Static(markup=False)

    def on_mount(self) -> None:
        """Name the two parts."""
        self.table, self.whole = self.query_one(TextTable), self.query_one(VerticalScroll)

    @override
    def focus_main(self) -> None:
        (self.whole if self.whole.display else self.table).focus()

    @override
    def draw(self) -> None:
        run, width, pattern = self.view.first, self.table.size.width, self.view.pattern(self.NAME)
        source = (run and (run.path, run.samples_seen, len(run.samples)), self.order, pattern)
        if source != self._source:
            self._source, self._samples = source, self.list_samples()
        samples, narrow = self._samples, width < 88
        titles = ["step", "reward", "tokens", "end"] + ([] if narrow else ["version"])
        columns = [(title, max(len(title), 6)) for title in titles]
        half = max((width - sum(w + 2 for _, w in columns) - 6) // 2, 8)
        rows = (draw_row(sample, narrow) for sample in samples)
        self.table.fill((*source, width), [*columns, ("prompt", half), ("answer", half)], rows)
        number = min(self.table.cursor_row + 1, len(samples))
        self.table.border_title = Text(f"samples of {run.name}" if run else "samples")
        none = "no sample fits the search" if pattern else "no sample was kept yet"
        count = f"{number} of {len(samples)}, {self.order} first" if samples else none
        self.table.border_subtitle = count
        if self.whole.display and samples:
            sample = samples[number - 1]
            step = flat(sample.get("step", ""))[:12]
            self.whole.border_title = Text(f"sample {number} of {len(samples)}, step {step}")
            self.whole.query_one(Static).update(draw_conversation(sample, self.unfolded))

    def list_samples(self) -> list[Sample]:
        """The samples of the chosen run that fit the search, in the chosen order."""
        run, pattern = self.view.first, self.view.pattern(self.NAME)
        samples: list[Sample] = [*reversed(run.samples)] if run else []
        if pattern is not None:
            samples = [sample for sample in samples if pattern.search(whole_text(sample))]
        if self.order != "newest":
            samples = [s for s in samples if is_number(s.get("reward"))]
            samples.sort(key=lambda s: s["reward"], reverse=self.order == "best")
        return samples

    @on(TextTable.RowSelected)
    def open_sample(self) -> None:
        """Show the whole conversation."""
        self.action_open(self.table.row_count > 0)

    @on(TextTable.RowHighlighted)
    def count_rows(self) -> None:
        """Show the number of the row below the table."""
        self.draw()

    def action_open(self, opened: bool) -> None:
        """Show one conversation, or the table; without a conversation drop the search."""
        if not (opened or self.whole.display):
            self.view.filters.pop(self.NAME, None)
        self.whole.display, self.table.display = opened, not opened
        self.whole.scroll_home(animate=False)
        self.focus_main()
        self.draw()

    def action_move(self, by: int) -> None:
        """Show the next conversation, or the one before."""
        if self.whole.display:
            self.table.move_cursor(row=self.table.cursor_row + by)
            self.whole.scroll_home(animate=False)
            self.draw()

    def action_unfold(self) -> None:
        """Show tool calls and their results in full, or folded."""
        self.unfolded = not self.unfolded
        self.draw()

    def action_sort(self, order: str) -> None:
        """Sort the samples."""
        self.order, self.whole.display = order, True
        self.action_open(False)
        self.action_ends(True)

    def action_ends(self, first: bool) -> None:
        """Go to the first line or sample, or the last."""
        if self.whole.display:
            (self.whole.scroll_home if first else self.whole.scroll_end)(animate=False)
        self.table.move_cursor(row=0 if first else self.table.row_count - 1)


def draw_row(sample: Sample, narrow: bool) -> list[Text | str]:
    """Return the cells of a sample."""
    reward, prompt = sample.get("reward"), read_messages(sample.get("prompt"))
    answer = (message_text(m)[:CELL] for m in read_messages(sample.get("completion"))[:8])
    color = "green" if is_number(reward) and reward > 0 else "red"
    return [
        flat(sample.get("step", ""))[:7],
        Text(number_text(reward), color),
        number_text(sample.get("tokens")),
        flat(sample.get("finish_reason") or sample.get("set") or "-")[:12],
        *([] if narrow else [number_text(sample.get("policy_version"))]),
        flat(message_text(prompt[-1])[:CELL] if prompt else ""),
        flat(" ".join(answer)[:CELL]),
    ]


def number_text(value: Any) -> str:
    """A number of a sample; - where it has none."""
    return plain(value) if is_number(value) else "-"


def whole_text(sample: Sample) -> str:
    """Return the text that searches match against."""
    turns = [*read_messages(sample.get("prompt")), *read_messages(sample.get("completion"))]
    return "\n".join(message_text(turn) for turn in turns)


def draw_conversation(sample: Sample, unfolded: bool) -> Text:
    """Return all of a sample: its numbers, then messages with tool calls and results, which are
    folded unless `unfolded`."""
    rewards = sample.get("rewards")
    facts = {"reward": sample.get("reward"), **(rewards if isinstance(rewards, dict) else {})}
    hidden = ("prompt", "completion", "step", "rewards", "thumbnails", *facts)
    facts |= {name: value for name, value in sample.items() if name not in hidden}
    shown = (
        f"{flat(name)[:80]} {plain(value) if is_number(value) else flat(value)[:200]}"
        for name, value in facts.items()
        if value is not None
    )
    text = Text().append("   ".join(shown) + "\n", "cyan")
    for part in ("prompt", "completion"):
        for message in read_messages(sample.get(part)):
            role = flat(message.get("role") or part)[:40]
            heading = f"{role} {flat(message.get('name') or '')[:60]}".strip()
            text.append(f"\n{heading}\n", f"bold {ROLES.get(role, 'white')}")
            content = escape_control_chars(message_text(message)).expandtabs(4)
            lines = content.split("\n") if content else []
            most = FOLDED if role == "tool" and not unfolded else MAX_LINES
            text.append("".join(f"{line}\n" for line in lines[:most]))
            if len(lines) > most:
                text.append(f"▸ {len(lines) - most:,} more lines{' (t)' * (most == FOLDED)}\n")
            for call in list_calls(message.get("tool_calls")):
                text.append(f"▾ {call}\n" if unfolded else f"▸ {flat(call)[:200]}\n", "yellow")
    return text


def list_calls(calls: Any) -> Iterator[str]:
    """Yield the tool calls of a message as name(arguments)."""
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else call
        function = function if isinstance(function, dict) else {"name": str(function)}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        yield escape_control_chars(f"{flat(function.get('name'))[:200]}({arguments})").expandtabs(4)
