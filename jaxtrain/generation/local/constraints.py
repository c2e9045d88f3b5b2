"""Constrained answers: which tokens may come next, by automatons of llguidance on the host.

    request ─> Grammars.begin ─> Constraint ── allowed ──> bits [W] ─> draw on the device ─┐
                                     ^──────────────── accept(token) <─────────────────────┘

A bit stands for a token: W = ceil(V / 32) words of 32 bits. An end token is allowed exactly where
the answer may end.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config.task import StructuredOutputs
from jaxtrain.errors import UserError


class Constraint:
    """State of one answer's automaton."""

    def __init__(self, matcher: Any, num_words: int):
        """num_words: W."""
        self.matcher, self.num_words = matcher, num_words

    @property
    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, uint32 [W]."""
        # The library's mask ends with a bit that is no token's: a word more where 32 divides V.
        return np.frombuffer(self.matcher.compute_bitmask(), np.uint32)[: self.num_words]

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed."""
        accepted = self.matcher.consume_token(token)
        assert accepted, f"token {token} was drawn: {self.matcher.get_error()}"


class Grammars:
    """Automatons over a tokenizer's tokens; compiled once for each constraint."""

    def __init__(self, tokenizer: Any, vocab_size: int):
        """vocab_size: V of the model, which may have more tokens than the tokenizer."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self._tokens = functools.lru_cache(maxsize=8)(self._read_tokens)
        self._compiled = functools.lru_cache(maxsize=1024)(self._compile)

    def begin(self, structured: StructuredOutputs, ends: Sequence[int]) -> Constraint:
        """Return the state before an answer's first token; UserError for a constraint that cannot
        be compiled. ends: the tokens that end it."""
        require_library()
        key = structured.model_dump_json(exclude_defaults=True)
        return Constraint(self._compiled(key, tuple(ends)).deep_copy(), -(-self.vocab_size // 32))

    def _compile(self, key: str, ends: tuple[int, ...]) -> Any:
        from llguidance import LLMatcher

        ((name, value),) = json.loads(key).items()
        if name == "regex":
            grammar = LLMatcher.grammar_from_regex(value)
        elif name == "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            grammar = LLMatcher.grammar_from_lark(f"start: {choices}")
        else:
            grammar = LLMatcher.grammar_from_json_schema(value)
        tokens = self._tokens(ends)
        if problem := LLMatcher.validate_grammar(grammar, tokens):
            text = " ".join(problem.split())
            raise UserError(f"sampling.structured_outputs.{name} cannot be compiled: {text[:300]}")
        return LLMatcher(tokens, grammar, log_level=0)

    def _read_tokens(self, ends: tuple[int, ...]) -> Any:
        from llguidance.hf import from_tokenizer

        if not ends:
            raise UserError(
                "sampling.structured_outputs needs a token that ends an answer, and the tokenizer"
                " has none; set model.special_tokens.eos_token"
            )
        return from_tokenizer(self.tokenizer, n_vocab=self.vocab_size, eos_token=list(ends))


def require_library() -> None:
    """Raise UserError where llguidance is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise UserError(
            "sampling.structured_outputs with the local engine needs the package llguidance: pip"
            " install 'jaxtrain[constrained]'"
        ) from None
