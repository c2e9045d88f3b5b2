"""Curators: which of the prompts that come up are worth playing now, by what was earned on them.

    PromptOrder.next ── choose(request) ──no──> left out, counted; it comes up again next epoch
                            │ yes
                        played, judged ──> learn(request, rewards), once its slot is done

What a curator has learned is part of the cursor in every checkpoint. Its random choices depend on
its seed and the number of the draw alone, so that in mode sync a resumed run chooses as one that
was never stopped; ahead of the trainer prompts are chosen before the last rounds were learned from.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from jaxtrain import plugins
from jaxtrain.config.construct import make
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import PromptRequest

KEY = "rollout.curator"


class Curator(Protocol):
    """A class, made with (seed, **rollout.curator_options). Its methods are called one at a time,
    but from two threads."""

    def choose(self, request: PromptRequest) -> bool:
        """Return whether to play this prompt now; `request.key` names it through all epochs."""
        ...

    def learn(self, request: PromptRequest, rewards: Sequence[float]) -> None:
        """Take in what the episodes of a prompt earned, each a weighted sum of its rewards."""
        ...

    def state(self) -> Any:
        """Return everything it has learned, JSON-able."""
        ...

    def restore(self, state: Any) -> None:
        """Continue from a state."""
        ...


def chance(seed: int, draw: int) -> float:
    """Return a number in [0, 1) for a draw."""
    return float(np.random.default_rng((seed, draw)).random())


class SkipSolved(Curator):
    """Leaves out prompts that the policy solves nearly always.

    The share of solving episodes is averaged over the times that a prompt was played, with newer
    ones counting more. Above `bound` it is played only every `every`-th time that it comes up, to
    check whether it is still solved.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        threshold: float = 1.0,
        bound: float = 0.9,
        weight: float = 0.5,
        every: int = 4,
    ):
        """threshold: an episode that earns at least this solves its prompt. weight: of the newest
        group in the average."""
        check_range("bound", bound, 0, 1)
        check_range("weight", weight, 0, 1)
        check_range("every", every, 1, 10**9)
        self.threshold, self.bound, self.weight, self.every = threshold, bound, weight, every
        self._found: dict[str, tuple[float, int]] = {}
        """Average, and how often it was left out since, of the prompts that were asked."""

    @override
    def choose(self, request: PromptRequest) -> bool:
        share, skipped = self._found.get(request.key, (0.0, 0))
        if share <= self.bound:
            return True
        self._found[request.key] = (share, (skipped + 1) % self.every)
        return skipped + 1 == self.every

    @override
    def learn(self, request: PromptRequest, rewards: Sequence[float]) -> None:
        solved = sum(reward >= self.threshold for reward in rewards) / len(rewards)
        before, skipped = self._found.get(request.key, (solved, 0))
        self._found[request.key] = (before + self.weight * (solved - before), skipped)

    @override
    def state(self) -> dict[str, Any]:
        return {key: list(entry) for key, entry in self._found.items()}

    @override
    def restore(self, state: dict[str, Any]) -> None:
        self._found = {key: (float(share), int(skipped)) for key, (share, skipped) in state.items()}


class Greso(Curator):
    """Leaves out prompts whose groups keep having equal rewards (GRESO, arXiv 2506.02177).

    After z flat groups in a row a prompt is left out with probability 1 - explore^z, but played
    with at least `floor`. One group with different rewards makes it an ordinary prompt again.
    """

    def __init__(self, seed: int = 0, *, explore: float = 0.5, floor: float = 0.05):
        check_range("explore", explore, 0, 1)
        check_range("floor", floor, 0, 1)
        self.seed, self.explore, self.floor = seed, explore, floor
        self._flat: dict[str, int] = {}
        """Flat groups in a row of the prompts whose last one was flat."""

    @override
    def choose(self, request: PromptRequest) -> bool:
        flat = self._flat.get(request.key, 0)
        return chance(self.seed, request.draw) < max(self.floor, self.explore**flat)

    @override
    def learn(self, request: PromptRequest, rewards: Sequence[float]) -> None:
        if max(rewards) - min(rewards) < 1e-6:
            self._flat[request.key] = self._flat.get(request.key, 0) + 1
        else:
            self._flat.pop(request.key, None)

    @override
    def state(self) -> dict[str, int]:
        return dict(self._flat)

    @override
    def restore(self, state: dict[str, int]) -> None:
        self._flat = {key: int(count) for key, count in state.items()}


CURATORS = {"all": None, "solved": SkipSolved, "greso": Greso}


class GuardedCurator(Curator):
    """A plugin's curator: what it raises ends the run with its name."""

    def __init__(self, curator: Curator, name: str):
        self.curator, self.name = curator, name

    @override
    def choose(self, request: PromptRequest) -> bool:
        return bool(self._call("choose", request))

    @override
    def learn(self, request: PromptRequest, rewards: Sequence[float]) -> None:
        self._call("learn", request, rewards)

    @override
    def state(self) -> Any:
        state = self._call("state")
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{KEY} {self.name!r}: what state() returns is no JSON: {error}"
            ) from None

    @override
    def restore(self, state: Any) -> None:
        self._call("restore", state)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.curator, method)(*arguments)
        except plugins.FAILURES as error:  # the border: whatever foreign code may raise
            text = f"{KEY} {self.name!r}, {method}(): {plugins.describe(error)}"
            raise UserError(text) from error


def open_curator(name: str, options: dict[str, Any], seed: int) -> Curator | None:
    """Open the curator that rollout.curator names, None if all prompts are played; raises
    UserError."""
    if name == "all":
        if options:
            raise UserError(f'{KEY}_options has no effect while {KEY} is "all"; remove it')
        return None
    curator_class = plugins.find("curators", name, CURATORS, key=KEY)
    curator = make(
        curator_class,
        seed,
        options=options,
        key=f"{KEY} {name!r}",
        options_key=f"{KEY}_options",
        argument_names="seed",
    )
    for method in ("choose", "learn", "state", "restore"):
        if not callable(getattr(curator, method, None)):
            raise UserError(f"{KEY} {name!r} has no method {method}; see docs/extending.md")
    return curator if name in CURATORS else GuardedCurator(curator, name)


def check_range(option: str, value: Any, low: float, high: float) -> None:
    """Raise UserError for an option that is no number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"{KEY}_options.{option} is {value!r}; it must be from {low} to {high}")
