"""The verb `generate`: answers to prompts, from a file, the command line or a conversation."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import Parser, add_model, expand_path
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars

if TYPE_CHECKING:
    from jaxtrain.cli.answer_file import AnswerFile
    from jaxtrain.cli.play import AnswerWriter
    from jaxtrain.generation.engine import Completion
    from jaxtrain.generation.episodes import Episode
    from jaxtrain.runs.progress import Progress


def run_generate(argv: list[str]) -> None:
    """Answer prompts with a run's newest checkpoint or a Hugging Face model."""
    parser = Parser("jaxtrain generate", description=run_generate.__doc__)
    add_model(parser, "sampling.key=value and the like; dataset.key=value for --input")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=os.path.expanduser,
        help="picture that the one --prompt asks about; may be given several times",
    )
    parser.add_argument(
        "--input",
        type=os.path.expanduser,
        help="rows with a prompt or messages: jsonl, or whatever data.datasets[].path takes",
    )
    parser.add_argument(
        "--output",
        type=expand_path,
        help="jsonl of the rows with their answers; what has ended is kept in OUTPUT.part, from"
        " which the same command goes on",
    )
    parser.add_argument(
        "--shard-rows", type=int, help="make --output a folder of files of so many rows"
    )
    parser.add_argument(
        "--messages",
        action="store_true",
        help="write conversations that end in the answer, as messages, instead of completion",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --output if it is there"
    )
    parser.add_argument(
        "--drop-malformed",
        action="store_true",
        help="leave out rows of --input without a prompt that the model can read, and say how many",
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument(
        "--ids",
        action="store_true",
        help="prompts and answers are token ids: prompt_ids in, completion_ids and logprobs out",
    )
    parser.add_argument(
        "--env",
        action="store_true",
        help="play section env's environment; env.key=value changes it",
    )
    parser.add_argument("--system", help="system message of a conversation")
    parser.add_argument(
        "--draft",
        type=os.path.expanduser,
        help="folder of a draft model (dflash, eagle3), or mtp, the model's own head: the same"
        " answers, decoded speculatively",
    )
    parser.add_argument(
        "--servers",
        action="append",
        default=[],
        help="URL of a vLLM server that has the weights; may be given several times. Only the"
        " model's tokenizer is read here",
    )
    args = parser.parse_intermixed_args(argv)
    generate_command(args)


def generate_command(args: argparse.Namespace) -> None:
    """Run the verb; raises UserError for unusable input before any weight is loaded."""
    from jaxtrain.cli.processes import large_imports

    with large_imports():
        if not args.servers:
            from jaxtrain.distributed.mesh import start_devices

            start_devices()  # beside the imports below
        from jaxtrain.cli.answer_file import AnswerFile
        from jaxtrain.cli.generate_rows import (
            leave_out_malformed,
            list_rows,
            read_request,
            report_unread,
        )
        from jaxtrain.cli.play import ENV_KEYS
        from jaxtrain.cli.prompt_images import holds_images, open_readers
        from jaxtrain.distributed.compile_cache import CompileCounter
        from jaxtrain.runs.progress import ProgressTicker
        from jaxtrain.runs.run_files import require_rows_file

    if args.env and (args.raw or args.system):
        raise UserError(
            "generate: --env takes neither --raw nor --system; env.raw=true and env.system=TEXT say"
            " the same to the environment single_turn"
        )
    if args.ids and (args.raw or args.system or args.env):
        raise UserError(
            "generate: --ids continues token ids as they stand, without --raw, --system or --env"
        )
    if not args.env and any(word.startswith(ENV_KEYS) for word in args.overrides):
        raise UserError("generate: keys of sections env and policies have no effect without --env")
    if args.servers and (args.env or args.draft):
        raise UserError("generate: --servers takes neither --env nor --draft")
    if args.messages and (args.raw or args.ids or args.env or not args.output):
        raise UserError("generate: --messages is for conversations that go into --output")
    if args.drop_malformed and (args.env or not args.input):
        raise UserError("generate: --drop-malformed is for rows of --input, without --env")
    if args.shard_rows is not None and (args.shard_rows < 1 or args.env or not args.output):
        raise UserError("generate: --shard-rows is at least 1, for an --output without --env")
    words = [word for word in args.overrides if word.startswith("dataset.")]
    args.overrides = [word for word in args.overrides if word not in words]
    rows, dataset = list_rows(args, words)
    if args.output and args.env:
        require_rows_file(args.output, args.overwrite)
    read = partial(read_request, args=args, dataset=dataset)
    if args.drop_malformed:
        rows = leave_out_malformed(rows, read, dataset)
    # Images have the format of the model; what is wrong with texts is found before it is loaded.
    pictured = [not args.env and holds_images(row, dataset) for row, _ in rows]
    requests = [
        {} if wait or args.env else read(row, origin)
        for (row, origin), wait in zip(rows, pictured, strict=True)
    ]
    raw = args.raw or args.ids
    file = None
    if args.output and not args.env:
        names = ("model", "overrides", "raw", "ids", "system", "draft", "messages", "image")
        file = AnswerFile(
            args.output,
            [row for row, _ in rows],
            (
                {name: getattr(args, name) for name in names},
                words,
                *(["servers"] if args.servers else []),
            ),
            overwrite=args.overwrite,
            shard_rows=args.shard_rows,
        )
    with CompileCounter() as compiled, ProgressTicker(compiled) as progress:
        with progress.phase("reading the tokenizer" if args.servers else "reading the weights"):
            writer = open_writer(args, raw)
        readers = open_readers(args.input, dataset, writer.tokenizer)
        for index in (index for index, wait in enumerate(pictured) if wait):
            row, origin = rows[index]
            requests[index] = read(row, origin, images=readers[index < len(args.prompt)])
        if rows and not args.env:
            report_unread(requests, writer.tokenizer)
            answer_requests(args, writer, requests, file, progress)
            if file is not None:
                print(progress.describe_times(), compiled.describe(), sep="\n", file=sys.stderr)
        elif rows:
            images = [readers[index < len(args.prompt)] for index in range(len(rows))]
            played = [
                env_row(row, origin, reader)
                for (row, origin), reader in zip(rows, images, strict=True)
            ]
            with progress.phase("playing"):
                episodes = writer.play(played)
            write_records(args, played, list(map(describe_episode, episodes)))
    if not rows:
        converse(writer, args.system, args.env)
    if (counted := writer.acceptance) is not None:
        print(
            f"draft: {counted.mean:.2f} tokens a pass, {counted.accepted} of"
            f" {counted.cycles * counted.num_drafted} guesses accepted",
            file=sys.stderr,
        )


def open_writer(args: argparse.Namespace, raw: bool) -> AnswerWriter:
    """Return the writer of answers: by a model that is read here, or by servers."""
    from jaxtrain.cli.play import AnswerWriter

    if not args.servers:
        return AnswerWriter(args.model, args.overrides, raw, args.draft, acts=args.env)
    from jaxtrain.cli.server_answers import ServerAnswerWriter

    overrides, urls = args.overrides, args.servers
    return ServerAnswerWriter(args.model, overrides, raw, urls, logprobs=args.ids)


def answer_requests(
    args: argparse.Namespace,
    writer: AnswerWriter,
    requests: list[dict[str, Any]],
    file: AnswerFile | None,
    progress: Progress,
) -> None:
    """Answer ids, texts or conversations: into the file, each as it ends, or to people."""
    from jaxtrain.cli.prompt_images import find_images, write_image
    from jaxtrain.data.chat.prompt import join_answer
    from jaxtrain.data.chat.rows import IMAGES

    if args.ids:
        from jaxtrain.api import read_ids

        size = writer.vocab_size
        tokens = [read_ids(r["prompt"], size, r["shown"]).tolist() for r in requests]
    else:
        with progress.phase("tokenizing"):
            tokens = tokenize_requests(writer, requests, args.drop_malformed)
    pairs = zip(requests, tokens, strict=True)
    placed = [None if ids is None else find_images(request, ids) for request, ids in pairs]
    pending = range(len(requests)) if file is None else file.pending
    pending = [index for index in pending if tokens[index] is not None]
    if file is not None and file.answers:
        print(f"{len(file.answers)} answers are in {file.part}; {len(pending)} are left")

    def describe(index: int, answer: Completion) -> dict[str, Any]:
        if args.ids:
            keys = {"completion_ids": answer.tokens, "logprobs": answer.logprobs}
            return {**keys, "finish_reason": answer.finish_reason}
        text = writer.decode(answer)
        if args.messages:
            prompt, images = requests[index]["prompt"], requests[index]["images"]
            taken = dict.fromkeys(requests[index]["replaced"])
            if placed[index] is not None:
                prompt = images.to_parts(prompt, write_image)
                taken |= {name: None for name in IMAGES if name in requests[index]["row"]}
            before, turn = join_answer(prompt, text)
            return {**taken, "messages": [*before, turn]}
        return {"completion": text}

    ended, drawn, began = 0, 0, time.monotonic()

    def write(index: int, answer: Completion) -> None:
        nonlocal ended, drawn
        ended, drawn = ended + 1, drawn + len(answer.tokens)
        if file is not None:
            with progress.phase("writing"):
                file.add(index, describe(index, answer))

    def count() -> str:
        rate = drawn / max(time.monotonic() - began, 1e-9)
        return f"{ended:,} of {len(prompts):,} prompts, {rate:,.0f} tokens/s"

    prompts = [ids for index in pending if (ids := tokens[index]) is not None]
    writer.announce(progress.phase)
    with progress.phase("answering", count):
        options = {"draws": list(pending), "images": [placed[index] for index in pending]}
        answers = writer.complete(prompts, on_end=write, **options) if prompts else []
    if not any(answers) and not (file is not None and file.answers):
        raise UserError("generate: no prompt leaves room for an answer")
    if file is not None:
        with progress.phase("writing"):
            file.finish()
        print(f"{len(file.answers)} answers in {args.output}")
        return
    for index, answer in zip(pending, answers, strict=True):
        if answer is None:
            continue
        keys, request = describe(index, answer), requests[index]
        text = f">>> {request['shown']}\n{keys.get('completion', keys)}\n"
        text = json.dumps({**request["row"], **keys}) if args.ids else text
        print(escape_control_chars(text))


def tokenize_requests(
    writer: AnswerWriter, requests: list[dict[str, Any]], drops: bool
) -> list[list[int] | None]:
    """Return the tokens of each request; None for those that the chat template cannot write, if
    it `drops` them."""
    tokens, reasons = [], []
    for request in requests:
        tools, keywords = request.get("tools"), request.get("chat_template_kwargs")
        try:
            ids = writer.tokenize(request["prompt"], tools, keywords, request["origin"])
            tokens.append(ids)
        except UserError as error:
            if not drops:
                raise
            tokens.append(None)
            reasons.append(str(error))
    if reasons:
        line = f"{len(reasons):,} of {len(requests):,} prompts left out; the first: {reasons[0]}"
        print(escape_control_chars(line), file=sys.stderr)
    return tokens


def write_records(
    args: argparse.Namespace, rows: list[dict[str, Any]], answers: list[tuple[dict[str, Any], str]]
) -> None:
    """Into the file --output, or to people. answers: (keys to add to a row, text) for each row."""
    from jaxtrain.cli.answer_file import write_row
    from jaxtrain.runs.run_files import write_output

    if args.output:
        merged_rows = [{**row, **keys} for row, (keys, _) in zip(rows, answers, strict=True)]
        write_output(args.output, b"".join(map(write_row, merged_rows)))
        print(f"{len(merged_rows)} answers in {args.output}")
        return
    for _, text in answers:
        print(escape_control_chars(text))


def env_row(row: dict[str, Any], origin: str = "", images: Any = None) -> dict[str, Any]:
    """Return a row in the form that environments need: with messages in place of a plain prompt.
    images: reader of its images; None refuses them."""
    from jaxtrain.data.chat.messages import MalformedRow
    from jaxtrain.data.chat.prompt import normalize_row
    from jaxtrain.data.chat.rows import Row
    from jaxtrain.data.chat.tokenize import open_row_images

    try:
        columns = Row(row)
        columns.images = open_row_images(images, origin)
        row = normalize_row(columns)
    except MalformedRow as error:
        raise UserError(error.describe(origin)) from None
    text = row.get("prompt")
    if isinstance(text, str) and "messages" not in row:
        return {**row, "messages": [{"role": "user", "content": text}]}
    return row


def describe_episode(episode: Episode) -> tuple[dict[str, Any], str]:
    """(what --output keeps of it, what people read: a line a turn, and the rewards). A game of
    several policies or agents: of each of its episodes, behind who speaks."""
    from jaxtrain.generation.evaluation.eval_sets import list_turns

    lines, summaries = [], []
    for member in (episode, *episode.others):
        speaker = member.policy or member.agent
        lines += [f"[{speaker}]"] * bool(speaker)
        lines += [f"{role:>10}: {text}" for role, text in list_turns(member)]
        lines += [f"{'reward':>10}: {name} {value}" for name, value in member.all_rewards.items()]
        names = {"policy": member.policy, "agent": member.agent}
        speaker_keys = {key: name for key, name in names.items() if name}
        summaries.append(
            {**speaker_keys, "completion": member.completion, "rewards": member.all_rewards}
        )
    other_members = {"others": summaries[1:]} if episode.others else {}
    return {**summaries[0], **other_members}, "\n".join(lines) + "\n"


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
        (completion,) = writer.complete([writer.tokenize(messages)])
        if completion is None:
            messages.pop()
            continue
        answer = writer.decode(completion)
        print(escape_control_chars(answer))
        messages.append({"role": "assistant", "content": answer})
