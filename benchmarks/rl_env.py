"""The world of benchmarks/rl.py: a random prompt, one answer, a reward that differs in a group."""

import random

from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Env, Episode


class Lengths(Env):
    """Answers of sampling.max_new_tokens tokens, or with `spread` of a random share of them, as
    answers have that end by themselves: 1/8 to 1, evenly in the logarithm."""

    def __init__(self, tokenizer, prompt: int = 256, vocab: int = 512, spread: bool = False):
        self.prompt, self.vocab, self.spread = prompt, vocab, spread

    async def run(self, row: dict, engine: Engine, sampling: Sampling, index: int) -> Episode:
        draw = random.Random(str(row["problems"]))
        prompt = [draw.randrange(self.vocab) for _ in range(self.prompt)]
        if self.spread:
            share = 8 ** -random.Random(index).random()
            limit = max(1, int(share * sampling.max_new_tokens))
            sampling = sampling.model_copy(update={"max_new_tokens": limit})
        answer = await engine.generate(prompt, sampling, (), index)
        n, m = len(prompt), len(answer.tokens)
        return Episode(
            tokens=[*prompt, *answer.tokens],
            sampled=[False] * n + [True] * m,
            logprobs=[0.0] * n + list(answer.logprobs),
            versions=[-1] * n + list(answer.versions),
            finish_reason=answer.finish_reason,
            rewards={"even": sum(token % 2 == 0 for token in answer.tokens) / m},
        )
