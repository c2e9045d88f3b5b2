"""The one door: train from a config, or one of the verbs around it.

Heavy imports happen inside the verb that needs them, so `--help` and mistakes answer at once.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtrain
from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.shown import printable, show

USAGE = """\
usage:
  jaxtrain --config FILE [section.key=value ...]      train
  jaxtrain --config FILE --dry-run                    check everything, allocate nothing
  jaxtrain preprocess --config FILE                   tokenise, validate, show samples
  jaxtrain capture --config FILE                      states of a draft's target, onto disk
  jaxtrain eval RUN | --config FILE                   held-out loss, problems answered
  jaxtrain generate RUN|MODEL [--prompt TEXT]         answer prompts; without one: a conversation
  jaxtrain speculate RUN|MODEL --draft FOLDER         what a draft model is worth: tau, speed
  jaxtrain score RUN|MODEL DATA --output FILE         scores of a reward model, row by row
  jaxtrain export RUN|MODEL [--output FOLDER]         write a Hugging Face model folder
  jaxtrain merge RUN|ADAPTER [--base MODEL]           adapter and base as one model folder
  jaxtrain serve-rollouts --config FILE               a rollout service on Ray that outlives runs
  jaxtrain stop-rollouts NAME                         end it
  jaxtrain watch RUN [RUN ...]                        dashboard in the terminal, live or afterwards
  jaxtrain report RUN [RUN ...] [-o FILE]             one HTML file about runs
  jaxtrain plot RUN [RUN ...] [--output FILE]         draw curves
  jaxtrain convert FILE [--output FILE]               a config of Axolotl, TRL or prime-rl as ours
  jaxtrain docs | schema                              every key: as Markdown | as JSON schema

RUN is a run's output_dir, MODEL a Hugging Face folder or Hub id. A verb's own options: -h after it.
`python -m jaxtrain.main` is the same program. `jaxtrain --help` lists every config key, `--version`
what is installed.
"""


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code (2: a mistake that the user can fix)."""
    verbs = {
        "train": run_train,
        "preprocess": run_preprocess,
        "capture": run_capture,
        "eval": run_eval,
        "generate": run_generate,
        "speculate": run_speculate,
        "score": run_score,
        "export": run_export,
        "merge": run_merge,
        "serve-rollouts": lambda argv: run_service("serve", argv),
        "stop-rollouts": lambda argv: run_service("stop", argv),
        "watch": run_watch,
        "report": run_report,
        "plot": run_plot,
        "convert": run_convert,
        "docs": run_docs,
        "schema": run_schema,
    }
    # Text that the terminal's encoding does not have is shown as escapes.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # transformers would tell of a missing PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    verb, rest = "train", argv
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        verb, rest = argv[0], argv[1:]
    try:
        if argv == ["--version"]:
            return tell_version()
        if verb not in verbs:
            raise UserError(f"unknown verb {show(verb)}; the verbs are {', '.join(verbs)}")
        return verbs[verb](rest) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before training watches the signals itself
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def tell_version() -> int:
    """What is installed here."""
    import importlib.metadata
    import platform

    found = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    own = f"jaxtrain {jaxtrain.__version__}, python {platform.python_version()}"
    print(", ".join([own, *found]))
    return 0


def run_train(argv: list[str]) -> int:
    """Train, or with --dry-run only check."""
    if not argv or argv in (["-h"], ["--help"]):
        from jaxtrain.config.docs import render_help

        print(USAGE + (render_help() if argv else ""))
        return 0 if argv else 2
    parser = config_parser("train")
    parser.add_argument("--dry-run", action="store_true", help="build all shapes, allocate nothing")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    args = parser.parse_intermixed_args(argv)
    if args.dry_run or args.print_config:
        config = read_config(args)
    else:
        return train_together(args, ["jaxtrain", *argv])
    if args.print_config:
        print(json.dumps(config.saved(), indent=2))
        return 0
    leave_gpus(config)
    from jaxtrain.verbs.dry_run import dry_run

    dry_run(config)
    return 0


def train_together(args: argparse.Namespace, command: list[str]) -> int:
    """Train with whatever other processes there are."""

    def work(config) -> int:
        from jaxtrain.train.loop import train

        return train(config, command)

    def join(config):
        return config.parallel, Path(config.run.output_dir)

    return run_together(lambda: leave_gpus(read_config(args)), join, work)


def leave_gpus(config):
    """The config; the GPUs of servers that it has started are theirs from now on. Before jax."""
    from jaxtrain.rollout.vllm.gpus import leave_gpus

    leave_gpus(config)
    return config


def run_together(read: Callable, join: Callable, work: Callable) -> int:
    """work(read()) on all processes that join(read()), a section `parallel` and the run's folder,
    and the environment tell of; what ends one of them is told once."""
    wanted = mistake = None
    try:
        wanted = read()  # before jax, which takes all devices that it sees
    except UserError as error:
        mistake = error
    from jaxtrain.parallel.processes import join_by_config, report, shutdown

    try:
        if mistake is not None:
            join_by_config(None)  # so that this, too, is told once
            raise mistake
        join_by_config(*join(wanted))
        code = work(wanted)
        shutdown()
        return code
    except (UserError, RunStopped, KeyboardInterrupt) as error:
        report(error, {UserError: 2, RunStopped: 1}.get(type(error), 130))
        raise
    except Exception as error:
        report(error, 0)  # another process's end shows here as a collective that failed
        raise


def run_preprocess(argv: list[str]) -> None:
    """Tokenise everything, report what was dropped and why, show samples."""
    parser = config_parser("preprocess")
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default 3)")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.verbs.preprocess import preprocess

    preprocess(read_config(args), args.samples)


def run_capture(argv: list[str]) -> int:
    """Write the target's states of all samples of a config's data to task.target.path."""
    args = config_parser("capture").parse_intermixed_args(argv)

    def work(config) -> int:
        from jaxtrain.verbs.capture import capture

        capture(config)
        return 0

    return run_together(lambda: read_config(args), lambda config: (config.parallel, None), work)


def run_eval(argv: list[str]) -> int:
    """Held-out loss and answered problems of a run's newest checkpoint, or of a config's model."""
    parser = config_parser("eval", required=False, first="RUN (a run's output_dir), or ")
    args = parser.parse_intermixed_args(argv)
    runs = [os.path.expanduser(word) for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    if len(runs) + bool(args.config) != 1:
        raise UserError("eval: give either RUN (a run's output_dir) or --config FILE")

    def read():
        from jaxtrain.config import ParallelConfig, load_config
        from jaxtrain.config.load import apply_overrides, read_saved, validate_config

        if args.config:
            return leave_gpus(load_config(args.config, overrides)).parallel
        with contextlib.suppress(UserError):  # told where all of the config is read
            saved = f"{runs[0]}/config.json"
            leave_gpus(validate_config(apply_overrides(read_saved(saved), overrides), saved))
        # Not as the run's own config says: that is how its first process was started.
        own = [word for word in overrides if word.startswith("parallel.")]
        try:
            return ParallelConfig(**apply_overrides({}, own).get("parallel", {}))
        except ValueError:  # told where all of the config is read
            return None

    def work(parallel) -> int:
        from jaxtrain.verbs.eval import evaluate_command

        evaluate_command(Path(runs[0]) if runs else None, args.config, overrides)
        return 0

    folder = Path(runs[0]) if runs else None
    return run_together(read, lambda parallel: (parallel, folder), work)


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
    from jaxtrain.verbs.generate import generate_command

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
    from jaxtrain.verbs.speculate import speculate_command

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
    from jaxtrain.verbs.score import score_command

    score_command(args)


def run_export(argv: list[str]) -> None:
    """Write a checkpoint, or a Hugging Face folder anew, as a Hugging Face model folder."""
    parser = Parser("jaxtrain export", description=run_export.__doc__)
    parser.add_argument(
        "source", type=expand_path, help="a run's output_dir, a Hugging Face folder or a Hub id"
    )
    parser.add_argument("--output", type=expand_path, help="default, of a run: RUN/model")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: as loaded"
    )
    parser.add_argument("--max-shard-size", help="of a weights file: 500MB, 2GiB; default 5GB")
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.verbs.export import export_command

    export_command(args.source, args.output, args.step, args.dtype, args.max_shard_size)


def run_merge(argv: list[str]) -> None:
    """Fold an adapter into the weights of its base: a full Hugging Face model folder."""
    parser = Parser("jaxtrain merge", description=run_merge.__doc__)
    parser.add_argument("source", type=expand_path, help="a run's output_dir or a PEFT folder")
    parser.add_argument(
        "--base", type=os.path.expanduser, help="folder or Hub id; default: what the adapter names"
    )
    parser.add_argument("--output", type=expand_path, help="default: SOURCE/merged")
    parser.add_argument("--step", type=int, help="of a run; default: the newest checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the base")
    parser.add_argument(
        "--quantize",
        choices=("none", "nf4", "int8", "mxfp4"),
        default="none",
        help="of a PEFT folder: adapter.quantize of its training; a run knows its own",
    )
    args = parser.parse_intermixed_args(argv)
    from jaxtrain.verbs.merge import merge_command

    merge_command(args.source, args.base, args.output, args.step, args.dtype, args.quantize)


def run_plot(argv: list[str]) -> None:
    """Curves of runs as a PNG."""
    from jaxtrain.run.plot import plot_command

    plot_command(argv)


def run_service(what: str, argv: list[str]) -> None:
    """Start or end the service of rollout.service ray://NAME."""
    from jaxtrain.verbs import serve_rollouts

    getattr(serve_rollouts, f"{what}_rollouts")(argv)


def run_watch(argv: list[str]) -> None:
    """Runs on a dashboard in the terminal."""
    from jaxtrain.watch.open import watch_command

    watch_command(argv)


def run_report(argv: list[str]) -> None:
    """One HTML file about runs."""
    from jaxtrain.report.open import report_command

    report_command(argv)


def run_convert(argv: list[str]) -> int:
    """Put a config of another system into our keys."""
    from jaxtrain.convert import SYSTEMS
    from jaxtrain.verbs.convert import convert

    parser = Parser(prog="jaxtrain convert", description=run_convert.__doc__)
    parser.add_argument(
        "file",
        type=Path,
        help="Axolotl's YAML, prime-rl's TOML, TRL's YAML or a file with its command line (.sh)",
    )
    parser.add_argument("--from", dest="system", choices=SYSTEMS, help="whose; told by the keys")
    parser.add_argument("--output", type=Path, help="TOML file to write; without: the terminal")
    args = parser.parse_args(argv)
    return convert(args.file, args.system, args.output)


def run_docs(argv: list[str]) -> None:
    """Print docs/config.md."""
    from jaxtrain.config.docs import render_markdown

    print(render_markdown(), end="")


def run_schema(argv: list[str]) -> None:
    """Print the config's JSON schema, for editors."""
    from jaxtrain.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))


def config_parser(verb: str, required: bool = True, first: str = "") -> Parser:
    """The options that every verb with a config shares."""
    parser = Parser(f"jaxtrain {verb}")
    parser.add_argument(
        "--config", type=os.path.expanduser, required=required, help="TOML or YAML file"
    )
    parser.add_argument("overrides", nargs="*", help=f"{first}section.key=value")
    return parser


def read_config(args: argparse.Namespace):
    """The Config that --config and the overrides name."""
    from jaxtrain.config import load_config

    return load_config(args.config, args.overrides)


def show_bug(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A traceback, whose words may be a stranger's."""
    print(printable("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr)


def entry() -> None:
    """Console-script entry point."""
    sys.excepthook = show_bug
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
