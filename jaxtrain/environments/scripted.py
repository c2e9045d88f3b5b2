"""An engine that says what it is told to: to try an environment without any model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.generation.engine import Completion, EpisodeFailed, PolicyReply, Sampling


class ScriptedEngine:
    """`engine.Engine` for one episode: its texts are the model's turns, one after the other;
    then it fails the episode."""

    version = 0

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], policies: Mapping[str, Any] | None = None
    ):
        """policies: what `chat.other` finds, by name."""
        self.tokenizer, self.texts, self.others = tokenizer, list(texts), dict(policies or {})

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """The next text, with the token that ends a turn."""
        if not self.texts:
            raise EpisodeFailed("the script has ended")
        tokens = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        tokens = [*tokens, *stop_ids[:1]]
        return Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens))

    def counters(self) -> dict[str, float]:
        """Nothing to count."""
        return {}

    async def close(self) -> None:
        """Nothing to close."""


class ScriptedSpeaker:
    """`rollout.types.Speaker` that says its texts, one after the other."""

    def __init__(self, texts: Sequence[str]):
        self.texts = list(texts)

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """The next text."""
        if not self.texts:
            raise EpisodeFailed("the script has ended")
        return PolicyReply(self.texts.pop(0), True)
