"""rewards.N.function = "digits": called as TRL calls a reward, in a process of its own."""


def digits(completions, **columns):
    """The share of characters that are digits, of each answer's last turn."""
    texts = [
        completion if isinstance(completion, str) else completion[-1]["content"]
        for completion in completions
    ]
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in texts]
