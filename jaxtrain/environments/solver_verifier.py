"""Two policies on the calculator: a solver, and a verifier of its answers.

    solver     question ─ tool ─ answer           rewarded if the answer is right
    verifier   question, answer ─ tool ─ verdict  rewarded if the verdict is right

`trusted` is the share of right answers that the verifier calls right, `caught` the share of wrong
answers that it calls wrong. A constant verdict has one of them at 1 and the other at 0.

An example of section policies, over rows of builtin:calculator: env.kind =
"jaxtrain.environments.solver_verifier:solve_and_verify".
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.data.sources.calculator import SYSTEM, TOOLS, ask_whether
from jaxtrain.environments.calculator import NUMBER, answer_tool_call, check_answer, read_questions
from jaxtrain.environments.conversation import AssistantReply, Conversation
from jaxtrain.generation.episodes import Episode


async def solve_and_verify(
    row: Mapping[str, Any], chat: Conversation, verifier: str = "verifier"
) -> list[Episode]:
    """Play the first question of a row. If the solver gives no number, nothing is verified, and the
    game is one episode."""
    prompt, _ = read_questions(row)
    chat.say(prompt)
    answer = await work(chat)
    right = answer.finished and check_answer(answer.raw, row["answers"][0])
    solved = chat.finish({"solved": float(right)})
    numbers = NUMBER.findall(answer)
    if not answer.finished or not numbers:
        return [solved]
    judge = chat.other(verifier)
    assert isinstance(judge, Conversation), "the verifier is trained"
    judge.say(SYSTEM, "system")
    judge.say(ask_whether(prompt[-1]["content"], numbers[-1]))
    verdict = read_verdict(await work(judge))
    agrees = verdict is not None and verdict == right
    verification = judge.finish(
        {"verified": float(agrees)},
        trusted=(agrees and right, right),
        caught=(agrees and not right, not right),
    )
    return [solved, verification]


async def work(chat: Conversation) -> AssistantReply:
    """Sample turns and execute calculator calls, up to a turn without calls."""
    chat.schemas = TOOLS
    while (answer := await chat.draw()).finished and chat.num_turns < chat.max_turns:
        reply = answer_tool_call(answer.raw)
        if reply is None or chat.full:
            break
        chat.say(reply)
    return answer


def read_verdict(answer: AssistantReply) -> bool | None:
    """Return True for "right", False for "wrong", None for neither or both."""
    words = [word for word in ("right", "wrong") if word in answer]
    return words == ["right"] if len(words) == 1 else None
