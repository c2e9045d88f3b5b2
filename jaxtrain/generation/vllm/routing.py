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
"""A server is passed over above BOUND times the mean load and SLACK requests (consistent hashing
with bounded loads, Mirrokni et al. 2016). Not the least load: with more servers than sessions one
is always idle, and groups would be torn apart."""
TARGET_WAITING = 4
"""Requests that may wait in a server's own queue, for each of its data-parallel ranks."""
FRESH_SECONDS = 10.0
"""From then on what a server said of its queue counts no more."""
MASK = 2**64 - 1


class CandidateServer(NamedTuple):
    """A server that could be asked."""

    url: str
    weight: float
    """How much it takes beside the others; see `weigh`."""
    load: float
    """Requests under way there."""
    limit: float = math.inf
    """As many requests at most; see `limit_load`."""


class ServerChoice(NamedTuple):
    """What `choose` found."""

    index: int
    """In the list of candidates."""
    first: bool
    """Whether it is what the session prefers to all others."""


def choose(
    session: int, candidates: Sequence[CandidateServer], *, sticky: bool = True
) -> ServerChoice | None:
    """The server for a request of this session; None where all are full.

    sticky: False for a request that shares nothing: the least loaded one, equal ones by hash.
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
    """How much a session prefers a server; the highest is first."""
    mixed = mix(mix(session & MASK) ^ seed(url))
    return -weight / math.log((mixed + 0.5) / 2**64)


def weigh(capacities: Sequence[float | None]) -> list[float]:
    """Weights whose mean is 1. A server that tells no capacity counts like the mean of the rest."""
    reported = [capacity for capacity in capacities if capacity]
    mean = sum(reported) / len(reported) if reported else 1.0
    return [(capacity or mean) / mean for capacity in capacities]


def limit_load(
    share: float, *, running: float, waiting: float, ranks: int, age: float, in_flight: float
) -> float:
    """How many requests of ours a server may have under way.

    share: its part of rollout.vllm.concurrency. running, waiting: as its /metrics said `age`
    seconds ago (infinity: never), in all its ranks. in_flight: requests of ours there. Where nothing
    waits the share alone counts; a server that others keep full still gets one request a rank. What
    it said too long ago is passed over: a broken exporter starves nobody.
    """
    most = BOUND * share + SLACK
    if age > FRESH_SECONDS or not waiting:
        return most
    target = TARGET_WAITING * ranks
    room = in_flight if waiting > target else running + target
    return min(most, max(room, float(ranks)))


@lru_cache(4096)
def seed(url: str) -> int:
    """64 bits of a URL, the same in every process."""
    return int.from_bytes(blake2b(url.encode(), digest_size=8).digest(), "little")


def mix(x: int) -> int:
    """64 bits that look random (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
