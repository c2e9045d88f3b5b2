"""Answers of `generate --servers`, by vLLM servers, which have the weights.

Only the tokenizer of the model is read here. A server that dies loses its requests to the others.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from jaxtrain.cli.play import AnswerWriter, find_short
from jaxtrain.config import Config, ModelConfig, validate_config
from jaxtrain.config.load import apply_overrides, read_saved
from jaxtrain.config.secrets import reveal_url
from jaxtrain.core.architecture import find_architecture, find_tokenizer, read_architecture
from jaxtrain.data.chat.template import encode, end_of_turn_ids
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.local.requests import refuse_stray
from jaxtrain.generation.vllm.fixed import open_fixed
from jaxtrain.generation.vllm.images import PromptImages
from jaxtrain.generation.vllm.sources import is_url
from jaxtrain.methods.reopen import holds_run
from jaxtrain.text_safety import show


def read_config(name: str, overrides: list[str]) -> Config:
    """Return the config of a run, or one for a folder or Hub id, whose weights need not exist."""
    saved = Path(name) / "config.json"
    if holds_run(saved):
        return validate_config(apply_overrides(read_saved(saved), overrides), str(saved))
    table = {
        "run": {"max_steps": 1},
        "model": {"path": name},
        "data": {"datasets": [{"path": "none"}], "sequence_len": 8},
    }
    return validate_config(apply_overrides(table, overrides), name)


def open_prompt_images(model: ModelConfig, tokenizer: Any) -> PromptImages:
    """Give the tokenizer the format of the model's images, and return what writes prompts with
    them; of text alone for a model that reads none, whose images no server reads alike, or of which
    only the tokenizer is here."""
    model = model.model_copy(update={"init": "random"})  # config.json without weights
    try:
        folder, raw = find_architecture(model)
    except UserError:
        return PromptImages()
    if raw.get("vision_config") is None:
        return PromptImages()
    from jaxtrain.data.images.setup import give_format

    image_format = give_format(folder, raw, tokenizer)
    if image_format is None:
        return PromptImages()
    never = read_architecture(model).never_drawn
    return PromptImages(tokenizer if image_format.served else None, never)


class ServerAnswerWriter(AnswerWriter):
    """An AnswerWriter whose model is on servers."""

    def __init__(
        self, name: str, overrides: list[str], raw: bool, urls: Sequence[str], *, logprobs: bool
    ):
        """name: run, folder or Hub id, of which the tokenizer and chat template are read. logprobs:
        True if log-probs are written, so that servers must report those of section sampling."""
        for url in urls:
            if not is_url(url):
                raise UserError(f"--servers {show(url)} is no URL; write http://HOST:PORT")
        self.urls = [reveal_url(url, f"--servers {index}") for index, url in enumerate(urls)]
        config = read_config(name, overrides)
        self.tokenizer, self.raw = find_tokenizer(config.model), raw
        self.images = open_prompt_images(config.model, self.tokenizer)
        self.require_template(name)
        self.sampling, self.logprobs = config.sampling, logprobs
        self.stage = None
        self.vocab_size = len(self.tokenizer)

    @property
    @override
    def acceptance(self) -> None:
        return None

    @override
    def announce(self, phase: Callable[..., Any]) -> None:
        pass

    @override
    def complete(
        self,
        tokens: list[list[int]],
        *,
        draws: Sequence[int] | None = None,
        on_end: Callable[[int, Completion], None] = lambda number, completion: None,
        images: Sequence[Any] = (),
    ) -> list[Completion | None]:
        """Return answers to prompts of ids, None for those that leave a server no room: asked again
        they would fail again. If others get none, raises UserError once all have ended."""
        self.require_tokens(tokens)
        placed = images or [None] * len(tokens)
        if self.images.tokenizer is None and any(image is not None for image in placed):
            if getattr(self.tokenizer, "image_format", None) is not None:
                raise UserError(
                    "generate: vLLM would read other tokens or pixels of this family's images than"
                    " training does; leave out --servers"
                )
            raise UserError(
                "generate: the model whose tokenizer is read here (config.json beside it) reads no"
                " images; name the folder that the servers have"
            )
        draws = range(len(tokens)) if draws is None else draws
        for number, prompt, image in zip(draws, tokens, placed, strict=True):
            refuse_stray(prompt, image, self.images.never, f"prompt {number}")
        stop_ids = tuple(end_of_turn_ids(self.tokenizer, self.raw))
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        reported = self.sampling if self.logprobs else self.sampling.model_copy(update=plain)
        answers: list[Completion | None] = [None] * len(tokens)
        failures: list[str] = []

        async def answer(index: int) -> None:
            number = draws[index]
            try:
                completion = await engine.generate(
                    tokens[index], self.sampling, stop_ids, number, images=placed[index]
                )
            except EpisodeFailed as failure:
                failures.append(f"prompt {number}: {failure}")
                return
            answers[index] = completion
            on_end(number, completion)

        async def answer_all() -> None:
            try:
                await asyncio.gather(*map(answer, short))
            finally:
                await engine.close()

        def log(text: str) -> None:
            print(text, file=sys.stderr)

        with open_fixed(
            self.urls, reported, log, lambda text: encode(self.tokenizer, text), option="--servers"
        ) as engine:
            engine.images = self.images
            limits = [
                (server.max_model_len, server.url)
                for server in engine.servers.all
                if server.max_model_len > 0
            ]
            short = find_short(tokens, draws, *min(limits, default=(0, "")))
            asyncio.run(answer_all())
        if failures:
            raise UserError(
                f"{len(failures)} of {len(tokens)} prompts got no answer ({failures[0]}); with"
                " --output the same command asks for these alone"
            )
        return answers
