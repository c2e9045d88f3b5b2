"""The verb `generate`: answers to prompts, from a file, the command line or a conversation."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxtrain.api import Model, read_ids
from jaxtrain.cli.play import OWN, PlaySession, read_sections
from jaxtrain.config import SamplingConfig
from jaxtrain.data.chat.messages import MalformedRow, read_messages, read_tools
from jaxtrain.data.chat.template import TemplateFailed, encode, prompt_tokens
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.evaluation.eval_sets import list_turns
from jaxtrain.huggingface.generation import describe_ignored
from jaxtrain.runs.run_files import require_writable, write_output
from jaxtrain.safe_io import parse_json, read_text
from jaxtrain.text_safety import escape_control_chars

MOST_INPUT = 2**29
"""Bytes of a file of prompts."""


class AnswerWriter:
    """A model that answers messages, continues text or ids, or acts in an environment."""

    def __init__(
        self,
        name: str,
        overrides: list[str],
        raw: bool,
        draft: str | None = None,
        *,
        acts: bool = False,
    ):
        """raw: texts or ids are continued as they stand. draft: folder of a draft model. acts: in
        section env's environment, with all policies."""
        own = [word for word in overrides if word.startswith(OWN)]
        rest = [word for word in overrides if word not in own]
        self.model = Model(name, rest, several=acts)
        config = self.model.config
        sections = read_sections(config, own, name)
        self.tokenizer = self.model.tokenizer
        self.raw = raw
        if not raw and not self.tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template: continue plain text with --raw, or name one with"
                " model.chat_template=FILE"
            )
        self.sampling: SamplingConfig = config.sampling
        policies = self.model.policies
        if len(policies) > 1 and draft is not None:
            raise UserError(f"{name} has trained several policies, for which no draft guesses")
        self.sampler = self.model.sampler(raw, draft)
        samplers = {one: self.model.sampler(raw, policy=one) for one in policies}
        parts = self.model.snapshot.roles.bundle
        self.stage = PlaySession(sections, parts, samplers or {"": self.sampler}) if acts else None
        folder = self.model.snapshot.roles.bundle.folder
        if folder is not None and (ignored := describe_ignored(folder)):
            print(f"note: {ignored}", file=sys.stderr)

    def answer(self, prompts: list[Any], tools: list[Any]) -> list[str]:
        """Texts for prompts (strings with --raw, else message lists), side by side."""
        try:
            tokens = [
                encode(self.tokenizer, prompt)
                if self.raw
                else prompt_tokens(self.tokenizer, prompt, tool)
                for prompt, tool in zip(prompts, tools, strict=True)
            ]
        except TemplateFailed as error:
            raise UserError(f"a prompt cannot be written: {error}") from None
        return [
            self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            for answer in self.complete(tokens)
        ]

    def complete(self, tokens: list[list[int]]) -> list[Completion]:
        """Answers to prompts of ids, side by side."""
        empty = next((index for index, ids in enumerate(tokens) if not ids), None)
        if empty is not None:
            raise UserError(f"prompt {empty} is empty; give at least one token")
        return self.sampler.generate(tokens, self.sampling)

    def play(self, rows: list[dict[str, Any]]) -> list[Episode]:
        """Episodes of rows in section env's environment, side by side."""
        assert self.stage is not None, "it was opened to act"
        return self.stage.play(rows, self.sampling)


def generate_command(args: argparse.Namespace) -> None:
    """Run the verb; raises UserError for unusable input before any weight is loaded."""
    if args.env and (args.raw or args.system):
        raise UserError(
            "generate: --env takes neither --raw nor --system; env.raw=true and env.system=TEXT say"
            " the same to the environment single_turn"
        )
    if args.ids and (args.raw or args.system or args.env):
        raise UserError(
            "generate: --ids continues token ids as they stand, without --raw, --system or --env"
        )
    if not args.env and any(word.startswith(OWN) for word in args.overrides):
        raise UserError("generate: keys of sections env and policies have no effect without --env")
    rows = list_rows(args)
    if args.output:
        require_writable(args.output, args.overwrite)
    requests = [read_request(row, origin, args) for row, origin in rows if not args.env]
    raw = args.raw or args.ids
    writer = AnswerWriter(args.model, args.overrides, raw, args.draft, acts=args.env)
    if not rows:
        converse(writer, args.system, args.env)
    elif args.env:
        played = [env_row(row) for row, _ in rows]
        write_records(args, played, list(map(describe_episode, writer.play(played))))
    elif args.ids:
        found = continue_ids(writer, requests)
        write_records(args, [request["row"] for request in requests], found)
    else:
        answer_requests(args, writer, requests)
    if (counted := writer.sampler.acceptance) is not None:
        print(
            f"draft: {counted.mean:.2f} tokens a pass, {counted.accepted} of"
            f" {counted.cycles * counted.num_drafted} guesses accepted",
            file=sys.stderr,
        )


def answer_requests(
    args: argparse.Namespace, writer: AnswerWriter, requests: list[dict[str, Any]]
) -> None:
    """Answers to texts or conversations, written."""
    prompts = [request["prompt"] for request in requests]
    answers = writer.answer(prompts, [request.get("tools") for request in requests])
    found = [
        ({"completion": answer}, f">>> {request['shown']}\n{answer}\n")
        for request, answer in zip(requests, answers, strict=True)
    ]
    write_records(args, [request["row"] for request in requests], found)


def continue_ids(
    writer: AnswerWriter, requests: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], str]]:
    """(keys to add to a row, the row as a line of JSON) of each request."""
    size = writer.model.vocab_size
    prompts = [read_ids(one["prompt"], size, one["shown"]).tolist() for one in requests]
    found = []
    for request, answer in zip(requests, writer.complete(prompts), strict=True):
        keys = {
            "completion_ids": answer.tokens,
            "logprobs": answer.logprobs,
            "finish_reason": answer.finish_reason,
        }
        found.append((keys, json.dumps({**request["row"], **keys})))
    return found


def write_records(
    args: argparse.Namespace, rows: list[dict[str, Any]], found: list[tuple[dict[str, Any], str]]
) -> None:
    """Into the file --output, or to people. found: (keys to add to a row, text) for each row."""
    if args.output:
        records = [{**row, **keys} for row, (keys, _) in zip(rows, found, strict=True)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_output(args.output, lines.encode())
        print(f"{len(records)} answers in {args.output}")
        return
    for _, text in found:
        print(escape_control_chars(text))


def env_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row as environments want it, with messages where it has only a prompt."""
    text = row.get("prompt")
    if isinstance(text, str) and "messages" not in row:
        return {**row, "messages": [{"role": "user", "content": text}]}
    return row


def describe_episode(episode: Episode) -> tuple[dict[str, Any], str]:
    """(what --output keeps of it, what people read: a line a turn, and the rewards). A game of
    several policies or agents: of each of its episodes, behind who speaks."""
    lines, kept = [], []
    for one in (episode, *episode.others):
        speaker = one.policy or one.agent
        lines += [f"[{speaker}]"] * bool(speaker)
        lines += [f"{role:>10}: {text}" for role, text in list_turns(one)]
        lines += [f"{'reward':>10}: {name} {value}" for name, value in one.all_rewards.items()]
        names = {"policy": one.policy, "agent": one.agent}
        given = {key: name for key, name in names.items() if name}
        kept.append({**given, "completion": one.completion, "rewards": one.all_rewards})
    more = {"others": kept[1:]} if episode.others else {}
    return {**kept[0], **more}, "\n".join(lines) + "\n"


def list_rows(args: argparse.Namespace) -> list[tuple[dict[str, Any], str]]:
    """Rows of --prompt and --input in order, and where each stands; none: a conversation."""
    if args.ids:
        rows = [parse_line(text, f"--prompt {text!r:.60}") for text in args.prompt]
    else:
        rows = [({"prompt": text}, f"--prompt {text!r}") for text in args.prompt]
    if args.input:
        rows += read_lines(args.input)
    if not rows and (args.output or args.raw or args.ids):
        raise UserError("generate: --raw, --ids and --output need --prompt or --input")
    return rows


def read_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The rows of a jsonl file with where each stands."""
    try:
        text = read_text(path, MOST_INPUT)
    except FileNotFoundError:
        raise UserError(f"--input {path}: no such file") from None
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--input {path} {error}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        rows.append(parse_line(line, f"{path} line {number}"))
    if not rows:
        raise UserError(f"--input {path} is empty")
    return rows


def parse_line(line: str, origin: str) -> tuple[dict[str, Any], str]:
    """(row, origin) of a line of JSON; a list stands for its prompt_ids."""
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{origin} is not valid JSON: {error}") from None
    if isinstance(row, list):
        row = {"prompt_ids": row}
    if not isinstance(row, dict):
        raise UserError(f"{origin} must be an object with prompt, messages or prompt_ids")
    return row, origin


def read_request(row: dict[str, Any], origin: str, args: argparse.Namespace) -> dict[str, Any]:
    """One prompt: ids, text for --raw, else messages that end before the assistant speaks."""
    if args.ids:
        if not isinstance(row.get("prompt_ids"), list):
            raise UserError(f"{origin}: --ids needs a list of token ids in the key prompt_ids")
        return {"row": row, "prompt": row["prompt_ids"], "shown": f"{origin}: prompt_ids"}
    given = row.get("messages", row.get("prompt"))
    if args.raw:
        if not isinstance(given, str):
            raise UserError(f"{origin}: --raw needs a text in the key prompt")
        return {"row": row, "prompt": given, "shown": given}
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(m, dict) for m in given) or not given:
        raise UserError(
            f"{origin}: needs messages (a list of role and content) or prompt (a text); found keys"
            f" {', '.join(row) or 'none'}"
        )
    try:
        given, tools = read_messages(given, {}, {}), read_tools(row.get("tools"))
    except MalformedRow as error:
        raise UserError(f"{origin}: {error.place} {error}".replace(":  ", ": ")) from None
    if args.system and given[0].get("role") != "system":
        given = [{"role": "system", "content": args.system}, *given]
    return {
        "row": row,
        "prompt": given,
        "tools": tools,
        "shown": given[-1].get("content"),
    }


def converse(writer: AnswerWriter, system: str | None, env: bool) -> None:
    """Talk until end of input; an empty line starts anew. With `env` each line is a row of its own
    for the environment."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print("an empty line starts a new conversation; ctrl-d ends", file=sys.stderr)
    while True:
        try:
            text = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if env and text:
            (episode,) = writer.play([env_row({"prompt": text})])
            print(escape_control_chars(describe_episode(episode)[1]))
            continue
        if not text:
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        (answer,) = writer.answer([messages], [None])
        print(escape_control_chars(answer))
        messages.append({"role": "assistant", "content": answer})
