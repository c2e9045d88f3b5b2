"""Verbs that ask a model: generate, speculate, score"""

import argparse
import os

from jaxtrain.arguments import Parser, expand_path


def run_generate(argv: list[str]) -> None:
    """Answer prompts with a run's newest checkpoint or a Hugging Face model."""
    parser = Parser("jaxtrain generate", description=run_generate.__doc__)
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        help="a run's output_dir, a Hugging Face folder or a Hub id",
    )
    parser.add_argument("overrides", nargs="*", help="sampling.key=value and the like")
    parser.add_argument("--prompt", action="append", default=[], help="may be given several times")
    parser.add_argument(
        "--input", type=expand_path, help="jsonl with prompt or messages in each line"
    )
    parser.add_argument("--output", type=expand_path, help="jsonl to write the answers to")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --output if it is there"
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
        help="folder of a draft model (dflash, eagle3): the same answers, decoded speculatively",
    )
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.generate import generate_command

    generate_command(args)


def read_numbers(word: str) -> list[int]:
    """1,4,16: one word, so that overrides may stand behind it."""
    try:
        return [int(number) for number in word.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no list such as 1,4,16") from None


def run_speculate(argv: list[str]) -> None:
    """Decode prompts plainly and with a draft model, in turns: whether the answers are the same,
    tokens for each pass of the model (tau), tokens per second."""
    parser = Parser("jaxtrain speculate", description=run_speculate.__doc__)
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        help="a run's output_dir, a Hugging Face folder or a Hub id",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="sampling.max_new_tokens=256, sampling.temperature=1, model.compute_dtype=bfloat16,"
        " dataset.split=test (of --input) and the like",
    )
    parser.add_argument(
        "--draft", type=os.path.expanduser, required=True, help="folder of a draft model"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a known benchmark, from the Hub or files: gsm8k, math500, aime24, aime25, humaneval,"
        " mbpp, livecodebench, swe-bench, mt-bench, alpaca; may be given several times",
    )
    parser.add_argument(
        "--input",
        type=os.path.expanduser,
        help="a dataset of messages or prompt: file, Hub id or builtin:calculator",
    )
    parser.add_argument("--most", type=int, help="prompts of a set, and of --input (default 128)")
    parser.add_argument(
        "--rows",
        type=read_numbers,
        default=[1],
        metavar="N[,N...]",
        help="answers under way at once, such as 1,4,16 (default 1)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="timed passes of each kind; the median counts"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the texts")
    parser.add_argument("--output", type=expand_path, help="JSON file for all numbers")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.speculate import speculate_command

    speculate_command(args)


def run_score(argv: list[str]) -> None:
    """Score the rows of a dataset: answers of a pair, completions, the steps of an answer; with
    --top-k: what a teacher finds likeliest."""
    parser = Parser("jaxtrain score", description=run_score.__doc__)
    parser.add_argument(
        "model",
        type=os.path.expanduser,
        help="a run's output_dir, a Hugging Face or PEFT folder, or a Hub id",
    )
    parser.add_argument("data", type=os.path.expanduser, help="a file, a folder or a Hub id")
    parser.add_argument(
        "overrides", nargs="*", help="dataset.split=test, model.compute_dtype=bfloat16 and the like"
    )
    parser.add_argument(
        "--output", type=expand_path, required=True, help="jsonl: each row with its scores"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    parser.add_argument(
        "--batch-size", type=int, default=8, help="rows per device in a forward pass (default 8)"
    )
    parser.add_argument("--prefix", default="", help="put before the names of the new keys")
    parser.add_argument(
        "--top-k",
        type=int,
        help="instead of scores the K likeliest tokens of a language model with their log-probs, in"
        ' the place of each answer token: data for task.kind "distillation"',
    )
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.cli.score import score_command

    score_command(args)
