"""An environment for tests: policy `even` draws for even tokens, policy `odd`, behind a prompt of
its own, for odd ones; or one of them alone."""

from rl_toy_env import EvenTokens


class Both(EvenTokens):
    def __init__(self, tokenizer, alone=None):
        super().__init__(tokenizer)
        self.alone = alone

    async def run(self, row, engine, sampling, index):
        if self.alone is not None:
            return await getattr(self, self.alone)(row, engine, sampling, index)
        odd = await self.odd(row, engine.others["odd"], sampling, index)
        odd.policy = "odd"
        return [await self.even(row, engine, sampling, index), odd]

    async def even(self, row, engine, sampling, index):
        return await super().run(row, engine, sampling, index)

    async def odd(self, row, engine, sampling, index):
        row = {"messages": [{}, {"content": row["messages"][1]["content"][5:]}]}
        episode = await super().run(row, engine, sampling, index)
        episode.rewards = {"odd": 1.0 - episode.rewards.pop("even")}
        return episode
