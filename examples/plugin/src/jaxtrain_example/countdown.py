"""env.kind = "countdown": two turns, in which numbers are to be said that go down."""


async def countdown(row, chat, *, turns=2):
    """Earns the share of turns that name the next number. `turns` is env.options.turns."""
    number, right = row["start"], 0
    for _ in range(turns):
        chat.say(f"{number}. And next?")
        answer = await chat.draw()
        number -= 1
        right += answer.strip(" .") == str(number)
    return chat.finish(reward=right / turns)
