"""A conversation as the policy sees it: which tokens each of its turns is drawn behind.

What the policy wrote is never tokenized again. The chat template renders the conversation with a
placeholder for each turn that was drawn; what it writes around them is tokenized, and in their
place stand the very tokens:

    template   <|im_start|>user..assistant\\n [turn 0] \\n<|im_start|>user..assistant\\n
    tokens     prompt                         drawn   what was said next

Where the template shows an earlier turn otherwise than it was drawn, as Qwen3's, which drops the
thoughts before the last question, the next turn is drawn behind another sequence:

    sequence 0   question 1 | thought 1, answer 1
    sequence 1   question 1, answer 1, question 2 | thought 2, answer 2
"""

import bisect
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.batch import join_routes
from jaxtrain.data.chat.control_tokens import encoder_of, make_mark
from jaxtrain.data.chat.template import (
    encode,
    end_of_turn,
    end_of_turn_ids,
    render_text,
    require_chat_template,
)
from jaxtrain.environments.tool_calls import CLOSED, OPENED
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.episodes import TokenSequence

OPENING = re.compile(r"<think>\s*$")
Piece = str | tuple[int, bool]
"""Text of the template, or (number of a drawn turn, whether its thought is shown)."""


class TurnTemplate:
    """A tokenizer's chat template and its end of a turn; UserError where it has none of these."""

    def __init__(self, tokenizer: Any) -> None:
        require_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.end = end_of_turn(tokenizer)
        if self.end is None:
            raise UserError(
                "the chat template writes no end-of-turn token after an assistant turn: "
                "use one that does (model.chat_template)"
            )
        self.mark = tokenizer.decode([self.end])
        self.ends = tuple(sorted(end_of_turn_ids(tokenizer)))
        self.nonce = secrets.token_hex(8)
        self.encoder, self.spelled = encoder_of(tokenizer), make_mark()

    def stand_in(self, number: int, turn: "DrawnTurn") -> str:
        """What the template renders in place of a drawn turn."""
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
    ) -> list[Piece]:
        """What the policy sees when it is to speak after `messages`: texts and turns, alternating;
        a turn that the template leaves out is left out.

        drawn: {index of a message: number of its turn}, in order.
        """
        # What the world says is text, whatever control tokens it spells.
        copies = [dict(message) for message in messages]
        filled, tools = self.encoder.protect((copies, tools), self.spelled).value
        for index, number in drawn.items():  # behind it, since <think> may be a control token
            filled[index] = {**filled[index], "content": self.stand_in(number, turns[number])}
        text = render_text(self.tokenizer, filled, tools, generation=True)
        pieces: list[Piece] = []
        start = 0
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
                end = text.find(self.mark, stop)
                if end >= 0 and not text[stop:end].strip():
                    stop = end + len(self.mark)
            pieces += [text[start:begin], (number, shown or not turn.thought)]
            start = stop
        return [*pieces, text[start:]]

    def opens_thought(self, pieces: Sequence[Piece]) -> bool:
        """Whether the generation prompt begins a thought."""
        last = pieces[-1]
        return isinstance(last, str) and OPENING.search(last[-40:]) is not None

    def _name(self, part: str, number: int) -> str:
        return f"{part}{self.nonce}n{number}e"


@dataclass(eq=False)
class DrawnTurn:
    """A turn as the policy drew it."""

    tokens: list[int]
    answer: list[int]
    """Its tokens behind the thought."""
    thought: bool
    """Whether it has a thought that ended."""
    opened: bool
    """Whether its prompt began the thought."""
    finished: bool
    """Whether it ends in an end-of-turn token."""


@dataclass(eq=False)
class Prompt:
    """What a turn is drawn behind."""

    tokens: list[int]
    pieces: list[Piece]
    """What it shows; empty where only the tokens are known."""
    opened: bool = False
    """Whether it begins a thought."""


class TokenHistory:
    """The token sequences of one conversation. A turn goes on with the longest of them that its
    prompt begins with, to the token, or begins another one."""

    def __init__(self, template: TurnTemplate, rewritten: bool = True):
        """rewritten: as the template rewrites it. Otherwise every turn continues the very tokens
        that were there before, and the episode is one sequence."""
        self.template, self.rewritten = template, rewritten
        self.turns: list[DrawnTurn] = []
        self.sequences: list[TokenSequence] = []
        self._pieces: list[Piece] = []
        """What the last turn's sequence shows, up to that turn."""
        self._encoded: dict[str, list[int]] = {}

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], drawn: Mapping[int, int], tools: Any
    ) -> Prompt:
        """What the next turn is drawn behind. drawn: {index of a message: number of the turn that
        it is}, in order."""
        pieces = self.template.split(messages, drawn, self.turns, tools)
        if self.turns and not self.rewritten:
            last = len(self.turns) - 1
            if len(pieces) < 2 or not isinstance(pieces[-2], tuple) or pieces[-2][0] != last:
                raise UserError(
                    "the chat template leaves out the last turn, so the conversation cannot be"
                    ' continued token by token: set env.history to "template", or use a template'
                    " that keeps turns (model.chat_template)"
                )
            pieces = [*self._pieces, pieces[-1]]
        tokens = [token for piece in pieces for token in self._tokens(piece)]
        return Prompt(tokens, pieces, self.template.opens_thought(pieces))

    def add(self, prompt: Prompt, completion: Completion) -> DrawnTurn:
        """A turn that was drawn behind a prompt."""
        tokens = [int(token) for token in completion.tokens]
        candidates = [
            sequence
            for sequence in self.sequences
            if prompt.tokens[: len(sequence.tokens)] == sequence.tokens
        ]
        sequence = max(candidates, key=lambda sequence: len(sequence.tokens), default=None)
        if sequence is None:
            sequence = TokenSequence([], [], [], [], [])
            self.sequences.append(sequence)
        _extend(sequence, prompt.tokens[len(sequence.tokens) :])
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

    def _tokens(self, piece: Piece) -> list[int]:
        if isinstance(piece, str):
            if piece not in self._encoded:
                self._encoded[piece] = self.template.encoder(piece, self.template.spelled)
            return self._encoded[piece]
        number, with_thought = piece
        return self.turns[number].tokens if with_thought else self.turns[number].answer

    def _behind_thought(self, tokens: list[int], text: str) -> list[int]:
        """A turn's own tokens behind its last </think> and the line breaks after it; where a token
        spans that border, those of the text."""
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


def _extend(
    sequence: TokenSequence,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] = (),
    turn: int = -1,
) -> None:
    """Tokens that the policy drew with these log-probs, or that were told it (None)."""
    count = len(tokens)
    sequence.tokens += tokens
    sequence.sampled += [logprobs is not None] * count
    sequence.logprobs += [0.0] * count if logprobs is None else logprobs
    sequence.versions += versions or [-1] * count
    sequence.turns += [turn] * count
