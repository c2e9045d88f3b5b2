"""The policies of a run together: the engine that environments are given, and the others beside it.

env.run(row, engine, ...)   engine.generate(...)            the policy that plays
                            engine.others["judge"].reply    a frozen one
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.generation.engine import Completion, Engine, Sampling


class MultiPolicyEngine:
    """`engine.Engine` with others beside it."""

    def __init__(self, engine: Engine, others: Mapping[str, Any]):
        """others: by name, engines and speakers; closed with the engine."""
        self.engine, self._own = engine, dict(others)
        self.others = {**getattr(engine, "others", {}), **others}

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """See engine.Engine."""
        return await self.engine.generate(prompt, sampling, stop_ids, index)

    @property
    def version(self) -> int:
        """See engine.Engine."""
        return self.engine.version

    def counters(self) -> dict[str, float]:
        """Those of all."""
        found = dict(self.engine.counters())
        for other in self._own.values():
            found |= other.counters()
        return found

    async def close(self) -> None:
        """Let all go."""
        for one in (self.engine, *self._own.values()):
            await one.close()


def gather(engines: Mapping[str, Engine]) -> Engine:
    """The engines of several policies as that of the first, with all of them beside it."""
    first = next(iter(engines.values()))
    company = MultiPolicyEngine(
        first, {name: one for name, one in engines.items() if one is not first}
    )
    company.others = dict(engines)
    return company


def with_policies(engine: Engine, others: Mapping[str, Any]) -> Engine:
    """The engine with others beside it; itself where there are none."""
    return MultiPolicyEngine(engine, others) if others else engine
