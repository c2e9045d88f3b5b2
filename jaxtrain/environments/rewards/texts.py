"""Built-in rewards of texts: exact match, format, regex, length, JSON schema."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import UserError

Completion = str | Sequence[Mapping[str, Any]]

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
FENCE = re.compile(r"```(?:[\w+-]*)\n(.*?)```", re.DOTALL)


def text_of(completion: Completion) -> str:
    """Return the text of a completion; for a conversation, of the last assistant message."""
    if isinstance(completion, str):
        return completion
    replies = [message for message in completion if message.get("role") == "assistant"]
    return str(replies[-1].get("content") or "") if replies else ""


def without_thinking(text: str) -> str:
    """Remove <think> blocks from a text; an unclosed one extends to the end."""
    return THINKING.sub("", text).strip()


def column(columns: Mapping[str, Sequence[Any]], name: str, reward: str) -> Sequence[Any]:
    """Return a column of the row; UserError if it is missing."""
    if name not in columns:
        raise UserError(
            f"reward {reward!r} reads the column {name!r}, which the rows do not have (they have"
            f" {', '.join(sorted(columns)) or 'none'}); set options.column to the right one"
        )
    return columns[name]


def exact_match(
    completions: Sequence[Completion],
    column_name: str = "answer",
    ignore_case: bool = True,
    **columns: Sequence[Any],
) -> list[float]:
    """Score 1 if the answer equals the column's text, ignoring thinking and white space, else 0."""

    def norm(text: Any) -> str:
        plain = " ".join(str(text).split())
        return plain.casefold() if ignore_case else plain

    answers = column(columns, column_name, "exact_match")
    return [
        float(norm(without_thinking(text_of(completion))) == norm(answer))
        for completion, answer in zip(completions, answers, strict=True)
    ]


def format(
    completions: Sequence[Completion],
    pattern: str = r"\s*<think>(?:(?!</?think>).)*</think>\s*(?:(?!</?think>).)+",
    **columns: Any,
) -> list[float]:
    """Score 1 if the full text matches the pattern, else 0; default: one thought, then an
    answer."""
    compiled = compile_pattern(pattern, "format")
    return [float(bool(compiled.fullmatch(text_of(completion)))) for completion in completions]


def regex(completions: Sequence[Completion], pattern: str, **columns: Any) -> list[float]:
    """Score 1 if the pattern occurs in the text, else 0."""
    compiled = compile_pattern(pattern, "regex")
    return [float(bool(compiled.search(text_of(completion)))) for completion in completions]


def compile_pattern(pattern: str, reward: str) -> re.Pattern[str]:
    """Compile a regular expression in which a dot also matches newlines."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(
            f"reward {reward!r}: options.pattern {pattern!r} is not valid: {error}"
        ) from None


def length(
    completions: Sequence[Completion],
    completion_ids: Sequence[Sequence[int]],
    max_tokens: int,
    cache_tokens: int = 0,
    **columns: Any,
) -> list[float]:
    """Score 0 up to max_tokens - cache_tokens, falling linearly to -1 at max_tokens and beyond.

    This is DAPO's soft overlong punishment; with cache_tokens 0 a step. Lengths are in sampled
    tokens.
    """
    if not 0 <= cache_tokens <= max_tokens:
        raise UserError(
            f"reward 'length': options.cache_tokens {cache_tokens} must lie between 0 and"
            f" max_tokens {max_tokens}"
        )
    free = max_tokens - cache_tokens
    return [
        0.0
        if len(ids) <= free
        else -1.0
        if len(ids) > max_tokens
        else -(len(ids) - free) / cache_tokens
        for ids in completion_ids
    ]


def json_schema(
    completions: Sequence[Completion],
    schema: Mapping[str, Any] | None = None,
    column_name: str = "schema",
    **columns: Sequence[Any],
) -> list[float]:
    """Score 1 if the answer is JSON that satisfies the schema (options.schema, or a column), else
    0.

    If the answer has a fenced code block, the block is validated.
    """
    try:
        import jsonschema
    except ImportError:
        raise UserError(
            "reward 'json_schema' needs the package jsonschema: pip install 'jaxtrain[rewards]'"
        ) from None
    schemas = (
        [schema] * len(completions)
        if schema is not None
        else column(columns, column_name, "json_schema")
    )

    def judge(completion: Completion, expected: Any) -> float:
        expected = json.loads(expected) if isinstance(expected, str) else expected
        text = without_thinking(text_of(completion))
        fenced = FENCE.search(text)
        try:
            jsonschema.validate(json.loads(fenced.group(1) if fenced else text), expected)
        except jsonschema.SchemaError as error:
            raise UserError(f"reward 'json_schema': not a JSON schema: {error.message}") from None
        except (ValueError, RecursionError, jsonschema.ValidationError):
            return 0.0
        return 1.0

    return [judge(*pair) for pair in zip(completions, schemas, strict=True)]
