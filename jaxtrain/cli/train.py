"""Training, and work that several processes do together"""

import argparse
import json
from pathlib import Path

from jaxtrain.cli import write_usage
from jaxtrain.cli.processes import (
    config_parser,
    large_imports,
    read_config,
    run_together,
    settle_before_jax,
)


def run_train(argv: list[str]) -> int:
    """Train, or with --dry-run only check."""
    if not argv or argv in (["-h"], ["--help"]):
        from jaxtrain.config.docs import render_help

        print(write_usage() + (render_help() if argv else ""))
        return 0 if argv else 2
    parser = config_parser("train")
    parser.add_argument("--dry-run", action="store_true", help="build all shapes, allocate nothing")
    parser.add_argument(
        "--on",
        metavar="DEVICE:COUNT",
        help="with --dry-run: estimate a step on these, such as h200:64",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="with --dry-run: also compile the step's programs into the cache on disk",
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved config")
    args = parser.parse_intermixed_args(argv)
    if args.on and not args.dry_run:
        parser.error("--on goes with --dry-run")
    if args.compile and (args.on or not args.dry_run):
        parser.error("--compile goes with --dry-run, for the devices of this machine")
    if args.dry_run or args.print_config:
        config = read_config(args)
    else:
        return train_together(args, ["jaxtrain", *argv])
    if args.print_config:
        print(json.dumps(config.saved(), indent=2))
        return 0
    settle_before_jax(config)
    from jaxtrain.cli.dry_run import dry_run

    dry_run(config, args.on, compiles=args.compile)
    return 0


def train_together(args: argparse.Namespace, command: list[str]) -> int:
    """Train with whatever other processes there are."""

    def work(config) -> int:
        open_answers, openable = None, config
        with large_imports():
            from jaxtrain.core.loop import train
            from jaxtrain.methods.registry import find_method, make_task

            if config.eval.sets:
                from jaxtrain.generation.evaluation.answers import AnswerEvaluation as open_answers
            find_method(config)
        folder = Path(config.run.output_dir) / "base"
        if folder.is_dir() and not config.run.overwrite:
            from jaxtrain.core.base_model import with_saved_base

            openable = with_saved_base(config, folder.parent)
        return train(config, make_task(openable), command, open_answers)

    def join(config):
        return config.parallel, Path(config.run.output_dir)

    return run_together(lambda: settle_before_jax(read_config(args)), join, work)
