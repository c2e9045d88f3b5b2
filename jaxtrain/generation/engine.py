"""Engines that answer prompts: requests, completions, and how an engine is opened."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtrain.config import Config, SamplingConfig
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.publisher import Publisher

Sampling = SamplingConfig

"""How tokens are drawn: temperature, then top_k, then top_p on what top_k left, then min_p."""

FinishReason = Literal["stop", "length"]
Likely = Sequence[tuple[int, float]]
"""The most probable tokens of a place, with their log-probs, the best first."""
MAX_LIKELY = 20
"""Most tokens of a place that can be asked for."""


class PromptRequest(NamedTuple):
    """A prompt to be played."""

    draw: int
    """Number of the prompt in the order of the run."""
    attempt: int
    """0, or more when it is repeated because no episode was rewarded."""
    row: dict[str, Any]
    dataset: int = 0
    """Index of the prompt's dataset."""
    index: int = 0
    """Number of the row in the dataset."""

    @property
    def key(self) -> str:
        """Name of the prompt in every epoch: "0:17"."""
        return f"{self.dataset}:{self.index}"


class Completion(NamedTuple):
    """An answer: Completion(tokens=[52, 7, 2], logprobs=[-0.1, -1.2, -0.01], finish_reason="stop",
    versions=(3, 3, 4)) for a prompt that the model continued by tokens 52 and 7 and the end-of-turn
    token 2, the last of which it drew after its weights had been replaced."""

    tokens: list[int]
    """Without the prompt, with the token that ended it."""
    logprobs: list[float]
    """Of each token under softmax(logits / temperature) over the whole vocabulary: the policy's own
    distribution, before top_k, top_p and min_p cut it. At temperature 0, of softmax(logits).
    With Sampling.structured_outputs over the tokens that were allowed alone, at either. NaN
    where the engine has none: such tokens are not trained."""
    finish_reason: FinishReason
    """stop: an end token or a stop text; length: max_new_tokens or the model's longest row."""
    versions: Sequence[int] = ()
    """Version of the policy that drew each token; empty if versions are not tracked."""
    routed: Any = None
    """Experts to which each token of the prompt and the answer but the last was routed, as in
    data.routes; None if the engine does not record them."""
    likely: Sequence[Likely] = ()
    """The most probable tokens of each token's place, with log-probs as above; empty if they were
    not asked for."""


class Engine(Protocol):
    """Anything that continues one prompt at a time for many coroutines."""

    @property
    def version(self) -> int:
        """Version of the policy that it samples from now; -1 before the first publish."""
        ...

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """Continue a prompt; raises EpisodeFailed when this one request cannot be answered and
        RunStopped when none can.

        index: number of the episode. The same (index, prompt, seed, weights) give the same answer
        where the engine can promise that. An engine whose `reports_likely` is true also takes
        `likely`: how many of the most probable tokens of each place the answer shall list. One
        whose `reads_images` is true takes `images`, the packing.tree.PlacedImages of the prompt.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Cumulative numbers for the metrics: {"vllm/retries": 3.0}."""
        ...

    async def close(self) -> None:
        """Close connections, within the event loop that generated; requests under way end with
        EpisodeFailed."""
        ...


class PolicyReply(NamedTuple):
    """Reply of a frozen policy."""

    text: str
    finished: bool
    """False: it was cut off."""


@runtime_checkable
class FrozenPolicy(Protocol):
    """A policy that is never trained, and may be any model: requests are messages."""

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """Return its next turn. index: number of the episode. Raises EpisodeFailed if there is
        none, RunStopped if no request can be answered."""
        ...


class KeptEngine(Engine, Protocol):
    """A part of an engine that keeps its version; it raises KeepLost where it cannot."""

    def release(self) -> None:
        """The version is not needed any more."""
        ...


@runtime_checkable
class KeepsVersions(Protocol):
    """An engine that can spare a part of itself for an evaluation while training goes on."""

    def keep(self) -> KeptEngine | None:
        """A part that answers by the newest version alone, until it is released; called on the loop
        thread between rounds. None: there is nothing to spare now."""
        ...


class KeepLost(RunStopped):
    """Raised when no server has the kept version any more; its requests must be repeated."""


class SharedServers(NamedTuple):
    """Access of other processes to an engine's servers."""

    sender: Any
    """Object with `table()`, which returns (number, plain data), and `hear(reports)`."""
    opener: str
    """"package.module:Class" of (settings, the process's name): its `engine`, `update(table)` and
    `reports()`."""
    settings: Any
    """Plain data."""


class EngineKind(ABC):
    """A kind of engine by rollout.engine; plugins give a class of this kind."""

    several: bool = False
    """True if it draws with several adapters on one base: one engine for each trained policy, and a
    publisher that gets {policy: params}."""
    serves: bool = True
    """True if it keeps weights of its own, so that evaluations can use it as well."""

    def reserved(self, config: Config) -> int:
        """Return how many devices of this process the trainer must leave to it."""
        return 0

    def ahead(self, config: Config) -> bool:
        """Return True if answers are drawn while the trainer trains."""
        return True

    def check(self, config: Config, parts: Any) -> None:
        """Raise UserError for what cannot work, as far as it shows without weights; in a dry run,
        too."""
        return

    def share(self, engine: Any, workers: int) -> SharedServers:
        """Return access for so many workers in other processes; raises UserError if only this
        process can use the engine."""
        raise UserError(
            f"rollout.service: an engine of kind {type(self).__name__} is this process's alone; set"
            ' rollout.service to "process"'
        )

    @abstractmethod
    def open(
        self, config: Config, parts: Any, log: Callable[[str], None]
    ) -> tuple[Engine | None, Publisher]:
        """The engine, and what brings weights to it; nothing is published yet.

        Every process opens it; on all but process 0 there is no engine, and the publisher only
        takes part in gathering. parts: core.assemble.Parts of the trained model. Nothing may be
        asked of the engine before the first publish. Raises UserError for what cannot work.
        """


class EpisodeFailed(Exception):
    """An episode failed through no fault of the policy; its text is a short reason to count:
    "server gone", "environment timed out". It is played again, or dropped and counted."""

    def __init__(
        self,
        reason: str,
        *,
        cause: str = "",
        trace: str = "",
        pause: bool = False,
        again: bool = True,
        mistake: bool = False,
    ):
        super().__init__(reason)
        self.cause = cause
        """Description for users: key of the environment, reward or server, and its message."""
        self.trace = trace
        """End of the traceback, if user code raised an exception."""
        self.pause = pause
        """True if a retry should wait first, as after a refused connection."""
        self.again = again
        """True if a retry can help."""
        self.mistake = mistake
        """True if the user must fix something; the run ends if no episode has ever worked."""


def pause_before(attempt: int) -> float:
    """Return the seconds to wait before try number `attempt`, from 1, of what failed in a way that
    may pass: 1, 2, 4, ..."""
    return 2.0 ** (attempt - 1)
