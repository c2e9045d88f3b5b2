"""What goes into a sampler and what comes out, from one answer to a group; no jax here.

row ──Env.run──> Episode ─┐  (Engine.generate, as often as the episode has turns)
row ──Env.run──> Episode ─┼─ rewards ─> Group ─ advantages ─> tree ─> Batch
row ──Env.run──> Episode ─┘
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jaxtrain.config import Config, SamplingConfig
from jaxtrain.errors import RunStopped, UserError

Sampling = SamplingConfig
"""How tokens are drawn: temperature, then top_k, then top_p on what top_k left, then min_p."""

FinishReason = Literal["stop", "length"]


class Ask(NamedTuple):
    """One prompt to be asked."""

    draw: int
    """Its number in the order of the run."""
    attempt: int
    """0, or more when it is asked again because no episode was rewarded."""
    row: dict[str, Any]
    dataset: int = 0
    """Index of the dataset that it comes from."""
    index: int = 0
    """Number of its row there."""

    @property
    def key(self) -> str:
        """What names the prompt in every epoch: "0:17"."""
        return f"{self.dataset}:{self.index}"


class Completion(NamedTuple):
    """One answer: Completion(tokens=[52, 7, 2], logprobs=[-0.1, -1.2, -0.01], finish_reason="stop",
    versions=(3, 3, 4)) for a prompt that the model continued by tokens 52 and 7 and the end-of-turn
    token 2, the last of which it drew after its weights had been replaced."""

    tokens: list[int]
    """Without the prompt, with the token that ended it."""
    logprobs: list[float]
    """Of each token under softmax(logits / temperature) over the whole vocabulary: the policy's own
    distribution, before top_k, top_p and min_p cut it. At temperature 0, of softmax(logits)."""
    finish_reason: FinishReason
    """stop: an end token or a stop text; length: max_new_tokens or the model's longest row."""
    versions: Sequence[int] = ()
    """Version of the policy that drew each token; empty where nobody counts versions."""
    routed: Any = None
    """Where the engine records it: the experts that each token of the prompt and the answer but the
    last went to, as data.routes has them."""


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
        where the engine can promise that.
        """
        ...

    def counters(self) -> dict[str, float]:
        """Cumulative numbers for the metrics: {"vllm/retries": 3.0}."""
        ...

    async def close(self) -> None:
        """Let go of connections, within the event loop that generated; requests under way end with
        EpisodeFailed."""
        ...


class Reply(NamedTuple):
    """What a frozen policy said."""

    text: str
    finished: bool
    """False: it was cut off."""


@runtime_checkable
class Speaker(Protocol):
    """A policy that is never trained, and may be any model: it is asked by messages."""

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> Reply:
        """Its next turn. index: number of the episode. Raises EpisodeFailed where it cannot be had,
        RunStopped where none can."""
        ...


class KeptEngine(Engine, Protocol):
    """A part of an engine that keeps its version; it raises KeepLost where it cannot."""

    def release(self) -> None:
        """The version is not needed any more."""
        ...


@runtime_checkable
class Keeping(Protocol):
    """An engine that can spare a part of itself for an evaluation while training goes on."""

    def keep(self) -> KeptEngine | None:
        """A part that answers by the newest version alone, until it is released; called on the loop
        thread between rounds. None: there is nothing to spare now."""
        ...


class KeepLost(RunStopped):
    """Nobody holds the kept version any more: what was asked of it must be asked anew."""


class Publisher(Protocol):
    """Brings weights to the engine; called on the loop thread between rounds."""

    def publish(self, version: int, params: Any, rebuild: Any) -> dict[str, float]:
        """Return when the engine samples from `version`, or once `params` may change where all
        requests made from then on wait for it; metrics such as {"sync/seconds": 0.4}.

        params and rebuild: parameters by path, and what makes a model of them. Raises RunStopped
        or UserError when the engine cannot be brought there.
        """
        ...

    def sleep(self) -> None:
        """A round was collected and is about to be trained: an engine on the trainer's own device
        may give back its memory until the next publish."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DraftPublisher(Publisher, Protocol):
    """That of an engine which guesses with a draft."""

    def use_draft(self, draft: Any) -> None:
        """Guess with this draft from the next publish on, a core.roles.Held whose weights may
        change after that; on every process."""
        ...


class Shared(NamedTuple):
    """How processes elsewhere ask the same servers as an engine."""

    sender: Any
    """Has `table()`, (number, plain data), and `hear(reports)`: what travels between them."""
    opener: str
    """"package.module:Class" of (settings, the process's name): its `engine`, `update(table)` and
    `reports()`."""
    settings: Any
    """Plain data."""


class EngineKind(ABC):
    """How an engine is opened; from outside: an own class of this kind, by rollout.engine."""

    several: bool = False
    """Whether it draws with several adapters on one base: Company of an engine for each trained
    policy, and a publisher that gets {policy: params}."""
    serves: bool = True
    """Whether it keeps weights of its own, so that evaluations may ask it, too."""

    def reserved(self, config: Config) -> int:
        """Devices of this process that the trainer must leave to it."""
        return 0

    def ahead(self, config: Config) -> bool:
        """Whether answers are drawn while the trainer trains."""
        return True

    def check(self, config: Config, parts: Any) -> None:
        """UserError for what cannot work, as far as it shows without weights; in a dry run, too."""
        return

    def share(self, engine: Any, workers: int) -> Shared:
        """For so many workers in other processes; UserError where only this process can ask it."""
        raise UserError(
            f"rollout.service: an engine of kind {type(self).__name__} is this process's alone; set"
            ' rollout.service to "process"'
        )

    @abstractmethod
    def open(
        self, config: Config, parts: Any, say: Callable[[str], None]
    ) -> tuple[Engine | None, Publisher]:
        """The engine, and what brings weights to it; nothing is published yet.

        Every process opens it; on all but process 0 there is no engine, and the publisher only
        takes part in gathering. parts: core.assemble.Parts of the trained model. Nothing may be
        asked of the engine before the first publish. Raises UserError for what cannot work.
        """


class EpisodeFailed(Exception):
    """An episode came to nothing through no fault of the policy; its text is a short reason to
    count: "server gone", "environment timed out". It is played again, or dropped and counted."""

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
        """For people: which environment, reward or server, by its key, and what it said."""
        self.trace = trace
        """The end of the traceback, where somebody's code raised something."""
        self.pause = pause
        """Whether another try is worth a pause before it, as after a connection was refused."""
        self.again = again
        """Whether another try can help."""
        self.mistake = mistake
        """Whether a person must mend something: where nothing has ever worked, the run ends."""


def pause_before(attempt: int) -> float:
    """Seconds to wait before try number `attempt`, from 1, of what has failed in a way that may
    pass: 1, 2, 4, ..."""
    return 2.0 ** (attempt - 1)


@dataclass(eq=False)
class TokenSequence:
    """Tokens as the policy saw them, of which it drew some; all lists are equally long."""

    tokens: list[int]
    """Prompt included, exactly as the policy saw and drew them: never re-tokenised."""
    sampled: list[bool]
    """Whether the policy drew the token, here: these are trained."""
    logprobs: list[float]
    """The sampler's log-prob of each drawn token; 0.0 elsewhere."""
    versions: list[int]
    """Policy version of each drawn token; -1 elsewhere and where it is not known."""
    turns: list[int] = field(default_factory=list)
    """Number of the turn that each drawn token belongs to, from 0; -1 elsewhere. Empty: nobody
    counts turns, all are the first."""
    routed: Any = None
    """A record of data.routes; None: there is none."""


@dataclass(eq=False)
class Episode:
    """One played episode, single turn or many.

    Episode(tokens=[1, 5, 52, 7, 2], sampled=[False, False, True, True, True],
            logprobs=[0, 0, -0.1, -1.2, -0.01], versions=[-1, -1, 3, 3, 3], finish_reason="stop",
            completion="7 it is")

    Where a chat template rewrites what was said earlier (Qwen3's drops thoughts), a turn is drawn
    behind other tokens than the last one, and the episode has several sequences: `earlier` and the
    one of the episode's own lists. A token that was drawn is `sampled` in one of them, the one that
    it was drawn in; wherever else it stands it is context.
    """

    tokens: list[int]
    """See TokenSequence, also for the next three."""
    sampled: list[bool]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    """Of the last turn: "length" means that the answer was cut off."""
    completion: Any = ""
    """What reward functions get: text, or a list of messages for conversations."""
    prompt: Any = ""
    """What reward functions get as prompt: text, or a list of messages."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Rewards that the environment gives the whole episode itself, by name."""
    metrics: dict[str, float | tuple[float, float]] = field(default_factory=dict)
    """Other numbers to be averaged and logged, such as {"turns": 2, "accuracy": (1, 3)}: a pair is
    a (sum, weight), here one of three questions, and the mean is that over all questions."""
    turns: list[int] = field(default_factory=list)
    """As TokenSequence.turns."""
    turn_rewards: list[dict[str, float]] = field(default_factory=list)
    """Rewards that the environment gives single turns, by name: entry k is turn k's. They come on
    top of `rewards`; a name may be in both."""
    earlier: list[TokenSequence] = field(default_factory=list)
    """The sequences before the last one, in the order in which they were begun."""
    given: bool = False
    """Whether nobody drew it: the answer is the data's own. Its `sampled` tokens train all the
    same; `logprobs` and `versions` say nothing."""
    routed: Any = None
    """As TokenSequence.routed."""
    policy: str = ""
    """Whose turns were drawn, by its name in section policies; "": the first that is trained."""
    agent: str = ""
    """Which of several agents spoke, where one policy plays them all: an agent's episodes of a
    prompt are compared with each other, not with those of other agents."""
    others: list["Episode"] = field(default_factory=list)
    """The further episodes of the same game, of whatever policies: see as_game."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """All of them, in the order in which they were begun."""
        own = TokenSequence(
            self.tokens, self.sampled, self.logprobs, self.versions, self.turns, self.routed
        )
        return [*self.earlier, own]

    @property
    def all_rewards(self) -> dict[str, float | None]:
        """The environment's rewards by name, those of turns added up."""
        found = dict(self.rewards)
        for rewards in self.turn_rewards:
            for name, value in rewards.items():
                found[name] = (found.get(name) or 0.0) + value
        return found

    @property
    def drawn_tokens(self) -> list[int]:
        """The tokens that the policy drew, in order."""
        return [
            token
            for one in self.sequences
            for token, drawn in zip(one.tokens, one.sampled, strict=True)
            if drawn
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, each by itself."""
        return sum(len(one.tokens) for one in self.sequences)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        return sum(sum(one.sampled) for one in self.sequences)

    @property
    def min_version(self) -> int:
        """Oldest policy version of a drawn token; -1 where none is known."""
        known = (v for one in self.sequences for v in one.versions if v >= 0)
        return min(known, default=-1)


def as_game(found: Any) -> Any:
    """The episodes of one game as the first of them, which has the others; anything else as it
    is."""
    if not isinstance(found, list | tuple) or not found:
        return found
    first, *others = found
    if isinstance(first, Episode):
        first.others = others
    return first


class Env(Protocol):
    """The world: plays one episode of a row with an engine.

    It may have `close()`, called when the run ends, and `remote = True` where it plays in servers,
    so that a dry run does not play an episode.
    """

    async def run(
        self, row: dict[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play. Many run side by side in one event loop, so nothing in here may block. A game of
        several policies is several episodes, one list, each with its `policy`.

        index: number of the episode, to be handed to engine.generate. Raises EpisodeFailed.
        """
        ...


@dataclass(eq=False)
class Group:
    """The episodes of one prompt with their rewards, ready to be compared."""

    draw: int
    """Number of the prompt in the order of the run."""
    row: dict[str, Any]
    episodes: list[Episode]
    rewards: list[dict[str, float | None]]
    """One dict of rewards by name for each episode; None: that reward had nothing to say."""
    advantages: Any = None
    """float64 [G], or [G, turns] where single turns are rewarded; filled when the round is
    complete."""
    totals: Any = None
    """float64 [G] weighted sum of the rewards."""
    replayed: bool = False
    """Whether it was trained before and came out of the replay buffer."""
    dataset: int = 0
    """Index of the prompt's dataset in data.datasets."""
    truth: Episode | None = None
    """What the data say the answer is, of methods that compare with it."""

    @property
    def min_version(self) -> int:
        """Oldest policy version of a drawn token; -1 where none is known."""
        return min((e.min_version for e in self.episodes if e.min_version >= 0), default=-1)

    @property
    def sizes(self) -> list[int]:
        """Numbers of episodes that are compared with each other, in order: those of one agent."""
        return [len(list(own)) for _, own in groupby(one.agent for one in self.episodes)]

    def of(self, policy: str) -> "Group | None":
        """The group of one policy: its episodes alone; None where it has none."""
        return self._keep([i for i, one in enumerate(self.episodes) if one.policy == policy])

    def of_agent(self, agent: str) -> "Group | None":
        """The group of one agent; None where it has no episode."""
        return self._keep([i for i, one in enumerate(self.episodes) if one.agent == agent])

    def _keep(self, own: Sequence[int]) -> "Group | None":
        episodes = [self.episodes[i] for i in own]
        rewards = [self.rewards[i] for i in own]
        return replace(self, episodes=episodes, rewards=rewards) if own else None
