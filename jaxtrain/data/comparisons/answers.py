"""Answers of preference data as tokens, rendered as the model would see and write them.

    prompt    the conversation so far with the generation prompt, or the text so far
    answer    what follows, to the end of its last assistant turn; weight 1 on assistant tokens

The tokens are those of SFT on prompt and answer together (template.py), cut where the answers
begin. If a template shows the prompt differently for different answers, because it rewrites
history, the prompt is the common beginning, and the remaining prompt tokens belong to each answer
with weight 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat import template
from jaxtrain.data.chat.control_tokens import encoder_of
from jaxtrain.data.chat.messages import MalformedRow, without_flags
from jaxtrain.data.chat.rows import Conversation
from jaxtrain.data.chat.tokenize import open_images
from jaxtrain.data.comparisons.preference_row import NOTHING_SHARED, SAME, PreferenceRow
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.prefixes import token_keys
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.data.sample import Dropped, select_turns, weigh_ends
from jaxtrain.errors import UserError


class AnswerBranch(NamedTuple):
    """The prompt and one answer."""

    tokens: np.ndarray
    """int32 [n]."""
    weights: np.ndarray
    """float32 [n]; 0 in the prompt."""
    begin: int
    """Index of the answer's first token."""
    images: PlacedImages | None = None

    @property
    def keys(self) -> np.ndarray:
        """[n]: what has to be equal where branches share tokens."""
        return token_keys(self.tokens, self.images)


class Answers:
    """Converts `PreferenceRow`s to `Ranked` with one tokenizer. Picklable."""

    def __init__(self, dataset: DatasetConfig, tokenizer: Any, sequence_len: int, too_long: str):
        """sequence_len: tokens of a prompt and one answer; too_long: drop, truncate (answers, at
        their end) or error."""
        self.dataset, self.tokenizer = dataset, tokenizer
        self.sequence_len, self.too_long = sequence_len, too_long
        self.encoder = encoder_of(tokenizer, dataset.special_tokens)
        self.images = open_images(dataset, tokenizer)
        self.renderer = None
        if tokenizer.chat_template:
            self.renderer = template.Renderer(
                tokenizer, dataset.special_tokens, dataset.chat_template_kwargs
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Answers, (self.dataset, self.tokenizer, self.sequence_len, self.too_long)

    def __call__(self, judged: PreferenceRow, origin: str) -> list[Ranked | Dropped]:
        """Return at most one Ranked, and a drop for each comparison or label that it lacks.

        Raises UserError for what makes every row fail, and for a long answer under "error".
        """
        shared_text = judged.prompt is None and self._common_text(judged.answers)
        branches = [self._try(judged, answer, shared_text) for answer in judged.answers]
        rendered = [branch for branch in branches if isinstance(branch, AnswerBranch)]
        dropped = [Dropped(reason, origin) for reason in judged.left_out]
        shared = count_shared(rendered)
        answers: dict[int, RankedAnswer | str] = {}
        for index, branch in enumerate(branches):
            answers[index] = branch if isinstance(branch, str) else self._cut(branch, shared)
        pairs, used = [], []
        for pair in judged.pairs:
            good, bad = answers[pair.chosen], answers[pair.rejected]
            if isinstance(good, str) or isinstance(bad, str):
                dropped.append(Dropped(good if isinstance(good, str) else str(bad), origin))
            elif np.array_equal(
                token_keys(good.tokens, good.images), token_keys(bad.tokens, bad.images)
            ):
                dropped.append(Dropped(f"malformed row: {SAME}", origin))
            else:
                pairs.append(pair)
                used += [pair.chosen, pair.rejected]
        for index, answer in enumerate(answers.values() if judged.labels else ()):
            if isinstance(answer, str):
                dropped.append(Dropped(answer, origin))
            else:
                used.append(index)
        used = sorted(set(used))
        if not used:
            return [*dropped] or [Dropped("nothing to compare", origin)]
        new_index = {index: new for new, index in enumerate(used)}
        ranked = Ranked(
            rendered[0].tokens[:shared],
            tuple(answers[index] for index in used),  # type: ignore[arg-type]
            tuple(RankedPair(new_index[p.chosen], new_index[p.rejected], p.margin) for p in pairs),
            tuple(judged.labels[index] for index in used) if judged.labels else (),
            origin,
            self._count_controls(judged, used),
            _cut_images(rendered[0].images, 0, shared),
        )
        return [ranked, *dropped]

    def _try(
        self, judged: PreferenceRow, answer: Any, shared_text: int | bool
    ) -> AnswerBranch | str:
        """Encode prompt and answer; or return the reason why that is impossible."""
        try:
            if isinstance(answer, str):
                return self._text(judged.prompt, answer, int(shared_text))
            assert isinstance(judged.prompt, list)
            conversation = Conversation(
                [*judged.prompt, *answer],
                judged.tools,
                judged.chat_template_kwargs,
                len(judged.prompt),
            )
            return self._chat(conversation, judged.images)
        except template.TemplateOmission as error:
            return str(error)
        except (MalformedRow, template.TemplateFailed) as error:
            return f"malformed row: {error}"
        except template.RetokenizationError:
            return "turn is tokenized differently in context"

    def _text(self, prompt: Any, answer: str, shared_text: int) -> AnswerBranch:
        """Encode prompt and answer separately and append eos; without a prompt, encode one text
        whose first `shared_text` tokens are the prompt."""
        before = [] if prompt is None else template.begin_text(self.tokenizer, self.encoder, prompt)
        if prompt is None:
            after, begin = template.begin_text(self.tokenizer, self.encoder, answer), shared_text
        elif not before:
            raise MalformedRow("empty prompt")
        else:
            after, begin = self.encoder.text(answer), len(before)
        eos = template.eos_of(self.tokenizer)
        tokens = np.array([*before, *after, *([] if after[-1:] == [eos] else [eos])], np.int32)
        weights = (np.arange(len(tokens)) >= begin).astype(np.float32)
        return AnswerBranch(tokens, weights, begin)

    def _common_text(self, texts: Sequence[Any]) -> int:
        """Count the tokens of the common beginning of texts that include the prompt."""
        token_lists = [template.begin_text(self.tokenizer, self.encoder, text) for text in texts]
        return _count_alike(token_lists)

    def _chat(self, conversation: Conversation, by_marker: Mapping[str, Image]) -> AnswerBranch:
        """Render a conversation with its answer, which begins at its `first` message."""
        template.require_chat_template(self.tokenizer)
        assert self.renderer is not None
        messages, mode, first = conversation.messages, self.dataset.train_on, conversation.first
        selected = "assistant" if mode == "all" else mode
        roles = self.dataset.roles_to_train
        turns = [i for i in select_turns(messages, selected, first, roles) if i >= first]
        if not turns:
            raise MalformedRow("no trained turn in an answer")
        # Turns that must not train are located as well, because "all" trains what is around them.
        shut = [i for i in select_turns(messages, "all") if i >= first] if mode == "all" else []
        spans = template.context_spans(messages)
        located = sorted({*turns, *shut, *(spans if mode == "all" else ())})
        keywords = conversation.chat_template_kwargs
        find = self._finder(messages, by_marker)
        shown = without_flags(messages)
        renderings = self.renderer(shown, conversation.tools, located, keywords, spans)
        if len(renderings) > 1:
            # No single sequence equals the model's input at each of these turns.
            raise MalformedRow("the chat template shows a turn of an answer differently later on")
        tokens, author = renderings[0].tokens, renderings[0].author
        trained = np.flatnonzero(np.isin(author, turns))
        if not len(trained):
            raise MalformedRow("no trained token in an answer")
        begin, end = int(trained[0]), int(trained[-1]) + 1
        weights = np.isin(author, turns)
        if mode == "all":
            weights = (np.arange(len(author)) >= begin) & ~np.isin(author, [*shut, template.MASKED])
        placed = _cut_images(find(tokens), 0, end)
        tokens, weights = tokens[:end], weights[:end].astype(np.float32)
        if placed is not None:
            weights[placed.slot >= 0] = 0.0
        if (mode_of_ends := self.dataset.train_on_eot) != "turn":
            ends = frozenset().union(*template.turn_ends(self.tokenizer))
            weigh_ends(tokens[begin:], weights[begin:], ends, mode_of_ends)
        return AnswerBranch(tokens, weights, begin, placed)

    def _finder(
        self, messages: Sequence[Any], by_marker: Mapping[str, Image]
    ) -> Callable[[np.ndarray], PlacedImages | None]:
        """Return what finds the images of messages in their tokens; raises MalformedRow for a place
        without an image."""
        if self.images is None:
            return lambda tokens: None
        from jaxtrain.data.images.placing import list_images, place_images

        images, image_format = list_images(messages, by_marker), self.images.format
        return lambda tokens: place_images(tokens, images, image_format)

    def _cut(self, branch: AnswerBranch, shared: int) -> RankedAnswer | str:
        """Cut the answer out of a branch and limit its length; or return the reason to drop it."""
        if shared < 1:
            return f"malformed row: {NOTHING_SHARED}"
        room = self.sequence_len
        if len(branch.tokens) > room:
            if self.too_long == "error":
                raise UserError(
                    f"a prompt and its answer have {len(branch.tokens)} tokens, but"
                    f" data.sequence_len is {room}: raise it, or set data.too_long to"
                    ' "drop" or "truncate"'
                )
            if branch.begin >= room:
                return "prompt too long"
            if self.too_long == "drop":
                return "too long"
            if branch.images is not None and self.images is not None:
                room = self.images.move_cut(branch.images, room, self.encoder)
        tokens, weights = branch.tokens[shared:room], branch.weights[shared:room]
        if not weights.any():
            return "no trained token"
        return RankedAnswer(tokens, weights, _cut_images(branch.images, shared, room))

    def _count_controls(self, judged: PreferenceRow, used: Sequence[int]) -> int:
        """Count the control tokens that the texts spell, those of the prompt once."""
        values = [judged.prompt, judged.tools, *(judged.answers[index] for index in used)]
        return self.encoder.protect(values).count


def count_shared(branches: Sequence[AnswerBranch]) -> int:
    """Count the prompt tokens: the common beginning of all branches, before any answer begins."""
    if not branches:
        return 0
    return min(_count_alike([b.keys for b in branches]), *(b.begin for b in branches))


def _cut_images(images: PlacedImages | None, start: int, stop: int) -> PlacedImages | None:
    return images.cut(start, min(stop, len(images.slot))) if images is not None else None


def _count_alike(sequences: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    first, *remaining = (np.asarray(sequence) for sequence in sequences)
    longest = len(first)
    for later in remaining:
        n = min(longest, len(later))
        differs = np.flatnonzero(first[:n] != later[:n])
        longest = int(differs[0]) if len(differs) else n
    return longest
