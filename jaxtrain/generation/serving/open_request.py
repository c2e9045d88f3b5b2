"""Requests to `jaxtrain serve`: their fields, checked, and their prompts as tokens.

Here sampling is the request's, unlike at the policy endpoint of a run
(`environments.chat_request`), whose checks, messages and tools these are.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from pydantic import ValidationError

from jaxtrain.config.data import DatasetConfig
from jaxtrain.config.limits import SEED
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.omissions import list_unwritten_names
from jaxtrain.data.chat.prompt import prompt_tokens, split_opening
from jaxtrain.data.chat.template import TemplateFailed, encode, end_of_turn_ids
from jaxtrain.data.chat.tokenize import open_images, open_row_images
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.environments.chat_request import (
    check_top_logprobs,
    read_conversation,
    read_logprobs,
    read_stop_ids,
    read_structured,
)
from jaxtrain.environments.request_fields import (
    CHAT,
    SAMPLING,
    Note,
    RequestRefused,
    check_fields,
    describe,
    refuse,
)
from jaxtrain.environments.token_history import PromptTooLong, TokenHistory, TurnTemplate
from jaxtrain.environments.tool_calls import CLOSED, OPENED, find_family
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.text_safety import show

CONTINUES: Mapping[str, tuple[str, ...]] = {
    "continue_final_message": ("true or false",),
    "add_generation_prompt": ("true or false",),
}
OPEN_CHAT: Mapping[str, tuple[str, ...]] = {
    **CHAT,
    **CONTINUES,
    "n": ("a whole number",),
    "return_tokens_as_token_ids": ("true or false",),
}
COMPLETION: Mapping[str, tuple[str, ...]] = {
    **SAMPLING,
    **{
        name: CHAT[name]
        for name in ("response_format", "guided_json", "guided_regex", "guided_choice", "model")
    },
    **{name: CHAT[name] for name in ("stream", "stream_options", "return_token_ids", "metadata")},
    "prompt": ("a text", "a list of texts", "a list of whole numbers", "a list"),
    "n": ("a whole number",),
    "echo": ("true or false",),
    "add_special_tokens": ("true or false",),
    "return_tokens_as_token_ids": ("true or false",),
}
TOKENIZE: Mapping[str, tuple[str, ...]] = {
    **{name: CHAT[name] for name in ("messages", "tools", "chat_template_kwargs", "model")},
    **CONTINUES,
    "prompt": ("a text",),
    "add_special_tokens": ("true or false",),
}
DETOKENIZE: Mapping[str, tuple[str, ...]] = {
    "tokens": ("a list of whole numbers",),
    "model": ("a text",),
}
MAX_CHOICES = 256
"""Answers of one request."""
COMPLETION_TOKENS = 16
"""Length of a completion that names none, as OpenAI has it."""


class OpenRequest(NamedTuple):
    """A request for answers: each of `prompts` is answered n times."""

    prompts: list[list[int]]
    sampling: Sampling
    n: int
    chat: bool
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    tools: list[dict[str, Any]]
    family: str
    """Format of the calls in answers; "" if none are read."""
    opened: bool
    """True if the prompt opens a thought."""
    logprobs: int | None
    """Number of likely tokens at each place; None: no log-probs at all."""
    echo: bool
    draws: bool
    """False: the prompt is scored, and nothing is drawn."""
    stream: bool
    usage: bool
    """True: a stream ends with the numbers of tokens."""
    token_ids: bool
    """True: answers have their token ids, too."""
    spelled: bool
    """False: log-probs name tokens as token_id:N instead of by their text."""
    images: PlacedImages | None = None
    """Images of a conversation."""


class ServingFormat:
    """Format of prompts, and their longest length."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, max_model_len: int, image_hosts: Sequence[str] = ()
    ):
        """vocab_size: of the model. max_model_len: longest sequence, prompt and answer.
        image_hosts: hosts whose URLs of images are fetched."""
        self.tokenizer, self.vocab_size, self.max_model_len = tokenizer, vocab_size, max_model_len
        self.template, self.no_chat, self.family = None, "", ""
        hosts = DatasetConfig(path="builtin:requests", image_hosts=list(image_hosts))
        reader = open_images(hosts, tokenizer)
        # The sampler makes patches for several requests at once: a picture that cannot be decoded
        # must be refused before, or it would end the answers to the others, too.
        self.images = None if reader is None else dataclasses.replace(reader, decodes=True)
        try:
            self.template = TurnTemplate(tokenizer)
            self.family = find_family(str(tokenizer.chat_template))
        except UserError as error:
            self.no_chat = str(error)
        self.eos = tuple(sorted(end_of_turn_ids(tokenizer, raw=True)))
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; those beyond the tokenizer's have none."""
        return self.tokenizer.decode([token for token in tokens if token < len(self.tokenizer)])

    def read_chat(self, body: Mapping[str, Any], note: Note) -> OpenRequest:
        """Parse POST /v1/chat/completions; RequestRefused."""
        check_fields(body, OPEN_CHAT, note)
        top = check_top_logprobs(body)
        tokens, tools, opened, images = self.render(body, note)
        forced = force_call(body.get("tool_choice"), tools)
        stops = read_stop_ids(body, self.vocab_size)
        assert self.template is not None, "render refuses without one"
        return self._finish(
            body,
            [tokens],
            chat=True,
            ends=(*self.template.ends, *stops),
            tools=tools,
            # A forced call is nothing but JSON, whatever the chat template's own format.
            family="llama3" if forced else self.family if tools else "",
            forced=forced,
            opened=opened and not forced,
            logprobs=top if body.get("logprobs") else None,
            echo=False,
            images=images,
        )

    def render(
        self, body: Mapping[str, Any], note: Note
    ) -> tuple[list[int], list[dict[str, Any]], bool, PlacedImages | None]:
        """Return (tokens, tools, True if it opens a thought, images) of the messages of a
        request."""
        if self.template is None:
            refuse(f"messages cannot be written: {self.no_chat}")
        images = open_row_images(self.images, "", self.max_model_len)
        try:
            messages, _, tools, kwargs = read_conversation(body, note, images)
        except UserError as error:  # images without Pillow
            refuse(f"messages: {error}")
        for name in list_unwritten_names(self.tokenizer, messages):
            note(name)
        continues = bool(body.get("continue_final_message"))
        if body.get("add_generation_prompt", not continues) is continues:
            refuse("one of add_generation_prompt and continue_final_message must be true")
        if continues:
            return self._continue(messages, tools, kwargs, images)
        try:
            listed = [] if images is None else images.list(messages)
            prompt = TokenHistory(self.template).prepare(
                messages, {}, tools, kwargs, self.max_model_len, listed
            )
        except MalformedRow as error:
            refuse(f"messages: {error}")
        except PromptTooLong as error:
            self._refuse_length(str(error))
        except TemplateFailed as error:
            refuse(f"messages: the chat template refuses them: {error}")
        return prompt.tokens, tools, prompt.opened, prompt.images

    def _continue(
        self, messages: list[dict[str, Any]], tools: Any, kwargs: Any, images: Any
    ) -> tuple[list[int], list[dict[str, Any]], bool, PlacedImages | None]:
        """Return what `render` does for messages that end in a turn to be continued."""
        if (opening := split_opening(messages)[1]) is None:
            refuse("continue_final_message: the assistant's message must be last, behind others")
        least = sum(len(message["content"]) for message in messages) // self.longest_token
        if least > self.max_model_len:
            self._refuse_length(f"at least {least} tokens")
        try:
            tokens = prompt_tokens(self.tokenizer, messages, tools, kwargs=kwargs)
            placed = None if images is None else images.find(np.asarray(tokens), messages)
        except MalformedRow as error:
            refuse(f"messages: {error}")
        except TemplateFailed as error:
            refuse(f"messages: the chat template refuses them: {error}")
        return tokens, tools, OPENED in opening.rpartition(CLOSED)[2], placed

    def read_completion(self, body: Mapping[str, Any], note: Note) -> OpenRequest:
        """Parse POST /v1/completions; RequestRefused."""
        check_fields(body, COMPLETION, note)
        stops = read_stop_ids(body, self.vocab_size)
        return self._finish(
            body,
            self.read_prompts(body.get("prompt"), bool(body.get("add_special_tokens"))),
            chat=False,
            ends=(*self.eos, *stops),
            tools=[],
            family="",
            forced=None,
            opened=False,
            logprobs=read_logprobs(body),
            echo=bool(body.get("echo")),
        )

    def read_prompts(self, prompt: Any, special: bool = False) -> list[list[int]]:
        """Return the tokens of a text, of ids, or of a list of either; RequestRefused. special:
        add the tokens that the tokenizer adds to texts."""
        if prompt is None or prompt == []:
            refuse("prompt must be a text, a list of token ids, or a list of these")
        listed = isinstance(prompt, list) and not all(type(token) is int for token in prompt)
        return [self._read_prompt(entry, special) for entry in (prompt if listed else [prompt])]

    def _read_prompt(self, prompt: Any, special: bool) -> list[int]:
        if isinstance(prompt, str):
            if (least := len(prompt) // self.longest_token) > self.max_model_len:
                self._refuse_length(f"at least {least} tokens")
            return encode(self.tokenizer, prompt, special)
        if not isinstance(prompt, list) or any(type(token) is not int for token in prompt):
            refuse(f"prompt must hold texts or lists of token ids, found {describe(prompt)}")
        if any(not 0 <= token < self.vocab_size for token in prompt):
            refuse(f"prompt must be of token ids, which are 0 to {self.vocab_size - 1}")
        return prompt

    def _finish(
        self,
        body: Mapping[str, Any],
        prompts: list[list[int]],
        *,
        forced: dict[str, Any] | None,
        **rest: Any,
    ) -> OpenRequest:
        """Parse what both kinds have. forced: JSON schema that every answer must match."""
        n = 1 if body.get("n") is None else body["n"]
        if not 1 <= n * len(prompts) <= MAX_CHOICES:
            refuse(f"n {show(n, 40)}: a request has 1 to {MAX_CHOICES} answers")
        for tokens in prompts:
            if not tokens:
                refuse("prompt is empty; give at least one token")
            if len(tokens) >= self.max_model_len:
                self._refuse_length(f"{len(tokens)} tokens")
        room = self.max_model_len - max(map(len, prompts))
        sampling, draws = read_sampling(body, room, room if rest["chat"] else COMPLETION_TOKENS)
        if forced and sampling.structured_outputs:
            refuse("tool_choice forces a call, so nothing else can say what an answer must match")
        if forced:
            structured = StructuredOutputs(json_schema=forced)
            sampling = sampling.model_copy(update={"structured_outputs": structured})
        if not (draws or rest["echo"]):
            refuse("max_tokens 0 leaves nothing to answer; it is for echo alone")
        if rest["logprobs"] and sampling.structured_outputs:
            refuse("top_logprobs cannot be had for answers that must match something")
        options = body.get("stream_options") or {}
        return OpenRequest(
            prompts=prompts,
            sampling=sampling,
            n=n,
            draws=draws,
            stream=bool(body.get("stream")),
            usage=bool(options.get("include_usage")),
            token_ids=bool(body.get("return_token_ids")),
            spelled=not body.get("return_tokens_as_token_ids"),
            **rest,
        )

    def _refuse_length(self, size: str) -> NoReturn:
        raise RequestRefused(
            400,
            f"This model's maximum context length is {self.max_model_len} tokens, of which an"
            f" answer needs one; the prompt has {size}",
            "prompt",
        )


def force_call(choice: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the JSON schema of the call that tool_choice forces: of one function by name, or of
    any ("required"); None if none is forced. RequestRefused."""
    if choice in (None, "auto", "none"):
        return None
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not (isinstance(name, str) and choice.get("type") == "function"):
        refuse(
            "tool_choice must be auto, none, required or an object with type function and"
            f" function.name, found {show(choice, 80)}"
        )
    functions = [tool["function"] for tool in tools]
    chosen = [entry for entry in functions if name in (None, entry["name"])]
    if not chosen:
        names = ", ".join(show(entry["name"], 40) for entry in functions) or "none"
        function = "a call" if name is None else show(name, 40)
        refuse(f"tool_choice forces {function}, but the functions of tools are: {names}")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": entry["name"]},
                "parameters": entry.get("parameters") or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for entry in chosen
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def read_sampling(body: Mapping[str, Any], room: int, longest: int) -> tuple[Sampling, bool]:
    """Return (how a request samples, False if it draws nothing); RequestRefused.

    room: most tokens that an answer may have. longest: tokens where the request names no number.
    """
    values: dict[str, Any] = {"temperature": 1.0}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if body.get(name) is not None:
            values[name] = body[name]
    values["top_k"] = max(values.get("top_k", 0), 0)  # -1: all, as vLLM has it
    seed = body.get("seed")
    values["seed"] = secrets.randbelow(SEED + 1) if seed is None else seed % (SEED + 1)
    key = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    most = body.get(key)
    if most is not None and not 0 <= most <= room:
        refuse(
            f"{key} {show(most, 40)} must be 0 to {room}: what the prompt leaves of the longest"
            " sequence"
        )
    values["max_new_tokens"] = max(1, min(longest, room) if most is None else most)
    stops = body.get("stop") or []
    values["stop"] = [stops] if isinstance(stops, str) else stops
    if structured := read_structured(body):
        values["structured_outputs"] = structured
    try:
        return Sampling(**values), most != 0
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "sampling"
        refuse(f"{name} {show(body.get(name), 40)}: {problem['msg']}")
