"""The rounds of process 0 as the data source of every process.

    process 0   RoundSource ──> batches, metrics ─┐
    others      ────────────────────────────── share ──> the same list of Batches everywhere

Prompts, replay, drops and advantages live on process 0 alone, and so does the cursor: nothing can
be trained twice, whatever the number of processes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.batch import Batch
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.generation.episodes import Group
from jaxtrain.generation.publisher import Publisher
from jaxtrain.methods.rl.round import RoundSource
from jaxtrain.models.parameters import Params, Rebuild


class RoundSummary(NamedTuple):
    """What the others must know of a round."""

    batches: list[Batch]
    part: int
    last_part: bool
    metrics: dict[str, float]
    counters: dict[str, Any]
    policy: str


class SharedRounds:
    """Iterator of rounds with a JSON-able cursor; `version` is that of the policy that trains next.

    `part`, `last_part`, `policy` and `metrics` are as RoundSource's; `samples`, answers to read,
    are there on process 0 alone.
    """

    def __init__(self, own: RoundSource | None):
        """own: on process 0, and nowhere else."""
        self.own = own
        self.part, self.last_part = 0, True
        self.policy = ""
        self.metrics: dict[str, float] = {}
        self._counters: dict[str, Any] = {}
        self._version = 0

    def __iter__(self) -> "SharedRounds":
        return self

    def __next__(self) -> list[Batch]:
        """The next round. What goes wrong on process 0 is raised on all processes; Interrupted is
        one of these, when the run is to stop, and StopIteration, when all prompts are done."""
        drawn = RoundSummary(*broadcast_or_raise("a round", self._draw))
        self.part, self.last_part = drawn.part, drawn.last_part
        self.metrics, self._counters = drawn.metrics, drawn.counters
        self.policy = drawn.policy
        return drawn.batches

    def _draw(self) -> tuple:
        assert self.own is not None, "process 0 draws"
        own, batches = self.own, next(self.own)
        numbers = own.metrics, own.counters()
        return tuple(RoundSummary(batches, own.part, own.last_part, *numbers, own.policy))

    @property
    def version(self) -> int:
        """Rounds that were trained."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self.own is not None:
            self.own.version = value

    def give_up_stale(self) -> None:
        """See RoundSource."""
        if self.own is not None:
            self.own.give_up_stale()

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Lines for samples.jsonl."""
        return [] if self.own is None else self.own.samples

    @property
    def judged(self) -> Sequence[Group]:
        """See RoundSource.judged; on process 0."""
        return [] if self.own is None else self.own.judged

    def tell_progress(self, share: float) -> None:
        """Optimizer steps done, as a share of the run's."""
        if self.own is not None:
            self.own.steps_share = share

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Whoever waits for answers asks this from time to time, and stops waiting."""
        if self.own is not None:
            self.own.producer.stop_when(should_stop)

    def state(self) -> dict[str, Any]:
        """Cursor; that of process 0 is the one to be saved."""
        return {} if self.own is None else self.own.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the round that would have followed."""
        self._version = state["version"]
        if self.own is not None:
            self.own.restore(state)

    def counters(self) -> dict[str, Any]:
        """Those of process 0 when it gave the last round."""
        return self._counters if self.own is None else self.own.counters()

    def close(self) -> None:
        """Stop what is being played."""
        if self.own is not None:
            self.own.close()


class SharedPublisher:
    """`publisher.Publisher` of a run of several processes: all gather, process 0 publishes."""

    def __init__(self, own: Publisher | None, gather: Callable[[Params], Mapping[str, Any]]):
        """own: on process 0. gather: makes what it publishes."""
        self.own, self.gather = own, gather

    def publish(self, version: int, params: Params, rebuild: Rebuild) -> dict[str, float]:
        """As the own one, whose errors all processes raise; the others wait for it."""
        gathered, own = self.gather(params), self.own

        def send() -> dict[str, float]:
            assert own is not None, "process 0 publishes"
            return own.publish(version, gathered, rebuild)

        return broadcast_or_raise("the weights are out", send)

    def sleep(self) -> None:
        """See publisher.Publisher."""
        if self.own is not None:
            self.own.sleep()

    def close(self) -> None:
        """See publisher.Publisher."""
        if self.own is not None:
            self.own.close()
