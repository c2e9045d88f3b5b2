"""The verb `chat`: a conversation in the terminal, with a model here or behind a server.

line ─> messages ─┬─ model or run: sampler of this process ─┬─> pieces of text, as they come
                  └─ URL: POST /v1/chat/completions ────────┘
"""

import argparse
import asyncio
import base64
import contextlib
import json
import mimetypes
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, split_login

COMMANDS = """/system TEXT   begin anew with this system message
/reset         begin anew
/image FILE    a picture before the next message; may be repeated
/save FILE     append the conversation to a JSONL file, a row that trains
/exit          end"""
PIECES = {"reasoning_content": ("reasoning_content", "reasoning"), "content": ("content",)}
"""{key of a message: keys of a piece of an answer that mean it}"""
KEY_VARIABLES = ("JAXTRAIN_API_KEY", "OPENAI_API_KEY")
FIELDS = {"max_new_tokens": "max_tokens"}
"""Keys of section sampling that requests name otherwise."""


class Speaker(Protocol):
    """Model or server that continues a conversation."""

    def answer(self, messages: list[dict[str, Any]]) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of an answer, in OpenAI's form; UserError."""
        ...


def run_chat(argv: list[str]) -> None:
    """Talk with a run's newest checkpoint, a Hugging Face model or a server in OpenAI's form."""
    parser = Parser("jaxtrain chat", description=run_chat.__doc__)
    parser.add_argument(
        "model",
        help="a run's output_dir, a Hugging Face folder, a Hub id, or a URL such as"
        " http://127.0.0.1:8000/v1",
    )
    parser.add_argument(
        "overrides", nargs="*", help="sampling.temperature=0.7 and the like; of a model also others"
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument("--served-model-name", help="model of a server with several")
    args = parser.parse_intermixed_args(argv)
    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread, asyncio.Runner() as runner:
        speaker = open_speaker(args, thread)
        talk(Conversation(speaker, args.system), runner)


def open_speaker(args: argparse.Namespace, thread: ThreadPoolExecutor) -> Speaker:
    """Return what answers; UserError for a model that cannot be opened."""
    if args.model.startswith(("http://", "https://")):
        return ServerSpeaker(args.model, args.served_model_name, read_sampling(args.overrides))
    if args.served_model_name:
        raise UserError("chat: --served-model-name is for the model of a server")
    from jaxtrain.api import Model

    model = Model(os.path.expanduser(args.model), args.overrides)
    if not model.tokenizer.chat_template:
        raise UserError(
            f"{args.model} has no chat template: continue plain text with `jaxtrain generate"
            " --raw`, or name one with model.chat_template=FILE"
        )
    return ModelSpeaker(model, thread)


def read_sampling(overrides: list[str]) -> dict[str, Any]:
    """Return the fields of requests that overrides of section sampling name; UserError."""
    from jaxtrain.config import SamplingConfig
    from jaxtrain.config.load import apply_overrides, validate

    table = apply_overrides({}, overrides)
    if foreign := sorted(set(table) - {"sampling"}):
        raise UserError(f"chat: {foreign[0]} is not for a server; sampling.key=value is")
    sampling = validate(SamplingConfig, table.get("sampling", {}), "sampling")
    return write_fields({name: getattr(sampling, name) for name in table.get("sampling", {})})


def write_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of section sampling as fields of a request."""
    values = {FIELDS.get(name, name): value for name, value in sampling.items()}
    structured = values.pop("structured_outputs", None)
    if structured:
        ((name, value),) = structured.model_dump(exclude_defaults=True).items()
        values["structured_outputs"] = {name.removesuffix("_schema"): value}
    return values


class ModelSpeaker:
    """A model of this process."""

    def __init__(self, model: Any, thread: ThreadPoolExecutor):
        from jaxtrain.cli.serve import describe_version, split_layers
        from jaxtrain.generation.local.engine import LocalEngine
        from jaxtrain.generation.serving.answerer import ServedModel
        from jaxtrain.generation.serving.open_request import ServingFormat

        sampler = model.sampler(True, prefixes=1)
        sampler.use(split_layers(model, sampler.model), model.snapshot.step)
        self.form = ServingFormat(model.tokenizer, model.vocab_size, model.max_len)
        engine = LocalEngine(sampler, thread)
        self.model = ServedModel("model", engine, describe_version(model))
        sampling = model.config.sampling
        self.fields = write_fields(
            {name: getattr(sampling, name) for name in type(sampling).model_fields}
        )

    async def answer(
        self, messages: list[dict[str, Any]]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of an answer."""
        from jaxtrain.environments.request_fields import RequestRefused
        from jaxtrain.generation.serving.answerer import RequestAnswers
        from jaxtrain.generation.serving.open_response import ResponseWriter

        try:
            body = {"messages": messages, **self.fields}
            room = self.form.max_model_len - len(self.form.render(body, lambda name: None)[0])
            body["max_tokens"] = max(1, min(body["max_tokens"], room))
            request = self.form.read_chat(body, lambda name: None)
            writer = ResponseWriter(request, "1", "model", self.model.version, self.form.decode)
            totals = {"generation_tokens": 0}
            async for chunk in RequestAnswers(
                self.form, self.model, request, writer, totals
            ).chunks():
                yield chunk
        except RequestRefused as error:
            raise UserError(str(error)) from None


class ServerSpeaker:
    """A server in OpenAI's form."""

    def __init__(self, url: str, model: str | None, fields: Mapping[str, Any]):
        """url: with its /v1."""
        try:
            self.url, self.login = split_login(url.rstrip("/"))
        except ValueError as error:
            raise UserError(f"chat: {url!r} is no URL: {error}") from None
        self.model, self.fields = model, fields

    async def answer(
        self, messages: list[dict[str, Any]]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the chunks of an answer; UserError for what the server refuses."""
        import aiohttp

        key = next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        sent = self.login or (f"Bearer {key}" if key else None)
        headers = {"Authorization": sent} if sent else {}
        waits = aiohttp.ClientTimeout(total=None, connect=10)
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=waits) as session:
                self.model = self.model or await self._find_model(session)
                # OpenAI's API has no thoughts in requests.
                earlier = [
                    {key: value for key, value in message.items() if key != "reasoning_content"}
                    for message in messages
                ]
                body = {"model": self.model, "messages": earlier, "stream": True, **self.fields}
                async with session.post(f"{self.url}/chat/completions", json=body) as response:
                    await self._require_ok(response)
                    if response.content_type == "application/json":  # it does not stream
                        yield self._read(await response.text(errors="replace"))
                        return
                    async for line in response.content:
                        field, _, data = line.decode("utf-8", "replace").strip().partition(":")
                        # Other fields are comments, with which servers keep connections open.
                        if field == "data" and data.strip() not in ("", "[DONE]"):
                            yield self._read(data)
        except UserError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UserError(f"chat: {self.url} does not answer: {error}") from None

    async def _find_model(self, session: Any) -> str:
        async with session.get(f"{self.url}/models") as response:
            await self._require_ok(response)
            listed = self._read(await response.text(errors="replace")).get("data")
        first = listed[0] if isinstance(listed, list) and listed else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            raise UserError(f"chat: {self.url} lists no model; name one: --served-model-name")
        return first["id"]

    async def _require_ok(self, response: Any) -> None:
        if response.status != 200:
            text = (await response.text(errors="replace"))[:500]
            raise UserError(f"chat: {self.url} answers {response.status}: {text}")

    def _read(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict) or value.get("error"):
            raise UserError(f"chat: {self.url} answers {text[:500]}")
        return value


async def read_pieces(
    chunks: AsyncGenerator[Mapping[str, Any], None],
) -> AsyncGenerator[tuple[str, str], None]:
    """Yield (key of a message, text) for each piece of an answer; its thoughts are apart where the
    server divides them."""
    async for chunk in chunks:
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            parts = choice.get("delta") or choice.get("message") if isinstance(choice, dict) else {}
            if not isinstance(parts, dict):
                continue
            for key, names in PIECES.items():
                text = next((parts[name] for name in names if parts.get(name)), None)
                if isinstance(text, str):
                    yield key, text


class Conversation:
    """Messages so far."""

    def __init__(self, speaker: Speaker, system: str | None = None):
        self.speaker = speaker
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Begin anew."""
        self.system = system
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self.pictures: list[dict[str, Any]] = []
        """Parts that the next message begins with."""

    def add_picture(self, path: Path) -> None:
        """Put a picture before the next message; UserError for one that cannot be read."""
        from jaxtrain.data.chat.messages import MalformedRow
        from jaxtrain.data.images.decode import measure, read_file

        try:
            data = read_file(path)
            width, height = measure(data)
        except MalformedRow as error:
            raise UserError(f"/image {path}: {error}") from None
        kind = mimetypes.guess_type(path)[0] or "image/png"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self.pictures.append({"type": "image_url", "image_url": {"url": url}})
        print(f"{width} x {height} pixels", file=sys.stderr)

    async def say(self, text: str) -> None:
        """Print the answer to a message as it comes. An answer that is interrupted stays as far as
        it came; of one that fails the message is taken back, and its pictures wait for the next
        message."""
        content: Any = text
        pictures, self.pictures = self.pictures, []
        if pictures:
            content = [*pictures, {"type": "text", "text": text}]
        self.messages.append({"role": "user", "content": content})
        turn: dict[str, str] = {}
        try:
            async with contextlib.aclosing(self.speaker.answer(self.messages)) as chunks:
                async for key, piece in read_pieces(chunks):
                    if key == "content" and turn.keys() == {"reasoning_content"}:
                        print("\n</think>")
                    elif key != "content" and not turn:
                        print("<think>")
                    turn[key] = turn.get(key, "") + piece
                    print(escape_control_chars(piece), end="", flush=True)
        except UserError:
            self.messages.pop()
            turn.clear()
            self.pictures = pictures
            if pictures:
                print("its pictures wait for the next message; /reset drops them", file=sys.stderr)
            raise
        finally:
            print(flush=True)
            if turn:
                self.messages.append({"role": "assistant", "content": "", **turn})

    def save(self, path: Path) -> None:
        """Append the conversation to a JSONL file; UserError."""
        if not any(message["role"] == "assistant" for message in self.messages):
            raise UserError("/save: there is no answer yet")
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"/save {path}: {error.strerror}") from None
        print(f"{len(self.messages)} messages appended to {path}", file=sys.stderr)


def talk(conversation: Conversation, runner: asyncio.Runner) -> None:
    """Read lines until /exit or the end of input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  lines can be edited and called back
        print(COMMANDS, file=sys.stderr)
    while True:
        try:
            line = (input("you> ") if is_terminal else input()).strip()
        except (EOFError, KeyboardInterrupt):
            return
        command, _, rest = line.partition(" ")
        try:
            match command:
                case "":
                    continue
                case "/exit" | "/quit":
                    return
                case "/reset":
                    conversation.begin(conversation.system)
                case "/system":
                    conversation.begin(rest.strip() or None)
                case "/image":
                    if not rest.strip():
                        raise UserError("/image FILE: name a file")
                    conversation.add_picture(expand_path(rest.strip()))
                case "/save":
                    if not rest.strip():
                        raise UserError("/save FILE: name a file")
                    conversation.save(expand_path(rest.strip()))
                case _ if command.startswith("/"):
                    print(COMMANDS, file=sys.stderr)
                case _:
                    runner.run(conversation.say(line))
        except KeyboardInterrupt:  # the answer ends; the conversation goes on
            continue
        except UserError as error:
            if not is_terminal:
                raise
            print(escape_control_chars(f"error: {error}"), file=sys.stderr)
