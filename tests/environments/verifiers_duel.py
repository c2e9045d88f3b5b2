"""An environment of three agents for the verifiers package: a solver, a verifier who is asked of
its answer, both trained, who win where the other loses, and a judge, who is not."""

import verifiers.v1 as vf


class DuelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    verifier: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Duel(vf.Env[DuelConfig]):
    async def setup(self, agents) -> None:
        agents.judge.trainable = False

    async def run(self, task, agents) -> None:
        solved = await agents.solver.run(task)
        question = task.with_data(prompt=f"Is {solved.last_reply} right?")
        checked = await agents.verifier.run(question)
        judged = await agents.judge.run(task.with_data(prompt="Did they agree?"))
        agreed = float(judged.last_reply == "yes")
        solved.record_reward("won", agreed, 1.0)
        checked.record_reward("won", 1.0 - agreed, 1.0)


__all__ = ["Duel"]
