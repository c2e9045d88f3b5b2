"""Screen 2: answers of the model, as a table and as full conversations."""

import json
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from jaxtrain.runs.dashboard.screens.metrics import plain
from jaxtrain.runs.dashboard.text import box, fit, flat, wrap
from jaxtrain.runs.dashboard.view import ClickTarget, DashboardView, Frame
from jaxtrain.runs.plot import is_number

MOST_CHARACTERS = 200_000
"""Of one message that is shown whole."""
FOLDED = 3
"""Lines of a tool's result that are shown folded."""
ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}

Sample = Mapping[str, Any]


def draw(look: DashboardView, width: int, height: int) -> Frame:
    """The table, or the chosen sample."""
    samples = listed(look)
    if not samples:
        notice = (
            "no sample fits the search" if look.pattern("samples") else "no sample was kept yet"
        )
        return Frame(box(["", f"  {notice}"], width, height, "samples"), [])
    selected = look.select("samples", len(samples))
    if look.choice.open:
        return draw_open(look, samples[selected], selected, len(samples), width, height)
    narrow = width < 90
    fixed = "   step reward tokens end    " + ("" if narrow else "version ")
    half = max((width - 2 - len(fixed)) // 2, 8)
    lines = [Text(fixed + "prompt".ljust(half) + "answer", style="bold")]
    space = height - 3
    first = max(0, min(selected - space // 2, len(samples) - space))
    spots = []
    for row, sample in enumerate(samples[first : first + space]):
        line = draw_row(sample, half, width - 2, narrow)
        if first + row == selected:
            line.stylize("reverse")
        lines.append(line)
        spots.append(ClickTarget(0, row + 2, width, row + 3, "select", first + row))
    footer = f"{selected + 1} of {len(samples)}, {look.choice.order} first"
    return Frame(box(lines, width, height, f"samples of {title(look)}", footer), spots)


def title(look: DashboardView) -> str:
    """The name of the run whose samples are shown."""
    return look.first.name if look.first else ""


def listed(look: DashboardView) -> list[Sample]:
    """The samples of the chosen run that fit the search, in the chosen order."""
    run, pattern, order = look.first, look.pattern("samples"), look.choice.order
    if run is None:
        return []

    def make() -> list[Sample]:
        matching: list[Sample] = [
            s for s in run.samples if pattern is None or pattern.search(whole_text(s))
        ]
        matching.reverse()
        if order != "newest":
            sign = -1 if order == "best" else 1
            matching = [s for s in matching if is_number(s.get("reward"))]
            matching.sort(key=lambda s: sign * s["reward"])
        return matching

    text = pattern.pattern if pattern else ""
    return look.remember(("samples", str(run.path), run.version, text, order), make)


def draw_row(sample: Sample, half: int, width: int, narrow: bool) -> Text:
    """Draw one line of the table."""
    reward, tokens = sample.get("reward"), sample.get("tokens")
    line = Text(f"{flat(sample.get('step', ''))[:7]:>7} ")
    color = "green" if is_number(reward) and reward > 0 else "red"
    line.append(f"{plain(reward) if is_number(reward) else '-':>6} ", color)
    line.append(f"{plain(tokens) if is_number(tokens) else '-':>6} ")
    line.append_text(fit(flat(sample.get("finish_reason") or sample.get("set") or "-"), 7))
    if not narrow:
        version = sample.get("policy_version")
        line.append(f"{plain(version) if is_number(version) else '-':>7} ")
    line.append_text(fit(flat(ending(sample.get("prompt"))), half - 1)).append(" ")
    line.append(flat(messages_text(sample.get("completion"))))
    return fit(line, width)


def messages(value: Any) -> list[dict[str, Any]]:
    """A prompt or an answer as a list of messages."""
    if isinstance(value, list):
        return [m if isinstance(m, dict) else {"role": "", "content": str(m)} for m in value]
    return [] if value is None else [{"role": "", "content": str(value)}]


def ending(prompt: Any) -> str:
    """Return the text of the last message of a prompt."""
    turns = messages(prompt)
    return content(turns[-1]) if turns else ""


def content(message: Mapping[str, Any]) -> str:
    """A message's text; parts of it joined."""
    value = message.get("content")
    if isinstance(value, list):
        value = "\n".join(
            str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in value
        )
    return "" if value is None else str(value)[:MOST_CHARACTERS]


def messages_text(value: Any) -> str:
    """Return the start of all messages on one line, for the table."""
    return " ".join(content(m)[:2000] for m in messages(value)[:8])


def whole_text(sample: Sample) -> str:
    """Return the text that searches match against."""
    turns = [*messages(sample.get("prompt")), *messages(sample.get("completion"))]
    return "\n".join(content(turn) for turn in turns)


def draw_open(
    look: DashboardView, sample: Sample, index: int, count: int, width: int, height: int
) -> Frame:
    """Draw one conversation with its roles, tool calls folded, and the rewards by name."""
    choice = look.choice
    key = ("sample", id(sample), width, choice.unfolded)
    lines = look.remember(key, lambda: conversation(sample, width - 4, choice.unfolded))
    choice.scrolled = min(max(choice.scrolled, 0), max(len(lines) - height + 2, 0))
    shown = [Text(" ").append_text(line) for line in lines[choice.scrolled :]]
    hidden_lines = len(lines) - choice.scrolled - (height - 2)
    head = f"sample {index + 1} of {count}, step {flat(sample.get('step', ''))[:12]}"
    return Frame(
        box(shown, width, height, head, f"{hidden_lines} more lines" if hidden_lines > 0 else ""),
        [],
    )


def conversation(sample: Sample, width: int, unfolded: bool) -> list[Text]:
    """Return all lines of a sample."""
    lines: list[Text] = []
    facts = [("reward", sample.get("reward"))]
    rewards = sample.get("rewards")
    facts += list(rewards.items()) if isinstance(rewards, dict) else []
    shown_elsewhere = {"prompt", "completion", "reward", "rewards", "step"}
    facts += [(k, v) for k, v in sample.items() if k not in shown_elsewhere]
    summary = "   ".join(
        f"{flat(k)} {plain(v) if is_number(v) else flat(v)[:200]}"
        for k, v in facts
        if v is not None
    )
    lines += [Text(line, style="cyan") for line in wrap(summary, width)]
    for part in ("prompt", "completion"):
        for message in messages(sample.get(part)):
            role = flat(message.get("role") or part)[:40]
            name = flat(message.get("name") or "")[:60]
            heading = f"{role} {name}".strip()
            lines += [Text(""), Text(heading, style=f"bold {ROLES.get(role, 'white')}")]
            text = wrap(content(message), width)
            if role == "tool" and not unfolded and len(text) > FOLDED:
                text = [*text[:FOLDED], f"▸ {len(text) - FOLDED} more lines (t)"]
            lines += [Text(line) for line in text]
            lines += draw_calls(message.get("tool_calls"), width, unfolded)
    return lines


def draw_calls(calls: Any, width: int, unfolded: bool) -> list[Text]:
    """Tool calls of a message: one line each, or whole."""
    lines = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else {"name": str(call)}
        function = function if isinstance(function, dict) else {"name": str(function)}
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, default=str)
        text = f"{'▾' if unfolded else '▸'} {flat(function.get('name'))}({arguments})"
        call_lines = wrap(text, width) if unfolded else [fit(flat(text), width).plain]
        lines += [Text(line, style="yellow") for line in call_lines]
    return lines
