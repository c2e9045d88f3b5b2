"""Answers that the data have: for methods that draw some answers and take others as they are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.template import decode_answer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episodes import Episode, TokenSequence


class OfflineAnswers:
    """Selection of prompts that the data answer, and these answers as episodes.

    The selection depends only on the seed and the prompt's number, so that it is the same in a
    resumed run and in any order of playing.
    """

    def __init__(
        self,
        datasets: Sequence[DatasetConfig],
        tokenizer: Any,
        *,
        row_tokens: int,
        drawn_share: float,
        seed: int,
    ):
        """drawn_share: of the prompts, which are played. row_tokens: longest sequence."""
        self.tokenize = [
            RowTokenizer(dataset, tokenizer, row_tokens, "drop") for dataset in datasets
        ]
        self.tokenizer, self.own_share, self.seed = tokenizer, drawn_share, seed

    def __call__(self, request: PromptRequest) -> list[Episode] | None:
        """Return the data's answer, or None for a prompt that is played: a
        group_player.OfflineSource."""
        if np.random.default_rng((self.seed, request.draw)).random() < self.own_share:
            return None
        name = f"prompt {request.draw}"
        return [read_episode(self.tokenize[request.dataset], self.tokenizer, request.row, name)]


def read_episode(tokenize: Any, tokenizer: Any, row: Any, name: str) -> Episode:
    """Return a row of training data as an episode, with its trained tokens as `sampled`; raises
    EpisodeFailed if it gives no sample. tokenize: of formats.RowTokenizer."""
    items = tokenize(row, name)
    samples = [item for item in items if isinstance(item, Sample)]
    if not samples:
        reasons = [item.reason for item in items if isinstance(item, Dropped)]
        raise EpisodeFailed(f"row: {reasons[0] if reasons else 'gives nothing'}", again=False)
    sequences = [
        TokenSequence(
            sample.tokens.tolist(),
            (sample.weights > 0).tolist(),
            [0.0] * len(sample.tokens),
            [-1] * len(sample.tokens),
            images=sample.images,
        )
        for sample in samples
    ]
    *earlier, last = sequences
    trained = np.flatnonzero(samples[-1].weights > 0)
    first, end = int(trained[0]), int(trained[-1]) + 1
    return Episode(
        last.tokens,
        last.sampled,
        last.logprobs,
        last.versions,
        "stop",
        completion=decode_answer(tokenizer, last.tokens[first:end]),
        prompt=tokenizer.decode(last.tokens[:first]),
        earlier=earlier,
        images=last.images,
        given=True,
    )
