"""Plain and drafted decoding of the same prompts, timed in turns: the work of `speculate`."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.api import Model
from jaxtrain.cli.play import find_short
from jaxtrain.cli.prompt_input import EvalPrompt
from jaxtrain.config import SamplingConfig
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import TemplateFailed, encode, end_of_turn_ids
from jaxtrain.errors import UserError
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.local.draft_model import open_draft
from jaxtrain.generation.local.requests import Request
from jaxtrain.generation.local.sampler import READING, LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel


@dataclass
class Timing:
    """Passes over all prompts of a set with so many rows, plain and with the draft in turns."""

    rows: int
    plain: list[float] = field(default_factory=list)
    """Seconds of each pass, prompts included."""
    drafted: list[float] = field(default_factory=list)
    plain_decoding: list[float] = field(default_factory=list)
    """Seconds of each pass without those that prompts and first tokens took."""
    drafted_decoding: list[float] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    """Of the answers of one pass."""
    different: int = 0
    """Answers whose tokens are not those of plain decoding."""
    largest_difference: float = 0.0
    """Between the log-probs of equal tokens."""

    def table(self) -> dict[str, Any]:
        """For JSON."""
        plain, drafted = statistics.median(self.plain), statistics.median(self.drafted)
        plain_decoding = statistics.median(self.plain_decoding)
        drafted_decoding = statistics.median(self.drafted_decoding)
        # The first token of an answer comes from reading its prompt.
        decoded = self.tokens - self.answers
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "plain_decoding_tokens_per_second": decoded / plain_decoding,
            "drafted_decoding_tokens_per_second": decoded / drafted_decoding,
            "decoding_speedup": plain_decoding / drafted_decoding,
            "plain_tokens_per_second": self.tokens / plain,
            "drafted_tokens_per_second": self.tokens / drafted,
            "speedup": plain / drafted,
            "plain_seconds": self.plain,
            "drafted_seconds": self.drafted,
            "plain_decoding_seconds": self.plain_decoding,
            "drafted_decoding_seconds": self.drafted_decoding,
            "different_answers": self.different,
            "largest_logprob_difference": self.largest_difference,
        }


class DecodingPair:
    """A model by itself and with its draft."""

    def __init__(self, model: Model, draft: str, sampling: SamplingConfig, raw: bool):
        self.model, self.sampling, self.raw = model, sampling, raw
        model.require_next_token()
        parts = model.snapshot.roles.bundle
        target = model.snapshot.model()
        self.draft = open_draft(draft, parts, model.mesh, "--draft", target)
        with jax.set_mesh(model.mesh):
            self.target = unstack(target)

    def encode(self, prompt_set: EvalPrompt) -> list[list[int]]:
        """Return the tokens of the prompts that leave room for an answer. Raises UserError for one
        that cannot be written."""
        tokenizer, token_lists = self.model.tokenizer, []
        for prompt, tools, kwargs, origin in zip(*prompt_set[1:], strict=True):
            try:
                if self.raw:
                    token_lists.append(list(encode(tokenizer, prompt)))
                else:
                    token_lists.append(prompt_tokens(tokenizer, prompt, tools, kwargs=kwargs))
            except TemplateFailed as error:
                raise UserError(f"{prompt_set.name}: {origin} cannot be written: {error}") from None
        short = find_short(token_lists, range(len(token_lists)), self.model.max_len, "the model")
        if not short:
            raise UserError(f"{prompt_set.name}: no prompt leaves room for an answer")
        return [token_lists[index] for index in short]

    def samplers(self, rows: int) -> tuple[LocalSampler, LocalSampler]:
        """(plain, with the draft), of so many rows."""

        def make(model: Any) -> LocalSampler:
            return LocalSampler(
                model,
                end_of_turn_ids(self.model.tokenizer, self.raw),
                max_len=self.model.max_len,
                max_batch=rows,
                to_text=self.model.tokenizer.decode,
                tokenizer=self.model.tokenizer,
                mesh=self.model.mesh,
            )

        return make(self.target), make(DraftedModel(self.target, self.draft))

    def measure(
        self, prompts: Sequence[Sequence[int]], rows: int, repeats: int
    ) -> tuple[Timing, list[Request]]:
        """(timing, the requests that the draft answered). The first pass of each compiles, and its
        answers are compared."""
        timing, samplers = Timing(rows), self.samplers(rows)
        plain, drafted = (self.answer(sampler, prompts)[-1] for sampler in samplers)
        timing.answers = len(prompts)
        timing.tokens = sum(len(plain_request.tokens) for plain_request in plain)
        for plain_request, drafted_request in zip(plain, drafted, strict=True):
            timing.different += plain_request.tokens != drafted_request.tokens
            for token, guess, a, b in zip(
                plain_request.tokens,
                drafted_request.tokens,
                plain_request.logprobs,
                drafted_request.logprobs,
                strict=False,
            ):
                if token != guess:
                    break
                timing.largest_difference = max(timing.largest_difference, abs(a - b))
        for _ in range(repeats):
            for sampler, passes, decoding in (
                (samplers[0], timing.plain, timing.plain_decoding),
                (samplers[1], timing.drafted, timing.drafted_decoding),
            ):
                seconds, reading, _ = self.answer(sampler, prompts)
                passes.append(seconds)
                decoding.append(seconds - reading)
        return timing, drafted

    def answer(
        self, sampler: LocalSampler, prompts: Sequence[Sequence[int]]
    ) -> tuple[float, float, list[Request]]:
        """Return (seconds, seconds of reading prompts, requests that have ended) of one pass over
        all prompts."""
        reading = 0.0

        @contextlib.contextmanager
        def time_phase(name: str) -> Iterator[None]:
            nonlocal reading
            began = time.perf_counter()
            yield
            if name == READING:
                sampler.wait()
                reading += time.perf_counter() - began

        sampler.phase = time_phase
        requests = [
            sampler.request(prompt, self.sampling, number=i, name=f"prompt {i}")
            for i, prompt in enumerate(prompts)
        ]
        start = time.perf_counter()
        for request in sorted(requests, key=lambda r: len(r.prompt)):
            sampler.add(request)
        while sampler.busy:
            sampler.step()
        return time.perf_counter() - start, reading, requests


def describe(requests: Sequence[Request], num_drafted: int) -> dict[str, Any]:
    """Acceptance lengths: tau is the mean over answers of the mean over their cycles."""
    pooled = Acceptance(num_drafted)
    for request in requests:
        pooled.add(request.lengths)
    means = [statistics.fmean(request.lengths) for request in requests if request.lengths]
    return {
        "tau": statistics.fmean(means) if means else 0.0,
        "tau_pooled": pooled.mean,
        "cycles": pooled.cycles,
        "accepted": pooled.accepted,
        "accepted_by_position": pooled.by_position,
        "histogram": pooled.histogram[1:].tolist(),
    }
