"""Inputs and outputs of sampling, from one answer to a group; without jax.

row ──Env.run──> Episode ─┐  (Engine.generate, as often as the episode has turns)
row ──Env.run──> Episode ─┼─ rewards ─> Group ─ advantages ─> tree ─> Batch
row ──Env.run──> Episode ─┘
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.generation.engine import Engine, PromptRequest, Sampling
from jaxtrain.generation.version_tracker import VersionTracker


@dataclass(eq=False)
class TokenSequence:
    """Tokens as the policy saw them, of which it drew some; all lists are equally long."""

    tokens: list[int]
    """Prompt included, exactly as the policy saw and drew them: never re-tokenized."""
    sampled: list[bool]
    """True for tokens that the policy drew in this sequence; these are trained."""
    logprobs: list[float]
    """The sampler's log-prob of each drawn token; 0.0 elsewhere."""
    versions: list[int]
    """Policy version of each drawn token; -1 elsewhere and if unknown."""
    turns: list[int] = field(default_factory=list)
    """Number of the turn that each drawn token belongs to, from 0; -1 elsewhere. Empty if turns
    are not counted; all tokens are then of the first."""
    routed: Any = None
    """Record of data.routes, or None."""
    images: PlacedImages | None = None
    """Images of its first tokens; later ones are text."""


@dataclass(eq=False)
class Episode:
    """A played episode, single turn or many.

    Episode(tokens=[1, 5, 52, 7, 2], sampled=[False, False, True, True, True],
            logprobs=[0, 0, -0.1, -1.2, -0.01], versions=[-1, -1, 3, 3, 3], finish_reason="stop",
            completion="7 it is")

    If a chat template rewrites earlier turns (Qwen3's drops thoughts), a turn is drawn behind other
    tokens than the last one, and the episode has several sequences: `earlier`, and the one of the
    episode's own lists. A drawn token is `sampled` in the one sequence that it was drawn in; in the
    others it is context.
    """

    tokens: list[int]
    """As in TokenSequence, like the next three."""
    sampled: list[bool]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    """Of the last turn: "length" means that the answer was cut off."""
    completion: Any = ""
    """Completion for reward functions: text, or a list of messages for conversations."""
    prompt: Any = ""
    """Prompt for reward functions: text, or a list of messages."""
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
    """The sequences before the last one, in the order in which they began."""
    given: bool = False
    """Whether the answer comes from the data instead of a model. Its `sampled` tokens still train;
    `logprobs` and `versions` are meaningless."""
    routed: Any = None
    """As TokenSequence.routed."""
    images: PlacedImages | None = None
    """As TokenSequence.images."""
    policy: str = ""
    """Name in section policies of the policy that drew the turns; "": the first trained one."""
    agent: str = ""
    """Agent that spoke, if a policy plays several: episodes of a prompt are compared only within
    the same agent."""
    others: list["Episode"] = field(default_factory=list)
    """Further episodes of the same game, of any policy: see as_game."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """Return all sequences, in the order in which they began."""
        last = TokenSequence(
            self.tokens,
            self.sampled,
            self.logprobs,
            self.versions,
            self.turns,
            self.routed,
            self.images,
        )
        return [*self.earlier, last]

    @property
    def all_rewards(self) -> dict[str, float | None]:
        """Return the environment's rewards by name, with those of turns added up."""
        totals = dict(self.rewards)
        for rewards in self.turn_rewards:
            for name, value in rewards.items():
                totals[name] = (totals.get(name) or 0.0) + value
        return totals

    @property
    def drawn_tokens(self) -> list[int]:
        """The tokens that the policy drew, in order."""
        return [
            token
            for sequence in self.sequences
            for token, drawn in zip(sequence.tokens, sequence.sampled, strict=True)
            if drawn
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, each by itself."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        return sum(sum(sequence.sampled) for sequence in self.sequences)

    @property
    def min_version(self) -> int:
        """Oldest policy version of a drawn token; -1 where none is known."""
        versions = (v for sequence in self.sequences for v in sequence.versions if v >= 0)
        return min(versions, default=-1)


def as_game(played: Any) -> Any:
    """Return the episodes of one game as the first of them, with the others attached; anything else
    unchanged."""
    if not isinstance(played, list | tuple) or not played:
        return played
    first, *rest_of_game = played
    if isinstance(first, Episode):
        first.others = rest_of_game
    return first


class Env(Protocol):
    """Environment that plays one episode of a row with an engine.

    It may have `close()`, called when the run ends, and `remote = True` if it plays in servers, so
    that a dry run does not play an episode.
    """

    async def run(
        self, row: dict[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play. Many episodes run in one event loop at once, so nothing in here may block. A game
        of several policies is several episodes, one list, each with its `policy`.

        index: number of the episode, to be passed to engine.generate. Raises EpisodeFailed.
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
    """One dict of rewards by name for each episode; None: the reward does not apply."""
    advantages: Any = None
    """float64 [G], or [G, turns] where single turns are rewarded; filled when the round is
    complete."""
    totals: Any = None
    """float64 [G] weighted sum of the rewards."""
    replayed: bool = False
    """True if it was trained before and comes from the replay buffer."""
    dataset: int = 0
    """Index of the prompt's dataset in data.datasets."""
    truth: Episode | None = None
    """Ground truth of the data, for methods that compare answers with it."""

    @property
    def min_version(self) -> int:
        """Oldest policy version of a drawn token; -1 where none is known."""
        return min((e.min_version for e in self.episodes if e.min_version >= 0), default=-1)

    @property
    def sizes(self) -> list[int]:
        """Numbers of episodes that are compared with each other, in order: those of one agent."""
        return [
            len(list(members)) for _, members in groupby(episode.agent for episode in self.episodes)
        ]

    def of(self, policy: str) -> "Group | None":
        """Return the group of one policy, with its episodes alone; None if it has none."""
        return self._keep(
            [i for i, episode in enumerate(self.episodes) if episode.policy == policy]
        )

    def of_agent(self, agent: str) -> "Group | None":
        """Return the group of one agent; None if it has no episode."""
        return self._keep([i for i, episode in enumerate(self.episodes) if episode.agent == agent])

    def _keep(self, indices: Sequence[int]) -> "Group | None":
        episodes = [self.episodes[i] for i in indices]
        rewards = [self.rewards[i] for i in indices]
        return replace(self, episodes=episodes, rewards=rewards) if indices else None


@dataclass(eq=False)
class RoundSlot:
    """A place in a round, and what filled it."""

    group: Group | None
    """None: dropped, for a reason that `dropped` counts."""
    requests: list[PromptRequest]
    """Prompts that it used, all of them done once the slot is marked so."""
    flat: list[Group] = field(default_factory=list)
    """Groups whose rewards were all equal."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups left out, by reason."""
    redone: int = 0
    """Episodes that failed and were played again."""
    tracker: VersionTracker = field(default_factory=VersionTracker)
    """Versions of what is being played."""

    @property
    def min_version(self) -> int:
        """Oldest version of what is to be trained; -1 if nothing is, or versions are unknown."""
        return -1 if self.group is None else self.group.min_version
