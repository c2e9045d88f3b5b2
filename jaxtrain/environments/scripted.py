"""Engine that replays given texts, to try an environment without a model."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.generation.engine import Completion, EpisodeFailed, PolicyReply, Sampling


class ScriptedEngine:
    """`engine.Engine` for one episode: returns its texts as turns in order, then fails the
    episode."""

    version = 0
    reads_images = True

    def __init__(
        self, tokenizer: Any, texts: Sequence[str], policies: Mapping[str, Any] | None = None
    ):
        """policies: policies for `chat.other`, by name."""
        self.tokenizer, self.texts, self.others = tokenizer, list(texts), dict(policies or {})

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
        images: Any = None,
    ) -> Completion:
        """Return the next text, with the token that ends a turn."""
        if not self.texts:
            raise EpisodeFailed("the script has ended")
        tokens = self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        tokens = [*tokens, *stop_ids[:1]]
        return Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens))

    def counters(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    async def close(self) -> None:
        """Do nothing: there is no resource to close."""


class ScriptedSpeaker:
    """`engine.FrozenPolicy` that replies with its texts in order."""

    def __init__(self, texts: Sequence[str]):
        self.texts = list(texts)

    async def reply(self, messages: Sequence[Mapping[str, Any]], index: int = 0) -> PolicyReply:
        """Return the next text."""
        if not self.texts:
            raise EpisodeFailed("the script has ended")
        return PolicyReply(self.texts.pop(0), True)
