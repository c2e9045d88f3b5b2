"""Token sequences of a conversation: the exact prompt of each sampled turn.

Tokens that the policy sampled are never tokenized again. The chat template renders the conversation
with a placeholder for each sampled turn. The text around the placeholders is tokenized, and each
placeholder is replaced by the sampled tokens:

    template   <|im_start|>user..assistant\\n [turn 0] \\n<|im_start|>user..assistant\\n
    tokens     prompt                         sampled  following messages

If the template shows an earlier turn differently, like Qwen3's, which drops thoughts before the
last question, the next turn has another sequence as its prompt:

    sequence 0   question 1 | thought 1, answer 1
    sequence 1   question 1, answer 1, question 2 | thought 2, answer 2
"""

import bisect
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.batch import join_routes
from jaxtrain.data.chat.control_tokens import encoder_of, make_mark
from jaxtrain.data.chat.omissions import Kwargs, write_thoughts_once
from jaxtrain.data.chat.prompt import render_prompt
from jaxtrain.data.chat.template import (
    encode,
    end_of_turn_ids,
    require_chat_template,
    turn_ends,
)
from jaxtrain.data.chat.tokenize import open_images
from jaxtrain.data.packing.prefixes import token_keys
from jaxtrain.data.packing.tree import Image, PlacedImages, join_images
from jaxtrain.environments.tool_calls import CLOSED, OPENED
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.episodes import TokenSequence

OPENING = re.compile(r"<think>\s*$")


class ShownText(NamedTuple):
    """Text of the template."""

    text: str
    images: tuple[Image, ...] = ()
    """Images that the text holds, in order."""


Piece = ShownText | tuple[int, bool]
"""Text of the template, or (number of a sampled turn, True if its thought is shown)."""


class PromptTooLong(Exception):
    """A text is too long for a row, whatever its tokens are. least: tokens that it has at least."""

    def __init__(self, least: int):
        super().__init__(f"at least {least} tokens")
        self.least = least


class TurnTemplate:
    """Chat template of a tokenizer with its end-of-turn token; UserError if it lacks either."""

    def __init__(self, tokenizer: Any) -> None:
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        ends = turn_ends(tokenizer)
        if not ends.closing and ends.following <= {tokenizer.eos_token_id}:
            raise UserError(
                "the chat template writes no end-of-turn token after an assistant turn: "
                "use one that does (model.chat_template)"
            )
        self.closing = ends.closing
        self.ends = tuple(sorted(end_of_turn_ids(tokenizer)))
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters that one token can hold at most."""
        self.nonce = secrets.token_hex(8)
        self.encoder, self.spelled = encoder_of(tokenizer), make_mark()
        self.images = open_images(None, tokenizer)
        """images.reader.ImageReader of messages; None: they hold text alone."""

    def stand_in(self, number: int, turn: "DrawnTurn") -> str:
        """Return the text that the template renders in place of a sampled turn."""
        answer = self._name("answer", number)
        if not turn.thought:
            return answer
        return f"{OPENED}\n{self._name('thought', number)}\n{CLOSED}\n\n{answer}"

    def split(
        self,
        messages: Sequence[Mapping[str, Any]],
        drawn: Mapping[int, int],
        turns: Sequence["DrawnTurn"],
        tools: Any,
        kwargs: Kwargs = None,
        images: Sequence[Image] = (),
    ) -> list[Piece]:
        """Render the prompt after `messages` as alternating texts and turns, without turns that the
        template omits.

        drawn: {index of a message: number of its turn}, in order. images: those of the messages'
        markers, in order.
        """
        # Messages of the environment are text, even if they spell control tokens.
        copies = [dict(message) for message in write_thoughts_once(self.tokenizer, messages)]
        filled, tools, kwargs = self.encoder.protect((copies, tools, kwargs), self.spelled).value
        for index, number in drawn.items():  # after protecting: <think> may be a control token
            filled[index] = {**filled[index], "content": self.stand_in(number, turns[number])}
        text = render_prompt(self.tokenizer, filled, tools, kwargs)
        pieces: list[Piece] = []
        start, waiting = 0, [*reversed(images)]
        for number in drawn.values():
            turn = turns[number]
            answer = self._name("answer", number)
            position = text.find(answer, start)
            if position < 0:
                continue
            stop, begin = position + len(answer), position
            thought = text.find(self._name("thought", number), start, position)
            shown = thought >= 0
            if shown:
                opening = None if turn.opened else OPENING.search(text, start, thought)
                begin = thought if opening is None else opening.start()
            if turn.finished:
                stop = self._find_close(text, stop, turn.tokens[-1])
            shown_text = self._take_images(text[start:begin], waiting)
            pieces += [shown_text, (number, shown or not turn.thought)]
            start = stop
        return [*pieces, self._take_images(text[start:], waiting)]

    def place(self, tokens: Sequence[int], images: Sequence[Image]) -> PlacedImages | None:
        """Return where the images of a text stand in its tokens."""
        if not images:
            return None
        from jaxtrain.data.images.placing import place_images  # not for conversations without

        return place_images(np.asarray(tokens), images, self.images.format)

    def _take_images(self, text: str, waiting: list[Image]) -> ShownText:
        """Take the images that a text holds from the end of those that wait."""
        images = []
        count = text.count(self.images.format.feature_text) if waiting else 0
        while count > 0:
            images.append(waiting.pop())
            count -= images[-1].num_features
        return ShownText(text, tuple(images))

    def _find_close(self, text: str, stop: int, drawn: int) -> int:
        """Return the place behind the token with which the template ends a turn that ends at
        `stop`, for the turn has drawn that token or another end itself. A token of the next message
        stays, unless it is the one that was drawn."""
        rest = text[stop:].lstrip()
        control = self.encoder.find_open(rest)
        token = self.encoder.contents.get(control)
        if token is None or not (token in self.closing or token == drawn):
            return stop
        return len(text) - len(rest) + len(control)

    def opens_thought(self, pieces: Sequence[Piece]) -> bool:
        """Return True if the generation prompt opens a thought."""
        last = pieces[-1]
        return isinstance(last, ShownText) and OPENING.search(last.text[-40:]) is not None

    def _name(self, part: str, number: int) -> str:
        return f"{part}{self.nonce}n{number}e"


@dataclass(eq=False)
class DrawnTurn:
    """Turn as sampled by the policy."""

    tokens: list[int]
    answer: list[int]
    """Tokens after the thought."""
    thought: bool
    """True if it has a closed thought."""
    opened: bool
    """True if its prompt opened the thought."""
    finished: bool
    """True if it ends with an end-of-turn token."""


@dataclass(eq=False)
class Prompt:
    """Prompt of a turn."""

    tokens: list[int]
    pieces: list[Piece]
    """Texts and turns that it consists of; empty if only the tokens are known."""
    opened: bool = False
    """True if it opens a thought."""
    images: PlacedImages | None = None
    """Images that stand in the tokens."""


class TokenHistory:
    """Token sequences of a conversation. A turn extends the longest sequence that is an exact
    prefix of its prompt, or starts another one."""

    def __init__(self, template: TurnTemplate, rewritten: bool = True):
        """rewritten: True if prompts follow the template's rewriting of history. False: every turn
        continues the previous tokens, and the episode is one sequence."""
        self.template, self.rewritten = template, rewritten
        self.turns: list[DrawnTurn] = []
        self.sequences: list[TokenSequence] = []
        self._pieces: list[Piece] = []
        """Pieces of the last turn's sequence, up to that turn."""
        self._encoded: dict[str, list[int]] = {}

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        drawn: Mapping[int, int],
        tools: Any,
        kwargs: Kwargs = None,
        most: int | None = None,
        images: Sequence[Image] = (),
    ) -> Prompt:
        """Build the prompt of the next turn. drawn: {index of a message: number of its turn}, in
        order. kwargs: variables of the chat template. most: tokens beyond which it is of no use.
        images: those of the messages' markers, in order. Raises TemplateFailed, and PromptTooLong
        before such a text is tokenized."""
        if most is not None:
            texts = [m["content"] for m in messages if m["role"] != "assistant"]
            self._check_length(texts, most)
        pieces = self.template.split(messages, drawn, self.turns, tools, kwargs, images)
        if self.turns and not self.rewritten:
            last = len(self.turns) - 1
            if len(pieces) < 2 or pieces[-2][0] != last:
                raise UserError(
                    "the chat template leaves out the last turn, so the conversation cannot be"
                    ' continued token by token: set env.history to "template", or use a template'
                    " that keeps turns (model.chat_template)"
                )
            pieces = [*self._pieces, pieces[-1]]
        if most is not None:
            texts = [piece.text for piece in pieces if isinstance(piece, ShownText)]
            self._check_length(texts, most)
        runs = [self._tokens(piece) for piece in pieces]
        placed = [
            (
                self.template.place(run, piece.images if isinstance(piece, ShownText) else ()),
                len(run),
            )
            for run, piece in zip(runs, pieces, strict=True)
        ]
        tokens = [token for run in runs for token in run]
        return Prompt(tokens, pieces, self.template.opens_thought(pieces), join_images(placed))

    def add(self, prompt: Prompt, completion: Completion) -> DrawnTurn:
        """Add a turn that was sampled from a prompt."""
        tokens = [int(token) for token in completion.tokens]
        candidates = [sequence for sequence in self.sequences if _begins(prompt, sequence)]
        sequence = max(candidates, key=lambda sequence: len(sequence.tokens), default=None)
        if sequence is None:
            sequence = TokenSequence([], [], [], [], [])
            self.sequences.append(sequence)
        _extend(sequence, prompt.tokens[len(sequence.tokens) :])
        sequence.images = prompt.images
        _extend(sequence, tokens, completion.logprobs, completion.versions, len(self.turns))
        sequence.routed = join_routes(sequence.routed, completion.routed)
        text = self.template.tokenizer.decode(tokens)
        thought = CLOSED in text and (prompt.opened or OPENED in text.partition(CLOSED)[0])
        turn = DrawnTurn(
            tokens,
            self._behind_thought(tokens, text) if thought else tokens,
            thought,
            prompt.opened,
            bool(tokens) and tokens[-1] in self.template.ends,
        )
        self._pieces = [*prompt.pieces, (len(self.turns), True)]
        self.turns.append(turn)
        return turn

    def _check_length(self, texts: Sequence[str], most: int) -> None:
        least = sum(map(len, texts)) // self.template.longest_token
        if least > most:
            raise PromptTooLong(least)

    def _tokens(self, piece: Piece) -> list[int]:
        if isinstance(piece, ShownText):
            text = piece.text
            if text not in self._encoded:
                self._encoded[text] = self.template.encoder(text, self.template.spelled)
            return self._encoded[text]
        number, with_thought = piece
        return self.turns[number].tokens if with_thought else self.turns[number].answer

    def _behind_thought(self, tokens: list[int], text: str) -> list[int]:
        """Return the tokens after the last </think> and its line breaks; if a token spans that
        boundary, the text after it is tokenized again."""
        decode = self.template.tokenizer.decode
        total = text.count(CLOSED)
        cut = bisect.bisect_left(
            range(len(tokens) + 1), total, key=lambda n: decode(tokens[:n]).count(CLOSED)
        )
        if decode(tokens[:cut]).endswith(CLOSED):
            while cut < len(tokens) and not decode([tokens[cut]]).strip("\n"):
                cut += 1
            if cut == len(tokens) or not decode([tokens[cut]]).startswith("\n"):
                return tokens[cut:]
        return encode(self.template.tokenizer, text.rpartition(CLOSED)[2].lstrip("\n"))


def _begins(prompt: Prompt, sequence: TokenSequence) -> bool:
    """Return True if a prompt begins with the tokens and images of a sequence."""
    count = len(sequence.tokens)
    if prompt.tokens[:count] != sequence.tokens:
        return False
    if prompt.images is None:
        return sequence.images is None
    placements = [
        join_images([(x, count)], count) for x in (prompt.images.cut(0, count), sequence.images)
    ]
    first, second = (token_keys(np.asarray(sequence.tokens), placed) for placed in placements)
    return np.array_equal(first, second)


def _extend(
    sequence: TokenSequence,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] = (),
    turn: int = -1,
) -> None:
    """Append tokens: sampled ones with their log-probs, or context (logprobs None)."""
    count = len(tokens)
    sequence.tokens += tokens
    sequence.sampled += [logprobs is not None] * count
    sequence.logprobs += [0.0] * count if logprobs is None else logprobs
    sequence.versions += versions or [-1] * count
    sequence.turns += [turn] * count
