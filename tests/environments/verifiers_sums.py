"""A taskset of the verifiers package: sums, with a harness in this process that asks once more."""

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.answer == 3:
            raise KeyError("no answer to this")
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward
    async def even(self, trace) -> float:
        """The share of letters with an even code."""
        letters = trace.last_reply
        return sum(ord(letter) % 2 == 0 for letter in letters) / max(1, len(letters))

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    count: int = 8
    question: str = "What is {a} + {b}?"


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for n in range(self.config.count):
            text = self.config.question.format(a=n, b=2)
            yield SumTask(SumData(prompt=text, answer=n + 2), self.config.task)


class TwiceConfig(vf.HarnessConfig):
    turns: int = 2


class Twice(vf.Harness[TwiceConfig]):
    """Asks for an answer, then whether that is so; no process of its own."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def setup(self, runtime) -> None:
        return None

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for turn in range(self.config.turns):
                if turn:
                    messages.append({"role": "user", "content": "Sure?"})
                body = {"model": ctx.model, "messages": messages}
                async with client.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return ProgramResult(1, "", (await answer.text())[:300])
                    (choice,) = (await answer.json())["choices"]
                messages.append({"role": "assistant", "content": choice["message"]["content"]})
        return ProgramResult(0, "", "")


__all__ = ["Sums", "Twice"]
