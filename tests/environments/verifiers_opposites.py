"""An environment of two agents for the verifiers package: what earns the one costs the other."""

import verifiers.v1 as vf


class OppositesConfig(vf.EnvConfig):
    even: vf.AgentConfig = vf.AgentConfig()
    odd: vf.AgentConfig = vf.AgentConfig()


class Opposites(vf.Env[OppositesConfig]):
    async def run(self, task, agents) -> None:
        await agents.even.run(task)
        trace = await agents.odd.run(task.with_data(prompt="odd"))
        letters = trace.last_reply
        share = sum(ord(letter) % 2 for letter in letters) / max(1, len(letters))
        trace.record_reward("odd", share, 2.0)  # its task rewards even ones, too


__all__ = ["Opposites"]
