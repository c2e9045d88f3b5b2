"""Data of the report page as JSON: thinned, bounded, without secrets."""

import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.config.secrets import HIDDEN, is_secret, redact, redact_command, redact_text
from jaxtrain.runs.console import format_number, format_time
from jaxtrain.runs.dashboard.names import order_charts
from jaxtrain.runs.dashboard.run_data import WatchedRun, list_gpus
from jaxtrain.runs.dashboard.status import current_step, facts, is_warning, time_passed, total_steps
from jaxtrain.runs.plot import is_number
from jaxtrain.runs.records import differing_keys
from jaxtrain.runs.samples import message_text, read_messages
from jaxtrain.text_safety import escape_control_chars, shorten

POINTS = 2000
"""Of a curve; longer ones are thinned."""
MAX_STEPS, MAX_EACH, MAX_TEXT, MAX_MESSAGES = 24, 3, 4000, 40
"""Steps whose samples are shown, best and worst of each, characters and messages of one."""
MAX_THUMBNAILS = 200
"""Of a run's samples."""
MAX_METRICS, MAX_KEYS, MAX_WARNINGS = 400, 3000, 200

TOKEN = re.compile(
    r"\b(?:hf_|sk-|sk_|ghp_|gho_|github_pat_|glpat-|xox[abpr]-|AKIA|AIza|nvapi-|pypi-)[\w-]{8,}"
    r"|\b[0-9a-f]{40}\b|\beyJ[\w-]{20,}\.[\w.-]+"
)
"""What keys of known services look like, wherever they stand."""
THUMBNAIL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]{1,32000}={0,2}")
"""Images that a page holds; samples.jsonl may have been written by anybody."""


def collect(runs: Sequence[WatchedRun], ended: str | None = None) -> dict[str, Any]:
    """The page's data. ended: the state of the run that is just writing its own page."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    kind = str(runs[0].key("task.kind") or "") if runs else ""
    charts = order_charts(names, kind)[:MAX_METRICS]
    flat = [{k: hide(v, k) for k, v in run.flat.items()} for run in runs]
    main_metric = pick_main_metric(runs, charts)
    charts.sort(key=lambda name: name != main_metric)
    return {
        "headline": None if main_metric is None else escape_control_chars(main_metric),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "charts": [escape_control_chars(name) for name in charts],
        "differing": differing_keys(flat) if len(runs) > 1 else [],
        "runs": [
            collect_run(run, charts, ended) | {"result": describe_result(run, main_metric)}
            for run in runs
        ],
    }


def pick_main_metric(runs: Sequence[WatchedRun], charts: Sequence[str]) -> str | None:
    """Return the metric that the page opens with: what the best checkpoint is chosen by, else the
    accuracy or reward of an evaluation, else the first chart; None without charts."""
    chosen = runs[0].key("checkpoint.best_metric") if runs else None
    graded = [n for n in charts if n[:5] == "eval/" and n.endswith(("accuracy", "reward"))]
    return next((name for name in (chosen, *graded, *charts) if name in charts), None)


def describe_result(run: WatchedRun, metric: str | None) -> str:
    """Return what a run has come to, in a sentence behind its state."""
    step, total = current_step(run), total_steps(run)
    position = f"at step {step:,} of {total:,}" if total else f"at step {step:,}"
    sentence = f"{position} after {format_time(time_passed(run))}"
    if metric is not None and metric in run.metrics and len(run.metrics[metric].values):
        values = run.metrics[metric].values
        ends = dict.fromkeys((format_number(values[0]), format_number(values[-1])))
        sentence += f": {escape_control_chars(metric)} {' -> '.join(ends)}"
    return f"{sentence}."


def collect_run(run: WatchedRun, charts: Sequence[str], ended: str | None) -> dict[str, Any]:
    """Return the data of one run."""
    summary = facts(run)
    if ended is not None:
        summary |= {"state": ended, "message": ""}
    chosen = ("state", "message", "task", "model", "devices", "step", "total_steps", "best")
    last = {name: summary["metrics"].get(name) for name in charts}
    thumbnails: dict[str, str] = {}
    return {
        "name": run.name,
        "path": str(run.path),
        **{name: summary[name] for name in chosen},
        "seconds": time_passed(run),
        "last": {
            escape_control_chars(name): value for name, value in last.items() if value is not None
        },
        "curves": {
            escape_control_chars(n): curve(*run.curve(n)) for n in charts if n in run.metrics
        },
        "clock": {kind: axis(run, kind) for kind in ("time", "tokens")},
        "config": {k: hide(v, k) for k, v in list(run.flat.items())[:MAX_KEYS]},
        "attempts": [attempt(start) for start in run.attempts[-20:]],
        "samples": pick_samples(run, thumbnails),
        "thumbnails": thumbnails,
        "warnings": [hide_text(line)[:600] for line in run.log if is_warning(line)][-MAX_WARNINGS:],
        "hardware": hardware(run),
    }


def curve(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    """[x, y] of at most POINTS points: the least and the greatest of each part of a longer one."""
    keep = thin(x, y)
    return [[short(v) for v in x[keep].tolist()], [short(v) for v in y[keep].tolist()]]


def thin(x: np.ndarray, y: np.ndarray, most: int = POINTS) -> np.ndarray:
    """Indices of points, rising: all, or ends and extremes of equal parts; int64 [<= most]."""
    if len(y) <= most:
        return np.arange(len(y))
    parts = (most - 2) // 2
    edges = np.linspace(0, len(y), parts + 1).astype(int)
    indices = [0, len(y) - 1]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        part = y[low:high]
        indices += [low + int(part.argmin()), low + int(part.argmax())]
    return np.unique(indices)


def axis(run: WatchedRun, kind: str) -> list[list[float]]:
    """[steps, seconds or tokens] at some lines; the page interpolates between them."""
    steps, along = np.array(run.steps), np.array(run.along(kind))
    keep = thin(steps, along, 600)
    return [steps[keep].tolist(), [short(v) for v in along[keep].tolist()]]


def short(value: float) -> float:
    """A number of six digits."""
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")


def attempt(line: dict[str, Any]) -> dict[str, Any]:
    """Return one start of the run, its command without secrets."""
    command = line.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    versions = line.get("versions")
    return {
        "time": text(line.get("time")),
        "host": text(line.get("host")),
        "command": " ".join(hide_text(word) for word in hide_command(words))[:4000],
        "versions": {text(k): text(v) for k, v in versions.items()}
        if isinstance(versions, dict)
        else {},
        "devices": text(line.get("devices")),
    }


def hide_command(words: Sequence[str]) -> list[str]:
    """A command line without secrets: those of overrides, and what follows --api-key."""
    shown, secret = [], False
    for word in redact_command(words):
        name, equals, _ = word.partition("=")
        flag = name.startswith("--") and is_secret(name)
        shown.append(HIDDEN if secret else f"{name}={HIDDEN}" if flag and equals else word)
        secret = flag and not equals
    return shown


def hide(value: Any, key: str) -> Any:
    """A config value without secrets, in a size that can be shown."""
    last = key.rpartition(".")[2]
    redacted = redact({last: value})[last]
    if isinstance(redacted, str):
        return shorten(hide_text(redacted), 2000)
    if isinstance(redacted, list | dict):
        return shorten(hide_text(str(redacted)), 2000)
    return (
        redacted
        if redacted is None or isinstance(redacted, bool) or is_number(redacted)
        else text(redacted)
    )


def hide_text(value: str) -> str:
    """A text without what looks like a key."""
    return TOKEN.sub(HIDDEN, redact_text(escape_control_chars(value)))


def text(value: Any) -> str:
    """Any value as a short text."""
    return "" if value is None else shorten(escape_control_chars(str(value)), 500)


def pick_samples(run: WatchedRun, thumbnails: dict[str, str]) -> list[dict[str, Any]]:
    """Best and worst of some steps, the newest step first; adds their images to thumbnails, by
    their hashes."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in run.samples:
        step = sample.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step[step].append(sample)
    steps = sorted(by_step)
    if len(steps) > MAX_STEPS:
        places = np.unique(np.linspace(0, len(steps) - 1, MAX_STEPS).astype(int))
        steps = [steps[index] for index in places]
    picked = []
    for step in reversed(steps):
        rewarded = [s for s in by_step[step] if is_number(s.get("reward"))]
        rewarded.sort(key=lambda s: -s["reward"])
        unrewarded = [s for s in by_step[step] if not is_number(s.get("reward"))]
        best = rewarded[:MAX_EACH]
        worst = rewarded[MAX_EACH:][-MAX_EACH:]
        chosen = [*best, *worst, *unrewarded[:2]]
        for sample in chosen:
            add_thumbnails(sample, thumbnails)
        picked.append({"step": step, "samples": [show_sample(s, thumbnails) for s in chosen]})
    return picked


def add_thumbnails(sample: dict[str, Any], thumbnails: dict[str, str]) -> None:
    """Add the images of a sample as long as there are fewer than MAX_THUMBNAILS."""
    urls = sample.get("thumbnails")
    for key, url in urls.items() if isinstance(urls, dict) else ():
        if len(thumbnails) < MAX_THUMBNAILS and THUMBNAIL.fullmatch(str(url)):
            thumbnails.setdefault(text(key)[:80], url)


def show_sample(sample: dict[str, Any], thumbnails: Mapping[str, str]) -> dict[str, Any]:
    """Return one answer as texts, and the keys of its images among the thumbnails."""
    show_part = partial(show_message, thumbnails=thumbnails)
    shown_elsewhere = ("prompt", "completion", "step", "reward", "rewards", "thumbnails")
    rewards = sample.get("rewards")
    extras = {**(rewards if isinstance(rewards, dict) else {})}
    extras |= {k: v for k, v in sample.items() if k not in shown_elsewhere}
    return {
        "reward": sample["reward"] if is_number(sample.get("reward")) else None,
        "facts": [[text(k)[:80], v if is_number(v) else text(v)[:200]] for k, v in extras.items()],
        "prompt": [show_part(m, "prompt") for m in read_messages(sample.get("prompt"))[-6:]],
        "answer": [
            show_part(m, "answer") for m in read_messages(sample.get("completion"))[:MAX_MESSAGES]
        ],
    }


def show_message(
    message: dict[str, Any], kind: str, thumbnails: Mapping[str, str]
) -> tuple[str, str, str, list[str]]:
    """(role, text, tool calls, keys of images)"""
    role = f"{text(message.get('role') or kind)} {text(message.get('name'))}".strip()[:80]
    calls = message.get("tool_calls")
    shown = shorten(escape_control_chars(message_text(message)), MAX_TEXT)
    called = "" if not calls else shorten(escape_control_chars(str(calls)), MAX_TEXT)
    parts = message.get("content")
    keys = [
        key
        for part in (parts if isinstance(parts, list) else [])
        if isinstance(part, dict) and (key := str(part.get("sha256"))) in thumbnails
    ]
    return role, shown, called, keys[:MAX_MESSAGES]


def hardware(run: WatchedRun) -> dict[str, list[list[float]]]:
    """Curves over seconds: for each host mean use, most memory and sum of watts of its GPUs, and
    its CPUs' use."""
    series_by_host: dict[str, list[list[float]]] = {}
    for host, lines in run.hardware.items():
        start = float(run.clock[0]) if run.clock else 0.0
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for line in lines:
            timestamp, gpus = line.get("time"), list_gpus(line)
            if not is_number(timestamp):
                continue
            uses = [g["use"] for g in gpus if is_number(g.get("use"))]
            memory = [g["memory"] / 2**30 for g in gpus if is_number(g.get("memory"))]
            power = [g["power"] for g in gpus if is_number(g.get("power"))]
            values = {
                "GPU use": sum(uses) / len(uses) if uses else None,
                "GPU memory, GiB": max(memory, default=None),
                "GPU power, W": sum(power) if power else None,
                "CPU use": line.get("cpu"),
            }
            for name, value in values.items():
                if is_number(value):
                    series[f"{name} ({text(host)[:40]})"].append((timestamp - start, float(value)))
        for name, points in series.items():
            pairs = np.array(points)
            series_by_host[name] = curve(pairs[:, 0], pairs[:, 1])
    return series_by_host
