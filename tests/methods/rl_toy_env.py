"""An environment for tests: the policy earns the share of even tokens among those it draws."""

from jaxtrain.generation.episodes import Episode


class EvenTokens:
    """Single-turn environment; the prompt is three tokens of the question."""

    def __init__(self, tokenizer, **options):
        self.tokenizer = tokenizer

    async def run(self, row, engine, sampling, index):
        prompt = self.tokenizer(row["messages"][1]["content"])["input_ids"][:3]
        answer = await engine.generate(prompt, sampling, (), index)
        share = sum(token % 2 == 0 for token in answer.tokens) / len(answer.tokens)
        return Episode(
            tokens=[*prompt, *answer.tokens],
            sampled=[False] * len(prompt) + [True] * len(answer.tokens),
            logprobs=[0.0] * len(prompt) + list(answer.logprobs),
            versions=[-1] * len(prompt) + list(answer.versions),
            finish_reason=answer.finish_reason,
            completion=self.tokenizer.decode(answer.tokens),
            rewards={"even": share},
            routed=answer.routed,
        )
