"""The verb `generate`: answers to prompts, from a file, the command line or a conversation."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxtrain.config import SamplingConfig
from jaxtrain.core.trained import open_trained
from jaxtrain.data.calculator import SYSTEM, TOOLS
from jaxtrain.data.template import encode, prompt_tokens
from jaxtrain.envs.calculator import end_of_turn_ids, list_turns, solve_problems
from jaxtrain.errors import UserError
from jaxtrain.rollout.local.sampler import LocalSampler


class Writer:
    """A model that answers messages or continues text."""

    def __init__(self, name: str, overrides: list[str], raw: bool):
        trained = open_trained(name, overrides)
        self.tokenizer = trained.parts.tokenizer
        self.raw = raw
        if not raw and not self.tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template: continue plain text with --raw, or name one with"
                " model.chat_template=FILE"
            )
        self.sampling: SamplingConfig = trained.config.sampling
        ends = end_of_turn_ids(self.tokenizer) if not raw else frozenset()
        eos = self.tokenizer.eos_token_id
        self.sampler = LocalSampler(
            trained.model,
            ends | ({eos} if eos is not None else set()),
            max_len=trained.parts.architecture.max_position_embeddings,
            to_text=self.tokenizer.decode,
        )

    def answer(self, prompts: list[Any], tools: list[Any]) -> list[str]:
        """Texts for prompts (strings with --raw, else message lists), side by side."""
        tokens = [
            encode(self.tokenizer, prompt)
            if self.raw
            else prompt_tokens(self.tokenizer, prompt, tool)
            for prompt, tool in zip(prompts, tools, strict=True)
        ]
        empty = next((index for index, ids in enumerate(tokens) if not ids), None)
        if empty is not None:
            raise UserError(f"prompt {empty} is empty; give at least one token")
        answers = self.sampler.generate(tokens, self.sampling)
        return [
            self.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers
        ]

    def play(self, question: str) -> list[str]:
        """A conversation with the calculator agent about one question, a line a turn."""
        system = {"role": "system", "content": SYSTEM}
        row = {
            "messages": [system, {"role": "user", "content": question}],
            "tools": TOOLS,
            # Nobody knows the answer, so nothing is judged; the first answer ends it.
            "answers": ["nan"],
        }

        def sample(prompts: list[list[int]]) -> list[list[int]]:
            return [found.tokens for found in self.sampler.generate(prompts, self.sampling)]

        (episode,) = solve_problems(sample, self.tokenizer, [row])
        return list_turns(episode)


def generate_command(args: argparse.Namespace) -> None:
    """Run the verb; raises UserError for unusable input before any weight is loaded."""
    if args.calculator and (args.raw or args.input or args.output or args.system):
        raise UserError("generate: --calculator takes only --prompt, or asks for questions")
    requests = read_requests(args)
    writer = Writer(args.model, args.overrides, args.raw)
    if requests is None:
        converse(writer, args.system, args.calculator)
        return
    if args.calculator:
        for request in requests:
            print("\n".join(writer.play(request["shown"])))
        return
    prompts = [request["prompt"] for request in requests]
    answers = writer.answer(prompts, [request.get("tools") for request in requests])
    records = [
        {**request["row"], "completion": answer}
        for request, answer in zip(requests, answers, strict=True)
    ]
    if args.output:
        args.output.write_text("".join(json.dumps(record) + "\n" for record in records))
        print(f"{len(records)} answers in {args.output}")
        return
    for request, answer in zip(requests, answers, strict=True):
        print(f">>> {request['shown']}\n{answer}\n")


def read_requests(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Prompts of --prompt and --input in order; None asks for a conversation."""
    rows = [({"prompt": text}, f"--prompt {text!r}") for text in args.prompt]
    if args.input:
        rows += read_lines(args.input)
    if not rows:
        if args.output or args.raw:
            raise UserError("generate: --raw and --output need --prompt or --input")
        return None
    return [read_request(row, origin, args) for row, origin in rows]


def read_lines(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The rows of a jsonl file with where each stands."""
    if not path.is_file():
        raise UserError(f"--input {path}: no such file")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path} line {number} must be an object with prompt or messages")
        rows.append((row, f"{path} line {number}"))
    if not rows:
        raise UserError(f"--input {path} is empty")
    return rows


def read_request(row: dict[str, Any], origin: str, args: argparse.Namespace) -> dict[str, Any]:
    """One prompt: text for --raw, else messages that end before the assistant speaks."""
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
    if args.system and given[0].get("role") != "system":
        given = [{"role": "system", "content": args.system}, *given]
    return {
        "row": row,
        "prompt": given,
        "tools": row.get("tools"),
        "shown": given[-1].get("content"),
    }


def converse(writer: Writer, system: str | None, calculator: bool) -> None:
    """Talk until end of input; an empty line starts anew, and so does each calculator question."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    print("an empty line starts a new conversation; ctrl-d ends", file=sys.stderr)
    while True:
        try:
            text = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if calculator and text:
            print("\n".join(writer.play(text)[1:]))
            continue
        if not text:
            messages = list(start)
            continue
        messages.append({"role": "user", "content": text})
        (answer,) = writer.answer([messages], [None])
        print(answer)
        messages.append({"role": "assistant", "content": answer})
