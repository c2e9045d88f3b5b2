"""Replay buffer: informative groups that may stand in for those nothing can be learned from."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.generation.episode_codec import pack, unpack
from jaxtrain.generation.episodes import Group


class ReplayBuffer:
    """The `size` most informative groups of the last `max_lag` rounds.

    A group's score is sum |advantage| x standard deviation of its rewards. A stored group keeps the
    sampler's own log-probs, so that the importance weight stays that of the policy that drew it.
    The buffer is part of the cursor in every checkpoint: a resumed run draws what it would have.
    """

    def __init__(self, size: int, max_lag: int, seed: int = 0):
        self.size, self.max_lag, self.seed = size, max_lag, seed
        self._heap: list[tuple[float, int, int, Group]] = []
        self._count = 0
        self._drawn: tuple[int, set[int]] = (-1, set())
        self._packed: dict[int, Any] = {}
        """Groups of the heap as JSON, by their number: each is packed once."""

    def __len__(self) -> int:
        return len(self._heap)

    def store(self, groups: Sequence[Group], version: int) -> None:
        """Store fresh groups with advantages, trained under `version`, while they are among the
        best so far; a full buffer drops the least informative one."""
        for group in groups:
            spread = float(np.std(group.totals, ddof=1)) if len(group.totals) > 1 else 0.0
            sizes_G = np.abs(np.reshape(group.advantages, (len(group.advantages), -1))).mean(1)
            score = float(sizes_G.sum()) * spread
            if self.size == 0 or group.replayed or not score > 0:
                continue
            self._count += 1
            entry = (score, self._count, version, group)
            if len(self._heap) < self.size:
                heapq.heappush(self._heap, entry)
            elif score > self._heap[0][0]:
                heapq.heapreplace(self._heap, entry)

    def draw(self, count: int, version: int) -> list[Group]:
        """Draw at most `count` different groups, with probabilities in proportion to their score,
        each marked as replayed.

        Groups older than max_lag are dropped first. No group is returned twice under a version, or
        under the one that trained it first.
        """
        self._heap = [e for e in self._heap if version - e[2] <= self.max_lag]
        heapq.heapify(self._heap)
        if self._drawn[0] != version:
            self._drawn = (version, set())
        drawn = self._drawn[1]
        fresh = [e for e in self._heap if e[2] < version and e[1] not in drawn]
        entries = sorted(fresh, key=lambda entry: entry[1])
        count = min(count, len(entries))
        if count == 0:
            return []
        scores = np.array([max(score, 1e-8) for score, *_ in entries])
        rng = np.random.default_rng((self.seed, version, len(drawn)))
        chosen = rng.choice(len(entries), count, replace=False, p=scores / scores.sum())
        groups = []
        for index in chosen:
            _, number, _, old = entries[index]
            drawn.add(number)
            groups.append(
                Group(
                    old.draw, old.row, old.episodes, old.rewards, replayed=True, dataset=old.dataset
                )
            )
        return groups

    def state(self) -> dict[str, Any]:
        """Return a JSON-able state: the groups with all that drawing and training them needs."""
        self._packed = {
            number: self._packed.get(number) or pack(group) for _, number, _, group in self._heap
        }
        entries = [[*entry[:3], self._packed[entry[1]]] for entry in sorted(self._heap)]
        version, drawn = self._drawn
        return {"entries": entries, "count": self._count, "drawn": [version, *sorted(drawn)]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with these groups, the best `size` of them."""
        entries = [(*entry[:3], unpack(entry[3])) for entry in state["entries"]]
        self._heap = heapq.nlargest(self.size, entries)
        heapq.heapify(self._heap)
        version, *drawn = state["drawn"]
        self._count, self._drawn = state["count"], (version, set(drawn))
