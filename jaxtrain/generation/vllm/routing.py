"""Which server gets a request: the same one for what shares a prefix, as long as its load allows.

A session (the answers of a group, the turns of its episodes) prefers servers in an order that only
its number, their URLs and their weights decide: weighted rendezvous hashing (Thaler and Ravishankar
1998; Schindelhauer and Schomaker 2005). Whoever knows the same servers chooses the same one,
without a shared table, and a server that joins or leaves moves only its own share of the sessions.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

BOUND, SLACK = 1.5, 8.0
"""A server is skipped if its load exceeds BOUND times the mean plus SLACK requests (consistent
hashing with bounded loads, Mirrokni et al. 2016). The least loaded server would be wrong: with more
servers than sessions one is always idle, and groups would be torn apart."""
TARGET_WAITING = 4
"""Requests that may wait in a server's own queue, per data-parallel rank."""
FRESH_SECONDS = 10.0
"""Age from which a server's report about its queue is ignored."""
MASK = 2**64 - 1


class CandidateServer(NamedTuple):
    """A server that could get the request."""

    url: str
    weight: float
    """Capacity relative to the others; see `weigh`."""
    load: float
    """Requests in flight there."""
    limit: float = math.inf
    """Maximum number of requests; see `limit_load`."""


class ServerChoice(NamedTuple):
    """Result of `choose`."""

    index: int
    """Index in the list of candidates."""
    first: bool
    """True if this is the session's preferred server."""


def choose(
    session: int, candidates: Sequence[CandidateServer], *, sticky: bool = True
) -> ServerChoice | None:
    """Return the server for a request of this session; None if all are full.

    sticky: False for a request that shares no prefix: the least loaded server, ties broken by hash.
    """
    scores = [score(session, candidate.url, candidate.weight) for candidate in candidates]
    loads = [candidate.load / candidate.weight for candidate in candidates]
    open_indices = [i for i, candidate in enumerate(candidates) if candidate.load < candidate.limit]
    if not open_indices:
        return None
    least = min(loads[i] for i in open_indices)
    bound = BOUND * sum(loads) / len(loads) + SLACK if sticky else least
    if bound < least:  # those with room are all above it
        bound = least
    index = max((i for i in open_indices if loads[i] <= bound), key=lambda i: scores[i])
    return ServerChoice(index, scores[index] == max(scores))


def score(session: int, url: str, weight: float) -> float:
    """Return how strongly a session prefers a server; the highest score wins."""
    mixed = mix(mix(session & MASK) ^ seed(url))
    return -weight / math.log((mixed + 0.5) / 2**64)


def weigh(capacities: Sequence[float | None]) -> list[float]:
    """Return weights whose mean is 1. A server without a capacity gets the mean of the rest."""
    reported = [capacity for capacity in capacities if capacity]
    mean = sum(reported) / len(reported) if reported else 1.0
    return [(capacity or mean) / mean for capacity in capacities]


def limit_load(
    share: float, *, running: float, waiting: float, ranks: int, age: float, in_flight: float
) -> float:
    """Return how many of our requests a server may have in flight.

    share: its part of rollout.vllm.concurrency. running, waiting: from its /metrics, read `age`
    seconds ago (infinity: never), over all its ranks. in_flight: our requests there. If nothing
    waits, only the share counts; a server that other clients keep full still gets one request per
    rank. Old readings are ignored, so that a broken exporter starves nobody.
    """
    most = BOUND * share + SLACK
    if age > FRESH_SECONDS or not waiting:
        return most
    target = TARGET_WAITING * ranks
    room = in_flight if waiting > target else running + target
    return min(most, max(room, float(ranks)))


@lru_cache(4096)
def seed(url: str) -> int:
    """Return 64 bits of a URL, the same in every process."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "little")


def mix(x: int) -> int:
    """Return 64 pseudo-random bits (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
