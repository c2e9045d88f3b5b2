"""Publishers for the local engine: copies of the trainer's weights, or of several adapters.

    trainer: base, adapter of solver, adapter of verifier
        │  base: at most one copy, if the sampler needs one      adapters: one copy each
        └─> model of solver, model of verifier: same programs, same arrays except for adapters

Copies, because the next optimizer step donates the trainer's arrays. With several policies their
chunks alternate in one thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxtrain.generation.local.draft_model import renew_draft
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.generation.local.weights import Copier
from jaxtrain.models.parameters import Params, Rebuild


class AdaptersPublisher:
    """`publisher.Publisher` of {policy: parameters by path} to the engines of these policies."""

    def __init__(
        self,
        policies: Sequence[str],
        engines: Mapping[str, LocalEngine],
        copy: Copier,
        *,
        rests: bool,
        thread: ThreadPoolExecutor | None = None,
    ):
        """engines: on process 0. copy, rests: as for LocalPublisher. thread: ended by `close`."""
        self.policies, self.engines, self.copy = policies, engines, copy
        self.rests, self.thread = rests, thread

    def publish(
        self, version: int, params: Mapping[str, Params], rebuild: Rebuild
    ) -> dict[str, float]:
        """Sample from copies of the adapters from the next chunk on."""
        start = time.monotonic()
        leader, shared = self.policies[0], {}
        for name in self.policies:
            # An array that differs from the first policy's belongs to this policy's adapter. The
            # selection must not depend on the process: `copy` may be a collective, in which
            # processes without an engine take part, too.
            base = {} if name == leader else params[leader]
            new = {path: x for path, x in params[name].items() if x is not base.get(path)}
            shared = {**shared, **self.copy(new)}
            if (engine := self.engines.get(name)) is not None:
                with engine.sampler.on_mesh():
                    engine.use(self.copy.build(dict(shared), rebuild), version)
        return {"sync/seconds": time.monotonic() - start} if self.engines else {}

    def sleep(self) -> None:
        """Free the copies until the next publish."""
        if self.rests:
            for engine in self.engines.values():
                engine.use(None, engine.version)

    def close(self) -> None:
        """End the thread."""
        if self.thread is not None:
            self.thread.shutdown()


class LocalPublisher:
    """`publisher.Publisher` that gives copies of the trainer's weights to the local engine.

    Every process has one, because all take part in gathering the weights; only process 0 has an
    engine.
    """

    def __init__(
        self,
        engine: LocalEngine | None,
        copy: Copier,
        *,
        rests: bool,
        open_draft: Callable[[Any], Any] | None = None,
        copy_draft: Callable[[Any], Any] | None = None,
        thread: ThreadPoolExecutor | None = None,
    ):
        """rests: nothing is sampled during training, so the copies' memory is freed for that time.
        open_draft: returns the draft (models.draft.Draft) beside the first weights, of which it may
        be a part; it guesses for all versions until there is a newer one. copy_draft: maps a
        ModelSnapshot to the sampler's parameters of a draft. thread: ended by `close`."""
        self.engine, self.copy, self.rests = engine, copy, rests
        self.draft, self.open_draft = None, open_draft
        self.copy_draft, self.thread = copy_draft, thread

    def publish(self, version: int, params: Any, rebuild: Any) -> dict[str, float]:
        """Sample from a copy of `params` from the next chunk on."""
        start = time.monotonic()
        copies = self.copy(params)  # a collective: before processes without an engine leave
        if self.engine is None:
            return {}
        with self.engine.sampler.on_mesh():
            model = self.copy.build(copies, rebuild)
            if self.draft is not None:
                self.draft = renew_draft(self.draft, model)
            elif self.open_draft is not None:
                self.draft = self.open_draft(model)
        # From the next chunk on; a chunk in progress keeps the arrays that it was called with.
        self.engine.use(model if self.draft is None else DraftedModel(model, self.draft), version)
        return {"sync/seconds": time.monotonic() - start}

    def use_draft(self, draft: Any) -> None:
        """Sample with a copy of this draft; see publisher.DraftPublisher."""
        assert self.copy_draft is not None, "the engine was opened for a draft that is trained"
        copies = self.copy_draft(draft)
        if self.engine is not None:
            with self.engine.sampler.on_mesh():
                self.draft = unstack(draft.roles.rebuild(draft.roles.trained)(copies))

    def sleep(self) -> None:
        """Free the copies until the next publish."""
        if self.rests and self.engine is not None:
            self.engine.use(None, self.engine.version)

    def close(self) -> None:
        """End the thread."""
        if self.thread is not None:
            self.thread.shutdown()
