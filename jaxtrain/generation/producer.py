"""From prompts to groups: asyncio slots that play episodes, judge them and drop the useless.

    prompts ─> slot ─┐  G x Env.run, rewards,        finished groups           the loop
    prompts ─> slot ─┼─ zero-advantage filter   ──>  (at most `ahead` more ──> take(n)
    prompts ─> slot ─┘  refill, retries               than were asked for)

A slot is a place in a round: it gives one group, or the reason why there is none. Slots are started
by take() alone, and never more than were asked for so far plus `ahead`; that bound is the bounded
queue. With ahead = 0 a round is drawn after the last one was trained; with ahead = one round while
it is trained (lag 1); with ahead = max_lag rounds and ordered=False all the time.

Which slot leaves first: the first one started, or, unordered, the one with the oldest tokens
(earliest deadline first), then the first one started. Where a bound of the lag is set, what is
still played with tokens that no later round may train is given up as soon as that is known, and
its prompt is asked anew in the same slot, by whatever weights the engine holds: the newest, since
`drop_older` comes after they were brought there.

Slots are played in an event loop with a thread of its own (event_loop.py). An episode that fails is
tried again, then its group is dropped; failures.py ends the run where that persists.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, PromptRequest, Sampling, pause_before
from jaxtrain.generation.episodes import Env, Episode, Group
from jaxtrain.generation.event_loop import EventLoop
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.prompts import MAX_ATTEMPTS, PromptOrder
from jaxtrain.generation.version_tracker import VersionedEngine, VersionTracker
from jaxtrain.methods.rl.advantages import is_flat, reward_table, turn_tables, weigh
from jaxtrain.safe_io import UnreadableRow

T = TypeVar("T")

MAX_TRIES = 3
"""Times that a prompt is asked in a slot whose episodes become too old while they are played."""


@dataclass(eq=False)
class RoundSlot:
    """What a place in a round came to."""

    group: Group | None
    """None: dropped, for a reason that `dropped` counts."""
    asks: list[PromptRequest]
    """Prompts that it took, all of them done once the slot is marked so."""
    flat: list[Group] = field(default_factory=list)
    """Groups whose rewards were all equal."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups left out, by reason."""
    redone: int = 0
    """Episodes that failed and were played again."""
    ages: VersionTracker = field(default_factory=VersionTracker)
    """Of what is being played."""

    @property
    def min_version(self) -> int:
        """Oldest version of what is to be trained; -1: nothing is, or nobody counts versions."""
        return -1 if self.group is None else self.group.min_version


@dataclass(frozen=True)
class GroupRules:
    """What a slot does with a group."""

    group_size: int
    weights: dict[str, float]
    """Rewards that count, by name; those that only an environment gives count 1."""
    combine: str = "sum_then_normalize"
    clip: tuple[float, float] | None = None
    """Bounds of an episode's sum of rewards."""
    drop_flat: bool = True
    """Groups whose rewards are all equal are dropped."""
    max_asks: int = 1
    """Prompts that a slot may take until a group is kept."""
    retries: int = 2
    datasets: tuple[str, ...] = ()
    """Names of the datasets, where there are several."""
    policies: dict[str, list[str]] = field(default_factory=dict)
    """Where policies with names are trained: of each, in the config's order, the reward functions
    that judge it."""


Drawn = tuple[list[Episode], list[dict[str, float | None]]]
"""The episodes of a prompt, and one dict of rewards by name for each."""
Given = Callable[[PromptRequest], list[Episode] | None]
"""The data's own answers to a prompt; None: it is played. Raises EpisodeFailed where the row that
should have one is of no use."""


class GroundTruthSource(Protocol):
    """What the data say that the answers to a prompt should be."""

    def __call__(self, ask: PromptRequest) -> Episode:
        """Raises EpisodeFailed for a row that does not say."""
        ...

    def limit(self, truth: Episode, sampling: Sampling) -> Sampling:
        """How answers to this prompt are drawn."""
        ...


class GroupPlayer:
    """Plays one prompt G times and judges the answers."""

    def __init__(
        self,
        env: Env,
        engine: Engine,
        rewards: Any,
        sampling: Sampling,
        rules: GroupRules,
        failures: Failures | None = None,
        own: Sequence[tuple[Env, Any]] = (),
        given: Given | None = None,
        judged: bool = True,
        truths: GroundTruthSource | None = None,
    ):
        """rewards: has `async score(episodes, row) -> list of {name: number or None}`, those that
        the environment gave among them; raises EpisodeFailed where a judge failed. own: environment
        and rewards of each dataset, where they differ. given: answers that the
        data have to a prompt, instead of drawn ones. judged: whether a group without any reward is
        a mistake. truths: what each group's answers will be compared with."""
        self.given, self.judged, self.truths = given, judged, truths
        self.env, self.engine, self.rewards = env, engine, rewards
        self.sampling, self.rules, self.own = sampling, rules, own
        self.failures = Failures() if failures is None else failures

    async def play(self, ask: PromptRequest, slot: RoundSlot) -> Group | None:
        """The group of a prompt; None when an episode or the judgment failed too often."""
        size = self.rules.group_size
        if isinstance(ask.row, UnreadableRow):
            reason = f"row: {ask.row.reason}"
            cause = f"data.datasets, prompt {ask.draw}: {ask.row.reason}"
            return self._give_up(EpisodeFailed(reason, cause=cause, mistake=True), slot)
        if self.given is not None:
            try:
                answers = self.given(ask)
            except EpisodeFailed as failure:
                return self._give_up(failure, slot)
            if answers is not None:
                self.failures.add(None, size)
                scores = [dict(answer.all_rewards) for answer in answers]
                return Group(ask.draw, ask.row, answers, scores, dataset=ask.dataset)
        truth, sampling = None, self.sampling
        if self.truths is not None:
            try:
                truth = self.truths(ask)
            except EpisodeFailed as failure:
                return self._give_up(failure, slot)
            sampling = self.truths.limit(truth, sampling)
        drawn = await self.draw(ask, slot, sampling)
        if drawn is None:
            return None
        episodes, scores = drawn
        self.failures.add(None, size)
        if self.judged and not all(scores):
            policy = episodes[scores.index({})].policy
            raise UserError(
                f"no reward judges the answers{f' of policy {policy}' if policy else ''}: add a"
                " [[rewards]] table with a function, or an env that gives rewards itself for rows"
                " such as these"
            )
        return Group(ask.draw, ask.row, episodes, scores, dataset=ask.dataset, truth=truth)

    async def draw(self, ask: PromptRequest, slot: RoundSlot, sampling: Sampling) -> Drawn | None:
        """The prompt's episodes and their rewards; None, counted, where they came to nothing."""
        size = self.rules.group_size
        first = (ask.draw * MAX_ATTEMPTS + ask.attempt) * size
        env, rewards = self.own[ask.dataset] if self.own else (self.env, self.rewards)
        failed: list[EpisodeFailed] = []

        async def play(index: int) -> Episode | EpisodeFailed:
            episode = await self.play_one(env, ask.row, index, slot, sampling)
            if isinstance(episode, EpisodeFailed):
                failed.append(episode)
            return episode

        try:
            found = await asyncio.gather(*(play(first + i) for i in range(size)))
        except asyncio.CancelledError:
            for failure in failed:  # for good, whatever becomes of the others
                self.failures.add(failure)
            raise
        games = [episode for episode in found if not isinstance(episode, EpisodeFailed)]
        if failed:
            slot.dropped[f"failed: {failed[0]}"] += 1
            self.failures.add(None, len(games))
            for failure in failed:
                self.failures.add(failure)
            return None
        try:
            episodes = list_episodes(games, list(self.rules.policies))
            scores = await score_policies(rewards, self.rules.policies, episodes, ask.row)
            return episodes, scores
        except EpisodeFailed as failure:
            return self._give_up(failure, slot)

    def _give_up(self, failure: EpisodeFailed, slot: RoundSlot) -> None:
        """All episodes of a group are lost."""
        self.failures.tell(failure)
        slot.dropped[f"failed: {failure}"] += 1
        self.failures.add(failure, self.rules.group_size)

    async def play_one(
        self, env: Env, row: dict[str, Any], index: int, slot: RoundSlot, sampling: Sampling
    ) -> Episode | EpisodeFailed:
        """One episode, played again when it fails, after a pause where that may help."""
        engine = VersionedEngine(self.engine, slot.ages, index)
        failure = EpisodeFailed("never played")
        for attempt in range(self.rules.retries + 1):
            if attempt and failure.pause:
                await asyncio.sleep(pause_before(attempt))
            slot.redone += attempt > 0
            slot.ages.forget(index)
            try:
                return await env.run(row, engine, sampling, index)
            except EpisodeFailed as error:
                failure = error
            self.failures.tell(failure)
            if not failure.again:
                break
        return failure

    def is_flat(self, group: Group) -> bool:
        """Whether all its rewards are equal; of several policies, those of each."""
        if not self.rules.policies:
            return earns_alike(group, self.rules)
        parts = [group.of(policy) for policy in self.rules.policies]
        return all(earns_alike(part, self.rules) for part in parts if part is not None)

    def totals(self, group: Group) -> list[float]:
        """Weighted sum of the rewards of each episode that was judged."""
        names = reward_names([group])
        weights = [self.rules.weights.get(name, 1.0) for name in names]
        found_N = weigh(reward_table([group], names), weights, self.rules.clip)
        return [float(total) for total in found_N if total == total]


def list_episodes(games: Sequence[Episode], policies: Sequence[str]) -> list[Episode]:
    """All episodes of the games, policy by policy where these have names, and agent by agent;
    UserError for one of another policy."""
    found = [one for game in games for one in (game, *game.others)]
    for game in games:
        game.others = []
    for one in found:
        one.policy = one.policy or next(iter(policies), "")
        if one.policy and one.policy not in policies:
            raise UserError(
                f"the environment gave an episode of policy {one.policy!r}; section policies"
                f" trains: {', '.join(policies) or 'none'}"
            )
    agents = list(dict.fromkeys(one.agent for one in found))
    places = {name: index for index, name in enumerate(policies)}
    return sorted(found, key=lambda one: (places.get(one.policy, 0), agents.index(one.agent)))


async def score_policies(
    rewards: Any,
    policies: Mapping[str, Sequence[str]],
    episodes: list[Episode],
    row: dict[str, Any],
) -> list[dict[str, float | None]]:
    """The rewards of each of list_episodes' episodes. policies: of each the functions that judge
    it; without any, all judge everybody."""
    scores: list[dict[str, float | None]] = []
    for policy, functions in policies.items():
        own = [episode for episode in episodes if episode.policy == policy]
        if own:
            scores += await rewards.only(functions).score(own, row)
    return scores or await rewards.score(episodes, row)


def earns_alike(group: Group, rules: GroupRules) -> bool:
    """Whether all rewards of one policy's group are equal; of several agents, those of each."""
    names = reward_names([group])
    weights = [rules.weights.get(name, 1.0) for name in names]
    bounds = np.cumsum(group.sizes)[:-1]
    return all(
        is_flat(own, weights, rules.combine, rules.clip)
        for table in turn_tables([group], names)
        for own in np.split(table, bounds)
    )


def reward_names(groups: Iterable[Group]) -> list[str]:
    """Names of all rewards that occur, in order of appearance."""
    return list(dict.fromkeys(name for g in groups for row in g.rewards for name in row))


class Producer:
    """Slots ahead of the trainer; see the module's docstring."""

    def __init__(
        self,
        prompts: PromptOrder,
        player: GroupPlayer,
        *,
        ahead: int = 0,
        ordered: bool = True,
        streaming: bool = False,
        choose_again: Callable[[], bool] = lambda: False,
        patience: float | None = None,
        log: Callable[[str], None] = print,
    ):
        """ordered: slots come out in the order in which they were started, not by their age.
        streaming: as they finish after all, but never one that was not asked for yet.
        choose_again: whether the next prompt may be one that waits for a second try. patience: of
        the event loop."""
        self.prompts, self.player, self.rules = prompts, player, player.rules
        self.ahead, self.ordered, self.streaming = ahead, ordered, streaming
        self.choose_again = choose_again
        self._asked = self._started = 0
        self._running: dict[asyncio.Task, int] = {}
        self._playing: dict[asyncio.Task, RoundSlot] = {}
        self._oldest = 0
        """Version of the oldest tokens that are still of use."""
        self.cancelled: Counter[str] = Counter()
        """Groups given up while they were played, by reason, since the start."""
        self._finished: dict[int, RoundSlot] = {}
        self._taken = 0
        self._loop = EventLoop("rollouts", patience, log)

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Whoever waits for slots asks this from time to time, and stops waiting."""
        self._loop.should_stop = should_stop

    def next_slots(self, count: int, asking: int | None = None) -> list[RoundSlot]:
        """The next `count` slots; waits for them. They are not done until `mark_done`.

        asking: places that are asked for by this call, where it is not `count`: all of a round when
        its first slots are taken, none when the rest is.
        Raises what ends a run: what an engine raised, RunStopped or UserError for too many
        failures, and Interrupted once the run is to stop.
        """
        return self._loop.run(self._take(count, count if asking is None else asking))

    def mark_done(self, slots: Sequence[RoundSlot]) -> None:
        """Slots that were taken are done: handed to the trainer, or dropped and counted."""
        for slot in slots:
            groups = [*slot.flat, *([slot.group] if slot.group not in (None, *slot.flat) else [])]
            for ask in slot.asks:
                hopeless = any(g.draw == ask.draw and is_worthless(g) for g in slot.flat)
                self.prompts.mark_done(ask, again=hopeless)
                for group in groups:
                    if group.draw == ask.draw and not group.episodes[0].given:
                        self.prompts.learn(ask, self.player.totals(group))

    def drop_older(self, version: int) -> None:
        """Give up what is played and has tokens from before that version, now or as soon as that
        is known: no later round takes it. Its prompts are asked anew."""
        self._loop.tell(lambda: self._drop_older(version))

    def state(self) -> dict[str, Any]:
        """Cursor of the prompts: what was marked done is done, all else will be asked again."""
        return self.prompts.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a cursor; before the first take()."""
        assert not self._started, "restore() comes before take()"
        self.prompts.restore(state)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns that shares the event loop of the episodes."""
        return self._loop.run(work)

    def tell(self, work: Callable[[], Any]) -> None:
        """Have something done in that event loop soon; nobody waits for it."""
        self._loop.tell(work)

    def close(self) -> None:
        """Cancel what is being played and stop the thread."""
        self._loop.close(self._cancel)

    async def _take(self, count: int, asking: int) -> list[RoundSlot]:
        self._asked += asking
        assert self._taken + count <= self._asked, "taken before it was asked for"
        while self._started < self._asked + self.ahead:
            task = asyncio.get_running_loop().create_task(self._fill())
            self._running[task] = self._started
            self._started += 1
        slots: list[RoundSlot] = []
        while len(slots) < count:
            while len(slots) < count and (slot := self._pop()) is not None:
                slots.append(slot)
            if len(slots) < count:
                await self._progress()
        return slots

    def _pop(self) -> RoundSlot | None:
        """A finished slot that is due: the first, or the one with the oldest tokens."""
        if not self._finished:
            return None
        age = self._finished.__getitem__
        number = min(self._finished, key=lambda n: (0 if self.ordered else age(n).min_version, n))
        if self.ordered and number >= (self._asked if self.streaming else self._taken + 1):
            return None
        self._taken += 1
        return self._finished.pop(number)

    async def _progress(self) -> None:
        """Wait until a slot is filled; raise what went wrong in one."""
        if not self._running:
            raise RunStopped("the rollout producer has no slot left to wait for")
        done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=self._running.__getitem__):
            number = self._running.pop(task)
            self._finished[number] = task.result()

    async def _fill(self) -> RoundSlot:
        """Play prompts until a group is kept or max_asks of them came to nothing."""
        slot = RoundSlot(None, [])
        while len(slot.asks) < self.rules.max_asks:
            ask = self.prompts.next(again=self.choose_again())
            slot.asks.append(ask)
            group = await self._play(ask, slot)
            if group is None:
                continue
            if self.player.is_flat(group):
                slot.flat.append(group)
                if self.rules.drop_flat:
                    slot.dropped["zero_advantage"] += 1
                    continue
            slot.group = group
            break
        return slot

    async def _play(self, ask: PromptRequest, slot: RoundSlot) -> Group | None:
        """The group of a prompt, asked anew where its episodes became too old; None: there is none,
        for a reason that the slot counts."""
        for _ in range(MAX_TRIES):
            slot.ages = VersionTracker()
            task = asyncio.ensure_future(self.player.play(ask, slot))
            self._playing[task] = slot
            slot.ages.told = partial(self._drop_if_older, task, slot.ages)
            try:
                return await task
            except asyncio.CancelledError:
                closing = asyncio.current_task()
                if task in self._playing or (closing is not None and closing.cancelling()):
                    raise  # it was not _drop_older that gave it up
            finally:
                self._playing.pop(task, None)
        slot.dropped["stale"] += 1
        return None

    def _drop_older(self, version: int) -> None:
        self._oldest = version
        for task, slot in list(self._playing.items()):
            self._drop_if_older(task, slot.ages)

    def _drop_if_older(self, task: asyncio.Task, ages: VersionTracker) -> None:
        oldest = self._oldest if ages.oldest is None else ages.oldest
        if task in self._playing and oldest < self._oldest and task.cancel():
            del self._playing[task]
            self.cancelled["stale"] += 1

    async def _cancel(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        await self.player.engine.close()


def is_worthless(group: Group) -> bool:
    """Whether no episode earned anything: worth a second try with a better policy."""
    values = [value for row in group.rewards for value in row.values() if value is not None]
    return bool(values) and max(abs(value) for value in values) < 1e-6
