"""Rows to samples: reads a row by its format, chooses the tokens that train, applies length rules.

The first token of a sequence has nothing before it and never trains.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat import template
from jaxtrain.data.chat.control_tokens import encoder_of
from jaxtrain.data.chat.messages import (
    KEYS,
    MalformedRow,
    check_readable,
    check_values,
    read_messages,
    read_tools,
)
from jaxtrain.data.formats import (
    COLUMNS,
    OPTIONAL,
    call_custom_format,
    check_names,
    detect_format,
    find_custom_format,
)
from jaxtrain.data.packing.prefixes import share_prefixes
from jaxtrain.data.packing.tree import Tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.errors import UserError
from jaxtrain.text_safety import name_type, show

TEXTS = ("text", "prompt", "completion", "instruction", "output", "input", "system", "segments")
"""Columns of texts; messages and tools are checked when they are read."""
NAMES = [
    *sorted({name for needed in COLUMNS.values() for names in needed for name in names} | OPTIONAL),
    *(f"messages.{key}" for key in KEYS),
]
"""Names that `fields` may assign to columns."""
ALPACA_INPUT = "\n\n### Input:\n"

Result = list[Sample | Tree | Dropped]
Weighted = tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]


class RowTokenizer:
    """Callable (row, origin) -> samples and drops, for one dataset. Picklable.

    Raises UserError only for what makes every row fail (no chat template, no end-of-turn token) and
    for a long sample under "error". A pickle holds only the name of the format, because a custom
    format may be defined in a file that is not importable by name.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        tokenizer: Any,
        sequence_len: int,
        too_long: str,
        trees: bool = False,
    ) -> None:
        """too_long: drop | truncate | error, for samples of more than sequence_len tokens. trees:
        samples of one conversation that begin alike become trees of at most that many tokens."""
        self.outside = find_custom_format(dataset)
        check_names(dataset, None if self.outside else NAMES)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.sequence_len = sequence_len
        self.too_long = too_long
        self.trees = trees
        self.renderer = None
        if tokenizer.chat_template:
            self.renderer = template.Renderer(
                tokenizer, dataset.special_tokens, dataset.chat_template_kwargs
            )
        self.encoder = encoder_of(tokenizer, dataset.special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.dataset, self.tokenizer, self.sequence_len, self.too_long, self.trees)
        return RowTokenizer, options

    def __call__(self, row: dict[str, Any], origin: str) -> Result:
        """Return the samples of a row, or the reason why it has none."""
        try:
            return self._read(self._renamed(row), origin)
        except MalformedRow as error:
            where = f"{origin}, {error.location}" if error.location else origin
            return [Dropped(f"malformed row: {error}", where)]
        except template.TemplateOmission as error:
            return [Dropped(str(error), origin)]
        except template.TemplateFailed as error:
            return [Dropped(f"malformed row: {error}", origin)]
        except template.RetokenizationError:
            return [Dropped("turn is tokenized differently in context", origin)]
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Rename columns as `fields` says; MalformedRow for unusable texts."""
        check_readable(row)
        row = dict(row)
        for target, column in self.dataset.fields.items():
            if "." not in target and column in row:
                row[target] = row[column]
        check_values([row[name] for name in TEXTS if name in row])
        return row

    def _read(self, row: dict[str, Any], origin: str) -> Result:
        name = self.dataset.format
        if self.outside is not None:
            custom = self._ask(self.outside, row)
            if isinstance(custom, list):
                return self._finish(custom, origin)
            row, name = custom, "auto"
        if name == "auto":
            name = detect_format(row)
            if name is None:
                raise MalformedRow(f"no known columns among {', '.join(map(str, row)) or 'none'}")
        if name == "completion":
            return self._completion(row, origin)
        if name == "input_output":
            pair = self._segments(row)
            texts = [segment["text"] for segment in row["segments"]]
            return self._finish([pair], origin, self._count(*texts))
        if name == "chat":
            return self._chat(*self._conversation(row), origin)
        if name == "prompt_completion":
            prompt, completion = _need(row, "prompt"), _need(row, "completion")
            if isinstance(prompt, str) and isinstance(completion, str) and not self.dataset.as_chat:
                return self._finish(
                    [self._pair(prompt, completion)], origin, self._count(prompt, completion)
                )
            before = self._with_system(row, self._messages(prompt, "user"))
            after = self._messages(completion, "assistant")
            return self._chat(before + after, read_tools(row.get("tools")), origin, len(before))
        instruction, output = _string(row, "instruction"), _string(row, "output")
        extra_input = row.get("input") or ""
        if isinstance(extra_input, list | dict) or isinstance(row.get("system"), list | dict):
            raise MalformedRow("column input or system holds a list or a table, not a text")
        if not self.dataset.as_chat:
            middle = f"{ALPACA_INPUT}{extra_input}" if extra_input else ""
            system = f"{row['system']}\n\n" if row.get("system") else ""
            prompt = f"{system}### Instruction:\n{instruction}{middle}\n\n### Response:\n"
            return self._finish([self._pair(prompt, output)], origin, self._count(prompt, output))
        user = f"{instruction}\n\n{extra_input}" if extra_input else instruction
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
        return self._chat(self._with_system(row, messages), None, origin)

    def _ask(self, read: Any, row: dict[str, Any]) -> dict[str, Any] | list[Weighted]:
        """Apply a custom format to a row and check its output: see formats.py."""
        output = call_custom_format(read, row, self.tokenizer, self.dataset)
        if isinstance(output, dict):
            return output
        if not isinstance(output, list) or not all(map(_is_weighted, output)):
            raise UserError(
                f"format {self.dataset.format!r} returned {show(output)}; it must return a row of a"
                " built-in format (a dict) or a list of (token ids, weights), equally many of both"
            )
        return output

    def _messages(self, value: Any, role: str) -> list[dict[str, Any]]:
        if isinstance(value, str):
            return [{"role": role, "content": value}]
        return read_messages(value, self.dataset.fields, self.dataset.roles)

    def _with_system(self, row: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
        """Prepend the system column, unless the messages have a system message."""
        system = row.get("system")
        if not isinstance(system, str) or not system or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _conversation(self, row: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
        value = row.get("conversations") if row.get("messages") is None else row["messages"]
        if value is None:
            raise MalformedRow("column messages is missing or empty")
        messages = self._with_system(row, self._messages(value, "user"))
        return messages, read_tools(row.get("tools"))

    def _chat(
        self, messages: list[dict[str, Any]], tools: Any, origin: str, first: int = 0
    ) -> Result:
        """Render a conversation; messages before `first` are context unless all tokens train."""
        template.require_chat_template(self.tokenizer)
        assert self.renderer is not None
        mode = self.dataset.train_on
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        if mode == "last":
            turns = turns[-1:]
        elif mode == "per_message":
            turns = [i for i in range(len(messages)) if messages[i].get("train") is True]
        if mode != "all" and not turns:
            return [Dropped("no trained token", origin)]
        plain = [{k: v for k, v in message.items() if k != "train"} for message in messages]
        parts = self.renderer(plain, tools, turns if mode != "all" else [])
        weighted = []
        for part in parts:
            weights = np.ones(len(part.tokens)) if mode == "all" else part.author >= 0
            if weights.any():
                weighted.append((part.tokens, weights.astype(np.float32)))
        return self._finish(weighted, origin, parts[0].controls)

    def _pair(self, prompt: str, completion: str) -> Weighted:
        """Encode prompt and completion separately, as at inference, and append eos."""
        before = self._begin(prompt)
        after = [*self.encoder.text(completion), template.eos_of(self.tokenizer)]
        everything = self.dataset.train_on == "all"
        return before + after, [float(everything)] * len(before) + [1.0] * len(after)

    def _segments(self, row: dict[str, Any]) -> Weighted:
        """Encode segments separately, each trained or not; nothing is appended."""
        segments = _need(row, "segments")
        if not isinstance(segments, list) or not segments:
            raise MalformedRow("segments must be a list of {text, train}")
        tokens: list[int] = []
        weights: list[float] = []
        for segment in segments:
            text = segment.get("text") if isinstance(segment, Mapping) else None
            train = segment.get("train", segment.get("label")) if text is not None else None
            if not isinstance(text, str) or not isinstance(train, bool):
                raise MalformedRow("a segment must have a string text and a true/false train")
            ids = self._begin(text) if not tokens else self.encoder.text(text)
            tokens += ids
            weights += [float(train or self.dataset.train_on == "all")] * len(ids)
        return tokens, weights

    def _completion(self, row: dict[str, Any], origin: str) -> Result:
        """Encode a document and eos, cut into pieces of sequence_len.

        A piece starts with the last token of the previous piece as context, so that every token but
        the first of the document is predicted exactly once.
        """
        text = _string(row, "text")
        tokens = self._begin(text) + [template.eos_of(self.tokenizer)]
        stride = self.sequence_len - 1
        starts = range(0, max(1, len(tokens) - 1), stride)
        pieces = [tokens[start : start + self.sequence_len] for start in starts]
        weighted = [(piece, [1.0] * len(piece)) for piece in pieces]
        return self._finish(weighted, origin, self._count(text))

    def _begin(self, text: str) -> list[int]:
        return template.begin_text(self.tokenizer, self.encoder, text)

    def _count(self, *texts: str) -> int:
        return sum(map(self.encoder.count, texts))

    def _finish(self, sequences: Sequence[Weighted], origin: str, controls: int = 0) -> Result:
        """Apply the length and mask rules of all formats."""
        results: list[Sample | Dropped] = []
        for tokens, weights in sequences:
            if len(tokens) > self.sequence_len:
                if self.too_long == "error":
                    raise UserError(
                        f"{len(tokens)} tokens, but data.sequence_len is {self.sequence_len}: "
                        'raise it, or set data.too_long to "drop" or "truncate"'
                    )
                if self.too_long == "drop":
                    results.append(Dropped("too long", origin))
                    continue
                tokens, weights = tokens[: self.sequence_len], weights[: self.sequence_len]
            weight = np.array(weights, np.float32)
            weight[:1] = 0.0
            if weight.any():
                results.append(Sample(np.asarray(tokens, np.int32), weight, origin, controls))
                controls = 0  # counted once per row, with its first sample
            else:
                results.append(Dropped("no trained token", origin))
        if not results:
            return [Dropped("no trained token", origin)]
        return share_prefixes(results, self.sequence_len) if self.trees else [*results]


def _need(row: dict[str, Any], name: str) -> Any:
    if row.get(name) is None:
        raise MalformedRow(f"column {name} is missing or empty")
    return row[name]


def _string(row: dict[str, Any], name: str) -> str:
    value = _need(row, name)
    if not isinstance(value, str):
        raise MalformedRow(f"column {name} holds {name_type(value)}, not a text")
    return value


def _is_weighted(pair: Any) -> bool:
    """Return True for (token ids, weights) of equal length, ids >= 0 and finite weights."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    try:
        ids, weights = (np.asarray(list(values)) for values in pair)
    except (TypeError, ValueError):
        return False
    if ids.ndim != 1 or ids.shape != weights.shape:
        return False
    if not ids.size:
        return True
    kinds = ids.dtype.kind in "iu" and weights.dtype.kind in "biuf"
    return kinds and bool(0 <= ids.min() <= ids.max() < 2**31 and np.isfinite(weights).all())
