"""Places of a round on process 0, and the groups that fill them.

Replayed groups take their places first; the producer's slots fill the others. A stale group leaves
its place open for another slot. With several trained policies the groups of all places are divided
among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.generation.episodes import Group
from jaxtrain.generation.group_player import has_equal_rewards
from jaxtrain.generation.producer import Producer
from jaxtrain.generation.ray.remote_producer import RemoteProducer
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round_metrics import RoundTally, group_lag


@dataclass(frozen=True)
class RoundOptions:
    """Size of rounds, and which groups they take."""

    prompts_per_round: int
    parts: int = 1
    """Most parts of a streamed round."""
    max_lag: int | None = None
    """Groups with older tokens are dropped, if possible while they are played; None: none is."""
    num_replayed: int = 0
    """Places of a round for groups of the replay buffer, as far as it has some."""
    num_samples: int | None = 2
    """Samples of a round; None: all answers."""
    max_idle: int = 8
    """Rounds in a row without anything to learn from."""
    max_prompts: float | None = None
    """No round begins once so many prompts are done."""


class RoundPlaces:
    """Places of the current round."""

    def __init__(
        self, producer: Producer | RemoteProducer, replay: ReplayBuffer, options: RoundOptions
    ):
        self.producer, self.replay, self.options = producer, replay, options
        self.version = 0
        """Version of the policy that trains the round."""
        self._replayed: list[Group] = []
        """Replayed groups that no part has yet."""
        self._by_policy: dict[str, list[Group]] = {}
        """Groups for the policies whose parts come next."""
        self._open = self._unrequested = 0
        """Places that were not taken yet, and those not even requested."""

    def begin(self, version: int) -> None:
        """Open the places of a round that is trained under `version`."""
        self.version = version
        self._replayed = self.replay.draw(self.options.num_replayed, version)
        self._open = self.options.prompts_per_round - len(self._replayed)
        self._unrequested = self._open

    @property
    def taken(self) -> bool:
        """True if the round has no further part."""
        return not (self._open or self._replayed or self._by_policy)

    def take_part(self, tally: RoundTally) -> tuple[str, list[Group]]:
        """Return the policy that trains the next part, "" if there is only one, and its groups;
        none if the round has no more."""
        if not self._by_policy:
            groups = self._fill_share(tally)
            if not self.producer.rules.policies:
                return "", groups
            self._by_policy = self._divide(groups)
        if not self._by_policy:
            return "", []
        policy = next(iter(self._by_policy))
        return policy, self._by_policy.pop(policy)

    def _fill_share(self, tally: RoundTally) -> list[Group]:
        """Return replayed and fresh groups for a part's share of the round, fewer at its end."""
        share = self.options.prompts_per_round // self.options.parts
        groups, self._replayed = self._replayed[:share], self._replayed[share:]
        while self._open and len(groups) < share:
            groups += self._take_slots(min(self._open, share - len(groups)), tally)
        return groups

    def _take_slots(self, count: int, tally: RoundTally) -> list[Group]:
        """Return the groups of the next `count` places, replayed ones for flat ones."""
        # All places of a round are requested with its first slots, so that they are played at once;
        # later calls only request what stale groups have left open.
        slots = self.producer.next_slots(count, self._unrequested)
        self._open -= count
        self._unrequested = 0
        tally.slots += slots
        groups: list[Group] = []
        num_flat = 0
        for slot in slots:
            tally.drops.update(slot.dropped)
            if slot.group is None:
                num_flat += bool(slot.flat)
            elif self._is_stale(slot.group):
                tally.drops["stale"] += 1
                self._open += 1
                self._unrequested += 1
            else:
                groups.append(slot.group)
        return groups + self.replay.draw(num_flat, self.version)

    def _is_stale(self, group: Group) -> bool:
        # The producer cancels what is too old when weights are published; a group that finished
        # just before that is caught here.
        max_lag = self.options.max_lag
        return max_lag is not None and group_lag(group, self.version) > max_lag

    def _divide(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        """Return what each policy can learn from, in the order of the policies."""
        rules, by_policy = self.producer.rules, {}
        for policy in rules.policies:
            parts = [part for group in groups if (part := group.of(policy)) is not None]
            if rules.drop_flat:
                # A game whose total is informative may still reward one of its policies equally.
                parts = [part for part in parts if not has_equal_rewards(part, rules)]
            if parts:
                by_policy[policy] = parts
        return by_policy
