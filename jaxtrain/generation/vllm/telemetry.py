"""Parse a vLLM server's /metrics."""

import re
from typing import NamedTuple

from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call

METRICS_TIMEOUT_SECONDS = 3.0
"""Shorter than a hanging server may go unnoticed: its health is checked next."""
LINE = re.compile(
    r"^vllm:(prompt_tokens_total|generation_tokens_total|iteration_tokens_total_sum"
    r"|num_requests_running|num_requests_waiting|prefix_cache_(?:hits|queries)_total)"
    r"(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
ENGINE = re.compile(r'engine="(\d+)"')


class Telemetry(NamedTuple):
    """Reading of /metrics, summed over the data-parallel ranks."""

    tokens: tuple[float, ...] = ()
    """Counters that change with every step of a working engine; empty if the server has none."""
    running: float = 0.0
    """Requests being computed."""
    waiting: float = 0.0
    """Requests in the server's queue."""
    ranks: int = 1
    """Data-parallel ranks that report."""
    prefix_hits: float = 0.0
    """Prompt tokens found in the prefix cache since the server's start."""
    prefix_queries: float = 0.0
    """Prompt tokens looked up there."""


def read_telemetry(url: str, timeout: float = METRICS_TIMEOUT_SECONDS) -> Telemetry | None:
    """Fetch /metrics; None if the server has no such page, or an unreadable one."""
    try:
        text = call(url, "GET", "/metrics", timeout=timeout)
    except (ServerGone, ServerRefused):
        return None
    return parse_telemetry(text) if isinstance(text, str) else None


def parse_telemetry(text: str) -> Telemetry | None:
    """Parse Prometheus text of a vLLM server; None if a value is no number."""
    sums: dict[str, float] = {}
    tokens, ranks = [], set()
    try:
        for name, labels, number in LINE.findall(text):
            value = float(number)
            sums[name] = sums.get(name, 0.0) + value
            ranks |= set(ENGINE.findall(labels))
            if "tokens" in name:
                tokens.append(value)
    except ValueError:
        return None
    return Telemetry(
        tuple(tokens),
        sums.get("num_requests_running", 0.0),
        sums.get("num_requests_waiting", 0.0),
        max(1, len(ranks)),
        sums.get("prefix_cache_hits_total", 0.0),
        sums.get("prefix_cache_queries_total", 0.0),
    )
