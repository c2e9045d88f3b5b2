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
    OFFSETS,
    MalformedRow,
    Message,
    check_values,
    pick,
    without_flags,
)
from jaxtrain.data.chat.rows import CONTEXT, IMAGES, Conversation, Row
from jaxtrain.data.formats import (
    ANSWERS,
    COLUMNS,
    OPTIONAL,
    QUESTIONS,
    call_custom_format,
    check_names,
    detect_format,
    find_custom_format,
)
from jaxtrain.data.packing.prefixes import share_prefixes
from jaxtrain.data.packing.tree import PlacedImages, Tree
from jaxtrain.data.sample import Dropped, RowNote, Sample, note_unread, select_turns, weigh_ends
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

NAMES = [
    *sorted(
        {name for needed in COLUMNS.values() for names in needed for name in names}
        | {*QUESTIONS, *ANSWERS, *OPTIONAL}
    ),
    *(f"messages.{key}" for key in KEYS),
]
"""Names that `fields` may assign to columns."""
ALPACA_INPUT = "\n\n### Input:\n"
SEGMENT_FLAGS = ("train", "label")

Result = list[Sample | Tree | RowNote]
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
        self.images = open_images(dataset, tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.dataset, self.tokenizer, self.sequence_len, self.too_long, self.trees)
        return RowTokenizer, options

    def __call__(self, row: dict[str, Any], origin: str) -> Result:
        """Return the samples of a row, or the reason why it has none, and what was not read."""
        try:
            columns = Row(row, **self.dataset.reading, spans=True)
            columns.images = images = open_row_images(self.images, origin)
            columns.tokenizer = self.tokenizer
            if self.outside is not None:
                check_values([v for v in columns.columns.values() if isinstance(v, str)])
                custom = self._ask(self.outside, columns.columns)
                if isinstance(custom, list):
                    return self._finish(custom, origin)
                keys = {k: v for k, v in self.dataset.fields.items() if "." in k}
                reading = {**self.dataset.reading, "fields": keys, "column_formats": {}}
                columns = Row(custom, **reading, spans=True)
                columns.images, columns.tokenizer = images, self.tokenizer
            return [*self._read(columns, origin), *note_unread(columns.unread, origin)]
        except MalformedRow as error:
            return [Dropped(f"malformed row: {error}", error.locate(origin))]
        except template.TemplateOmission as error:
            return [Dropped(str(error), origin)]
        except template.TemplateFailed as error:
            return [Dropped(f"malformed row: {error}", origin)]
        except template.RetokenizationError:
            return [Dropped("turn is tokenized differently in context", origin)]
        except UserError as error:
            raise UserError(f"{origin}: {error}") from None

    def _read(self, row: Row, origin: str) -> Result:
        name = self.dataset.format if self.outside is None else "auto"
        if name == "auto":
            name = detect_format(row.columns)
            if name is None:
                names = ", ".join(map(str, row.columns)) or "none"
                raise MalformedRow(f"no known columns among {names}")
        if name == "completion":
            return self._completion(row.require_text("text"), origin)
        if name == "input_output":
            segments = row.require("segments")
            pair = self._segments(segments)
            texts = [segment["text"] for segment in segments]
            return self._finish([pair], origin, self._count(*texts))
        if name == "chat":
            messages = row.messages()
            if messages is None:
                raise MalformedRow("column messages is missing or empty")
            return self._chat(row, row.conversation(messages), origin)
        as_chat = self.dataset.as_chat
        if name == "prompt_completion":
            question = next((name for name in QUESTIONS if name in row), "prompt")
            answer = next((name for name in ANSWERS if name in row), "completion")
            prompt, completion = row.question(question), row.require(answer)
            texts = isinstance(prompt, str) and isinstance(completion, str)
            if texts and not (as_chat or row.has_context):
                row.refuse_media()
                check_values([prompt, completion])
                return self._plain(prompt, completion, origin)
            before = row.read_messages(prompt, "user", name=question)
            after = row.read_messages(completion, "assistant", name=answer)
            before, [after] = continue_turn(before, [after], self.dataset.train_on == "all")
            return self._chat(row, row.conversation(before + after, len(before)), origin)
        instruction, output = row.require_text("instruction"), row.require_text("output")
        extra = row.text("input")
        context = (*CONTEXT, *(IMAGES if row.images is not None else ()))
        if as_chat or any(entry in row for entry in context if entry != "system"):
            user = f"{instruction}\n\n{extra}" if extra else instruction
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
            return self._chat(row, row.conversation(messages), origin)
        row.refuse_media()
        middle = f"{ALPACA_INPUT}{extra}" if extra else ""
        system = row.system()
        before = f"{system}\n\n" if system else ""
        prompt = f"{before}### Instruction:\n{instruction}{middle}\n\n### Response:\n"
        return self._plain(prompt, output, origin)

    def _plain(self, prompt: str, completion: str, origin: str) -> Result:
        """Encode two texts as they stand."""
        pair = self._pair(prompt, completion)
        return self._finish([pair], origin, self._count(prompt, completion))

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

    def _chat(self, row: Row, conversation: Conversation, origin: str) -> Result:
        """Render a conversation; messages of its prompt are context unless all tokens train."""
        template.require_chat_template(self.tokenizer)
        assert self.renderer is not None
        messages, mode = conversation.messages, self.dataset.train_on
        turns = select_turns(messages, mode, conversation.first, self.dataset.roles_to_train)
        spans = template.context_spans(messages)
        if mode != "all" and not turns:
            return [Dropped("no trained token", origin)]
        keywords = conversation.chat_template_kwargs
        located = sorted({*turns, *spans}) if mode == "all" else turns
        shown = without_flags(messages)
        parts = self.renderer(shown, conversation.tools, located, keywords, spans)
        if mode == "all" and len(parts) > 1:
            reason = "the chat template shows a turn that must not train differently later on"
            raise MalformedRow(reason)
        weighted = []
        for index, part in enumerate(parts):
            trained = part.author >= 0  # no other turns are located
            if mode == "all":
                silent = np.isin(part.author, [*turns, template.MASKED])
                trained = ~silent
            weights = trained.astype(np.float32)
            if (mode_of_ends := self.dataset.train_on_eot) != "turn":
                ends = frozenset().union(*template.turn_ends(self.tokenizer))
                weigh_ends(part.tokens, weights, ends, mode_of_ends, index == 0)
            placed = row.images and row.images.find(part.tokens, messages)
            if placed:
                weights[placed.slot >= 0] = 0.0
            if weights.any():
                weighted.append((part.tokens, weights, placed))
        return self._finish(weighted, origin, parts[0].controls)

    def _pair(self, prompt: str, completion: str) -> Weighted:
        """Encode prompt and completion separately, as at inference, and append eos."""
        before = self._begin(prompt)
        after = [*self.encoder.text(completion), template.eos_of(self.tokenizer)]
        everything = self.dataset.train_on == "all"
        return before + after, [float(everything)] * len(before) + [1.0] * len(after)

    def _segments(self, segments: Any) -> Weighted:
        """Encode segments separately, each trained or not; nothing is appended."""
        if not isinstance(segments, list) or not segments:
            raise MalformedRow("segments must be a list of {text, train}")
        check_values(segments)
        tokens: list[int] = []
        weights: list[float] = []
        for segment in segments:
            text = segment.get("text") if isinstance(segment, Mapping) else None
            train = None
            if isinstance(text, str):
                train = pick(segment, SEGMENT_FLAGS, set(), lambda _, value: value)
            if not isinstance(text, str) or not isinstance(train, bool):
                raise MalformedRow("a segment must have a string text and a true/false train")
            ids = self._begin(text) if not tokens else self.encoder.text(text)
            tokens += ids
            weights += [float(train or self.dataset.train_on == "all")] * len(ids)
        return tokens, weights

    def _completion(self, text: str, origin: str) -> Result:
        """Encode a document and eos, cut into pieces of sequence_len.

        A piece starts with the last token of the previous piece as context, so that every token but
        the first of the document is predicted exactly once.
        """
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

    def _finish(self, sequences: Sequence[Any], origin: str, controls: int = 0) -> Result:
        """Apply the length and mask rules of all formats. sequences: `Weighted`, some with their
        PlacedImages."""
        results: list[Sample | Dropped] = []
        for tokens, weights, *placed in sequences:
            images: PlacedImages | None = placed[0] if placed else None
            if len(tokens) > self.sequence_len:
                if self.too_long == "error":
                    raise UserError(
                        f"{len(tokens)} tokens, but data.sequence_len is {self.sequence_len}: "
                        'raise it, or set data.too_long to "drop" or "truncate"'
                    )
                if self.too_long == "drop":
                    results.append(Dropped("too long", origin))
                    continue
                stop = self.sequence_len
                if images is not None and self.images is not None:
                    stop = self.images.move_cut(images, stop, self.encoder)
                    images = images.cut(0, stop)
                tokens, weights = tokens[:stop], weights[:stop]
            weight = np.array(weights, np.float32)
            weight[:1] = 0.0
            if weight.any():
                token_array = np.asarray(tokens, np.int32)
                results.append(Sample(token_array, weight, origin, controls, images))
                controls = 0  # counted once per row, with its first sample
            else:
                results.append(Dropped("no trained token", origin))
        if not results:
            return [Dropped("no trained token", origin)]
        return share_prefixes(results, self.sequence_len) if self.trees else [*results]


def continue_turn(
    prompt: list[Message], answers: list[list[Message]], train_all: bool = False
) -> tuple[list[Message], list[list[Message]]]:
    """Move the beginning of a turn, with which a prompt ends, into the turn of each answer, where
    it is context unless `train_all`; other prompts and answers are returned as they are. Raises
    MalformedRow for a beginning that is more than a text."""
    opening = prompt[-1] if len(prompt) > 1 else {}
    turns = [answer[0] if answer else {} for answer in answers]
    if any(turn.get("role") != "assistant" for turn in (opening, *turns)):
        return prompt, answers
    if "tool_calls" in opening or any("reasoning_content" in turn for turn in (opening, *turns)):
        raise MalformedRow("the prompt ends in a turn that its answer cannot continue")
    text = opening["content"]
    # From before the text on: templates may write an empty thought there (Qwen3).
    context = {"begin_offset": -1, "end_offset": len(text) - 1, "train": False}
    trains = train_all and opening.get("train") is not False
    before = opening.get("train_detail", []) if trains else [context] if text else []
    continued = []
    for turn, answer in zip(turns, answers, strict=True):
        spans = [*before]
        for span in turn.get("train_detail", ()):
            offsets = {name: span[name] + len(text) for name in OFFSETS}
            spans.append({**span, **offsets})
        turn = {**turn, "content": text + turn["content"]}
        turn = {**turn, "train_detail": spans} if spans else turn
        continued.append([turn, *answer[1:]])
    return prompt[:-1], continued


def open_images(dataset: DatasetConfig | None, tokenizer: Any) -> Any:
    """Open the images.reader.ImageReader of a dataset; without a dataset it takes images that were
    read before or whose bytes are in the row, and no paths. None unless the tokenizer has the
    format of its model's images (images/setup.py)."""
    if getattr(tokenizer, "image_format", None) is None:
        return None
    from jaxtrain.data.images.reader import open_reader

    return open_reader(dataset, tokenizer.image_format)


def open_row_images(images: Any, origin: str, max_tokens: int | None = None) -> Any:
    """Open the images.placing.RowImages of a row, for Row.images; None without a reader.
    max_tokens: limit of its images together; None: no limit."""
    if images is None:
        return None
    from jaxtrain.data.images.placing import RowImages

    return RowImages(images, origin, max_tokens)


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
