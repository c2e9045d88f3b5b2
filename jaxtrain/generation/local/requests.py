"""Common base of the in-process samplers: waiting prompts, and weights that change.

    add(request) ─> waiting ─> step() returns the requests that have ended

Samplers differ in how `step` writes answers: token by token (`sampler.py`), or all at once, refined
with every pass (`diffusion_sampler.py`).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.adapters.slotted import NO_ADAPTER, AdapterSlot
from jaxtrain.data.packing.pack import ImagePacker
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.errors import UserError
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.engine import Completion, FinishReason, Sampling
from jaxtrain.generation.local.constraints import Constraint, Grammars


class Weights(NamedTuple):
    """Weights that draw, replaced as a whole."""

    model: Any
    version: int
    identity: object
    """New object for every `use`, by which a request remembers the weights that read its prompt
    without keeping them in memory."""


@dataclass(eq=False)
class Request:
    """A prompt to continue, and its answer so far."""

    prompt: Sequence[int]
    sampling: Sampling
    ends: tuple[int, ...]
    """Tokens that end the answer, including the sampler's."""
    number: int
    """Determines the noise, together with sampling.seed."""
    limit: int
    """Maximum number of tokens."""
    images: PlacedImages | None = None
    """Images of the prompt."""
    adapter: AdapterSlot = NO_ADAPTER
    """Adapter that reads the prompt and draws the answer."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """1 + accepted guesses, for each speculative cycle."""
    routed: list[np.ndarray] = field(default_factory=list)
    """Experts of the prompt's tokens, then of the drawn ones, chunk by chunk."""
    next_version: int = -1
    """Version of the weights that drew the token which has not been handed out yet."""
    constraint: Constraint | None = None
    """What its next token must match; None: nothing."""
    finish_reason: FinishReason = "length"
    begun_with: object = None
    """Identity of the weights that read its prompt."""
    aborted: bool = False
    streamed: bool = False
    """Its tokens are read as they are drawn, so chunks are short."""

    @property
    def completion(self) -> Completion:
        routed = None
        if self.routed:  # the last token has not been read yet
            read = len(self.prompt) + len(self.tokens) - 1
            routed = np.concatenate(self.routed)[:read]
        return Completion(self.tokens, self.logprobs, self.finish_reason, self.versions, routed)


def refuse_stray(
    prompt: Sequence[int], images: PlacedImages | None, never: Iterable[int], name: str
) -> None:
    """Raise UserError for a token of an image in a prompt without one. never: such tokens."""
    text = prompt if images is None else np.asarray(prompt)[images.slot < 0].tolist()
    if stray := {*never}.intersection(text):
        raise UserError(
            f"{name} holds token {min(stray)}, which stands for an image or a video, without"
            " one; give images as parts of messages"
        )


class Requests(ABC):
    """Continues prompts with a model of `jaxtrain.models`; see `LocalSampler`."""

    predicts_next = True
    """Answers are drawn token by token, each from a distribution given those before it."""
    acceptance: Acceptance | None = None
    """Totals over all cycles of a draft; None before the first."""

    def __init__(
        self,
        model: Any,
        eos_ids: Iterable[int],
        *,
        max_len: int,
        max_batch: int = 64,
        to_text: Callable[[list[int]], str] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        tokenizer: Any = None,
    ):
        """mesh: that of the weights; by default the one that is set where `step` is called.
        tokenizer: for constrained answers, and for images if it has their format (images/setup.py).
        """
        self.tokenizer = tokenizer
        self.packer: ImagePacker | None = open_sampling_packer(tokenizer)
        self._grammars: Grammars | None = None
        self.eos_ids = frozenset(eos_ids)
        self.max_len = max_len
        self.max_batch = max_batch
        self.to_text = to_text
        self.mesh = mesh
        # One tuple, replaced as a whole: `use` may be called by another thread in the middle of a
        # chunk, whose tokens must carry the version of the weights that drew them.
        self._weights = Weights(model, -1, object())
        self._waiting: deque[Request] = deque()
        self.phase: Callable[[str], AbstractContextManager[object]] = nullcontext
        """Context around each part of a step, for the seconds that it takes."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Return True if there is work."""

    @abstractmethod
    def step(self) -> "list[Request]":
        """Start waiting requests and continue running ones; return the requests that have ended."""

    @abstractmethod
    def drop_all(self) -> None:
        """Discard all requests, as after an error."""

    def use(self, model: Any, version: int = -1) -> None:
        """Sample from these weights from the next chunk on.

        A model of the same shape compiles nothing. May be called from any thread.
        """
        self._weights = Weights(model, version, object())

    def renew(self, model: Any) -> None:
        """Sample from a model that differs from the last one in free slots of adapters alone, from
        the next chunk on: what requests have read stays valid."""
        self._weights = self._weights._replace(model=model)

    def on_mesh(self) -> AbstractContextManager:
        """Return the context in which the sampler's programs run."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    @property
    def model(self) -> Any:
        """Return the model that draws the next chunk."""
        return self._weights.model

    @property
    def version(self) -> int:
        """Return the version of the weights."""
        return self._weights.version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        stop_ids: Iterable[int] = (),
        draws: Sequence[int] | None = None,
        on_end: Callable[[int, Completion], None] = lambda number, completion: None,
        images: Sequence[PlacedImages | None] | None = None,
    ) -> list[Completion]:
        """Return a Completion for each prompt, in order; see `engine.Completion` for its log-probs.

        Tokens of `stop_ids` end an answer besides those of the constructor. A draw depends on the
        seed and the prompt's number in `draws` (by default its index) alone, not on which rows
        share its batch. on_end: called with a prompt's number when its answer ends. images:
        of each prompt. Raises UserError for an empty prompt, one that leaves no room, stop texts
        without `to_text`, and images that the model does not read.
        """
        stop_ids = tuple(stop_ids)
        numbers = range(len(prompts)) if draws is None else draws
        images = [None] * len(prompts) if images is None else images
        requests = [
            self.request(prompt, sampling, stop_ids, number, f"prompt {index}", placed)
            for index, (prompt, number, placed) in enumerate(
                zip(prompts, numbers, images, strict=True)
            )
        ]
        for request in requests:
            self.add(request)
        while self.busy:
            for request in self.step():
                on_end(request.number, request.completion)
        return [request.completion for request in requests]

    def request(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Iterable[int] = (),
        number: int = 0,
        name: str = "the prompt",
        images: PlacedImages | None = None,
    ) -> Request:
        """Return a checked request, for `add`; raises UserError as `generate` does."""
        # Checked here: an index beyond the table would be clamped on the device and continue
        # another prompt without a word.
        vocab_size = self.model.head().shape[0]
        if not 0 < len(prompt) < self.max_len:
            raise UserError(
                f"{name} has {len(prompt)} tokens; it needs at least 1 and at most "
                f"{self.max_len - 1}, to leave room for an answer within {self.max_len}"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(
                f"{name} holds token {max(prompt)}, the model has {vocab_size}; use "
                "the tokenizer that belongs to the model"
            )
        if images is not None:
            self._check_images(images, len(prompt), name)
        refuse_stray(prompt, images, getattr(self.model, "never_drawn", ()), name)
        if sampling.stop and self.to_text is None:
            raise UserError("sampling.stop: stop texts need the sampler's to_text function")
        ends = tuple(sorted({*self.eos_ids, *stop_ids}))
        limit = min(sampling.max_new_tokens, self.max_len - len(prompt))
        constraint = None
        if sampling.structured_outputs:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, vocab_size)
            constraint = self._grammars.begin(sampling.structured_outputs, ends)
        return Request(prompt, sampling, ends, number, limit, images, constraint=constraint)

    def _check_images(self, images: PlacedImages, length: int, name: str) -> None:
        assert len(images.slot) == length, f"{len(images.slot)} slots for {length} tokens"
        if hasattr(self.model, "draft"):
            raise UserError(f"{name} has images, which are answered without a draft; remove it")
        if self.packer is None or getattr(self.model, "vision", None) is None:
            raise UserError(f"{name} has images, and the model reads text alone")
        if self.model.exact is not None:
            raise UserError(
                f"{name} has images, whose tower has no exact form; set rollout.exact to false"
            )

    def prefix_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens of all prompts so far, and of those that were not read
        again, since an earlier answer had read them."""
        return 0, 0

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that no row has taken."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request for a row."""
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Abort a request; its row is free after the next step, which does not return it."""
        # Only a mark: the row is on the device, in the chunk that another thread may be drawing.
        request.aborted = True

    def _find_stop(self, tokens: list[int], seen: int, stop: Sequence[str]) -> int | None:
        """Return the number of tokens after which the text first contains a stop text, or None."""
        if not stop:
            return None

        assert self.to_text is not None, "request() asks for it"

        def holds(count: int, to_text: Any = self.to_text) -> bool:
            text = to_text(tokens[:count])
            return any(word in text for word in stop)

        if not holds(len(tokens)):
            return None
        return next(count for count in range(seen + 1, len(tokens) + 1) if holds(count))


def open_sampling_packer(tokenizer: Any) -> ImagePacker | None:
    """Return the maker of patches for images of prompts, of any number; None unless the tokenizer
    has the format of its model's images."""
    if getattr(tokenizer, "image_format", None) is None:
        return None
    from jaxtrain.data.images.patches import PatchPacker

    return PatchPacker(tokenizer.image_format, None)
