"""Use of accelerators, memory and disk of the hosts."""

from typing import Any

import numpy as np
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxtrain.runs.console import format_count
from jaxtrain.runs.dashboard.chart import spark
from jaxtrain.runs.dashboard.run_data import WatchedRun, list_gpus
from jaxtrain.runs.dashboard.status import number
from jaxtrain.runs.dashboard.text import flat

GIB = 2**30
TABLE_CELLS = 48
"""Columns of a GPU's row; what is right of them shows its use so far."""


def newest(run: WatchedRun | None) -> dict[str, dict[str, Any]]:
    """The last line of each host."""
    return {host: lines[-1] for host, lines in run.hardware.items() if lines} if run else {}


def draw_hardware(
    run: WatchedRun | None, now: float, width: int, height: int
) -> tuple[str, Group | Text]:
    """Return a title and a row for each GPU while there is space, else one for each host; then
    CPUs."""
    hosts = newest(run)
    if not hosts:
        return "hardware", Text(" nothing is recorded (log.hardware_seconds)", "bright_black")
    table = Table.grid(padding=(0, 1, 0, 0))
    sums: list[Text] = []
    for title in ("gpu", "use", "", "memory", "", "°C", "W", ""):
        table.add_column(title, no_wrap=True, justify="right" if title in ("°C", "W") else "left")
    gpus = [(host, gpu) for host, line in hosts.items() for gpu in list_gpus(line)]
    if gpus and len(gpus) + 1 <= height - len(hosts):
        table.add_row(*(Text(str(c.header), style="bright_black") for c in table.columns))
        for host, gpu in gpus:
            temperature, power = gpu.get("temperature"), gpu.get("power")
            table.add_row(
                flat(gpu.get("index", "?"))[:3],
                *draw_use(gpu.get("use")),
                *draw_memory(gpu),
                "" if temperature is None else f"{number(temperature):.0f}",
                "" if power is None else f"{number(power):.0f}",
                Text(past_use(run, host, gpu.get("index"), width - TABLE_CELLS), "green"),
            )
    elif gpus:
        sums = [Text(summarize(list_gpus(line), host)) for host, line in hosts.items()]
    for host, line in hosts.items():
        name = Text(flat(host)[:30], "bright_black")
        table.add_row("cpu", *draw_use(line.get("cpu")), *draw_memory(line), "", "", name)
    old = now - max(number(line.get("time")) for line in hosts.values()) >= 120
    return "hardware, when last seen" if old else "hardware", Group(*sums, table)


def draw_use(use: Any) -> tuple[ProgressBar | str, str]:
    """Return a share as a bar and in percent."""
    return ("", "") if use is None else (draw_bar(number(use), 8), f"{number(use):>4.0%}")


def draw_memory(line: dict[str, Any]) -> tuple[ProgressBar, str]:
    """Return used memory as a bar and in GiB."""
    used, total = number(line.get("memory")), number(line.get("memory_total"))
    return draw_bar(used / total if total else 0.0, 6), f"{used / GIB:.1f}/{total / GIB:.0f} G"


def draw_bar(share: float, width: int) -> ProgressBar:
    """A share as a bar."""
    return ProgressBar(1.0, min(max(share, 0.0), 1.0), width, complete_style="green")


def past_use(run: WatchedRun | None, host: str, index: Any, width: int) -> str:
    """The use of one GPU in the newest lines."""
    lines = list(run.hardware.get(host, ()) if run else ())[-4 * max(width, 0) :]
    readings = [gpu for line in lines for gpu in list_gpus(line) if gpu.get("index") == index]
    return spark(np.array([number(gpu.get("use")) for gpu in readings]), width) if width > 7 else ""


def summarize(gpus: list[dict[str, Any]], host: str = "") -> str:
    """gpu 91-94 %  60.1/143 G  64 °C"""
    uses = [100 * number(gpu["use"]) for gpu in gpus if gpu.get("use") is not None]
    parts = [f"{flat(host)} {len(gpus)} gpus" if host else "gpu"]
    if uses:
        low, high = f"{min(uses):.0f}", f"{max(uses):.0f}"
        parts.append(f"{low} %" if low == high else f"{low}-{high} %")
    most = max(number(gpu.get("memory")) for gpu in gpus) / GIB
    parts.append(f"{most:.1f}/{max(number(gpu.get('memory_total')) for gpu in gpus) / GIB:.0f} G")
    heat = max(number(gpu.get("temperature")) for gpu in gpus)
    return "  ".join([*parts, f"{heat:.0f} °C"] if heat else parts)


def summarize_hardware(run: WatchedRun | None) -> str:
    """Hardware and speed in one line, for small screens."""
    parts = []
    for line in list(newest(run).values())[:1]:
        gpus, total = list_gpus(line), number(line.get("memory_total")) / GIB
        parts += [summarize(gpus)] if gpus else []
        memory = f"{number(line.get('memory')) / GIB:.0f}/{total:.0f} G"
        parts.append(f"cpu {number(line.get('cpu')):.0%}  {memory}")
    if run is not None:
        if speed := run.last("tokens_per_second_per_device"):
            parts.append(f"{format_count(speed)} tok/s/dev")
        if mfu := run.last("mfu"):
            parts.append(f"MFU {mfu:.0%}")
    return " " + "  ".join(parts)
