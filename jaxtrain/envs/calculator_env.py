"""The calculator agent as an environment: many turns with a tool, one branch of tokens."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.envs.calculator import Joint, end_of_turn_ids, extend, open_episode, respond
from jaxtrain.errors import UserError
from jaxtrain.rollout.types import Engine, Episode, Sampling


class CalculatorEnv:
    """Plays rows of builtin:calculator; its reward `solved` is the share of questions answered
    rightly before the first wrong answer.

    The policy's tokens stay as it drew them; what the tool and the user say is rendered, appended,
    and never trained.
    """

    def __init__(self, tokenizer: Any, max_turns: int = 8):
        self.tokenizer = tokenizer
        self.max_turns = max_turns
        self.ends = end_of_turn_ids(tokenizer)
        self.joint = Joint(tokenizer)

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """One conversation; it ends solved, with a wrong or unfinished answer, or at max_turns."""
        missing = [key for key in ("messages", "answers", "tools") if key not in row]
        if missing:
            raise UserError(
                f"env.kind calculator plays rows of builtin:calculator; a row has no {missing[0]!r}"
                f" (it has {', '.join(sorted(row))})"
            )
        played = open_episode(self.tokenizer, row)
        count = len(played.tokens)
        logprobs, versions, finish = [0.0] * count, [-1] * count, "stop"
        messages: list[dict[str, Any]] = []
        while played.stop is None:
            answer = await engine.generate(
                list(played.tokens), sampling, tuple(self.ends), index=index
            )
            extend(played, answer.tokens, generated=True)
            logprobs += answer.logprobs
            versions += list(answer.versions or [-1] * len(answer.tokens))
            finish = answer.finish_reason
            played.num_turns += 1
            text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            reply = respond(played, answer.tokens, self.tokenizer, self.ends, self.max_turns)
            if reply is None:
                break
            told = self.joint(reply, row["tools"])
            extend(played, told, generated=False)
            logprobs += [0.0] * len(told)
            versions += [-1] * len(told)
            messages.append(reply)
        asked = [message for message in row["messages"] if message["role"] in ("system", "user")]
        return Episode(
            tokens=played.tokens,
            sampled=played.generated,
            logprobs=logprobs,
            versions=versions,
            finish_reason=finish,
            completion=messages,
            prompt=asked[: 1 + next(i for i, m in enumerate(asked) if m["role"] == "user")],
            rewards={"solved": played.share_right},
            metrics={"turns": float(played.num_turns)},
        )
