"""Panel, or single line, with the use of accelerators, memory and disk of the hosts."""

import time
from typing import Any

import numpy as np
from rich.text import Text

from jaxtrain.runs.console import format_count
from jaxtrain.runs.dashboard.chart import spark
from jaxtrain.runs.dashboard.status import number
from jaxtrain.runs.dashboard.text import bar, box, flat
from jaxtrain.runs.dashboard.view import DashboardView

GIB = 2**30
TABLE = 48
"""Columns of a GPU's row; what is right of them shows its use so far."""


def newest(look: DashboardView) -> dict[str, dict[str, Any]]:
    """The last line of each host of the chosen run."""
    run = look.first
    return {host: lines[-1] for host, lines in run.hardware.items() if lines} if run else {}


def draw_hardware(look: DashboardView, width: int, height: int) -> list[Text]:
    """A row for each GPU while there is space, else one for each host's; then CPUs."""
    hosts = newest(look)
    gpus = [(host, gpu) for host, line in hosts.items() for gpu in list_gpus(line)]
    space = height - 2 - len(hosts)
    lines: list[Text] = []
    if gpus and len(gpus) + 1 <= space:
        lines.append(Text(f" gpu  use{' ' * 12}memory{' ' * 10}°C    W", style="bright_black"))
        room = width - 2 - TABLE - 2
        for host, gpu in gpus:
            line = draw_gpu(gpu)
            if room >= 8:
                course = past_use(look, host, gpu.get("index"))[-4 * room :]
                line.append(f"  {spark(np.array(course), room)}", "green")
            lines.append(line)
    elif gpus:
        lines += [Text(" " + sum_up(list_gpus(line), host)) for host, line in hosts.items()]
    for host, line in hosts.items():
        lines.append(draw_host(host, line))
    if not hosts:
        lines = [Text(" nothing is recorded (log.hardware_seconds)", style="bright_black")]
    title = "hardware"
    if hosts:
        age = (look.now or time.time()) - max(number(line.get("time")) for line in hosts.values())
        title = "hardware" if age < 120 else "hardware, when last seen"
    return box(lines, width, height, title)


def past_use(look: DashboardView, host: str, index: Any) -> list[float]:
    """The use of one GPU in all lines that are kept."""
    run = look.first
    lines = run.hardware.get(host, ()) if run else ()
    readings = [gpu for line in lines for gpu in list_gpus(line) if gpu.get("index") == index]
    return [number(gpu.get("use")) for gpu in readings]


def list_gpus(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The accelerators of a line."""
    gpus = line.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def draw_gpu(gpu: dict[str, Any]) -> Text:
    """use, memory, temperature, power of one; blanks where it does not tell."""
    use, memory, total = gpu.get("use"), gpu.get("memory"), number(gpu.get("memory_total"))
    line = Text(f" {flat(gpu.get('index', '?'))[:3]:<4} ")
    line.append_text(bar(number(use), 8) if use is not None else Text(" " * 8))
    line.append(f" {number(use):>4.0%}  " if use is not None else " " * 7)
    share = number(memory) / total if total else None
    line.append_text(bar(share, 6))
    line.append(f" {number(memory) / GIB:>5.1f}/{total / GIB:.0f} G".ljust(13))
    temperature, power = gpu.get("temperature"), gpu.get("power")
    line.append(f"{number(temperature):>3.0f}" if temperature is not None else "   ")
    return line.append(f" {number(power):>4.0f}" if power is not None else "")


def draw_host(host: str, line: dict[str, Any]) -> Text:
    """CPU and memory of a host."""
    cpu = line.get("cpu")
    text = Text(" cpu  ").append_text(bar(number(cpu), 8))
    text.append(f" {number(cpu):>4.0%}  " if cpu is not None else " " * 7)
    total = number(line.get("memory_total"))
    text.append_text(bar(number(line.get("memory")) / total if total else None, 6))
    text.append(f" {number(line.get('memory')) / GIB:>5.1f}/{total / GIB:.0f} G".ljust(13))
    return text.append(f" {flat(host)}", "bright_black")


def sum_up(gpus: list[dict[str, Any]], host: str = "") -> str:
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


def one_line(look: DashboardView) -> Text:
    """Hardware and speed in one line, for small screens."""
    parts = []
    for line in list(newest(look).values())[:1]:
        if gpus := list_gpus(line):
            parts.append(sum_up(gpus))
        total = number(line.get("memory_total")) / GIB
        memory = f"{number(line.get('memory')) / GIB:.0f}/{total:.0f} G"
        parts.append(f"cpu {number(line.get('cpu')):.0%}  {memory}")
    run = look.first
    if run is not None:
        if speed := run.last("tokens_per_second_per_device"):
            parts.append(f"{format_count(speed)} tok/s/dev")
        if mfu := run.last("mfu"):
            parts.append(f"MFU {mfu:.0%}")
    return Text(" " + "  ".join(parts))
