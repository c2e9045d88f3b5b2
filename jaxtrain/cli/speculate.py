"""The verb `speculate`: what a draft model is worth, measured beside plain decoding in one run.

prompts ─┬─ plain sampler ───────┬─ the same answers? seconds of each, in turns
         └─ sampler with draft ──┴─ tau: tokens for each pass of the target
"""

import argparse
import json
import os
from typing import Any

from jaxtrain.arguments import Parser, add_model, expand_path
from jaxtrain.errors import UserError


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
    add_model(
        parser,
        "sampling.max_new_tokens=256, sampling.temperature=1, model.compute_dtype=bfloat16,"
        " dataset.split=test (of --input) and the like",
    )
    parser.add_argument(
        "--draft", type=os.path.expanduser, required=True, help="folder of a draft model, or mtp"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="a known benchmark, from the Hub or files: gsm8k, math500, aime24, aime25, humaneval,"
        " amc23, minerva, gpqa, mmlu_pro, ifeval, mbpp, livecodebench, swe-bench, mt-bench, alpaca;"
        " may be given several times",
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
    speculate_command(args)


def speculate_command(args: argparse.Namespace) -> None:
    """Run the verb; raises UserError for unusable input before any weight is loaded."""
    import jax

    from jaxtrain.api import Model
    from jaxtrain.cli.decoding_pair import DecodingPair, describe
    from jaxtrain.cli.prompt_input import open_asked
    from jaxtrain.cli.published_tau import find_published
    from jaxtrain.runs.run_files import require_writable, write_output

    if args.output:
        require_writable(args.output, args.overwrite)
    if min(args.rows) < 1 or args.repeats < 1 or (args.most is not None and args.most < 1):
        raise UserError("speculate: --rows, --repeats and --most must be at least 1")
    dataset_overrides = [word for word in args.overrides if word.startswith("dataset.")]
    sets = open_asked(args.set, args.input, dataset_overrides, args.most, args.raw)
    model = Model(args.model, [word for word in args.overrides if word not in dataset_overrides])
    pair = DecodingPair(model, args.draft, model.config.sampling, args.raw)
    device = jax.devices()[0].device_kind
    print(f"{args.model} with {args.draft}, {pair.draft.num_drafted} guesses a cycle, on {device}")
    report = {
        "model": args.model,
        "draft": args.draft,
        "device": device,
        "num_drafted": pair.draft.num_drafted,
        "sampling": pair.sampling.model_dump(),
        "sets": [],
    }
    for prompt_set in sets:
        prompts = pair.encode(prompt_set)
        print(f"\n{prompt_set.name}: {len(prompts)} prompts")
        set_report = {"name": prompt_set.name, "prompts": len(prompts), "timings": []}
        for rows in args.rows:
            timing, requests = pair.measure(prompts, rows, args.repeats)
            if not set_report["timings"]:
                set_report |= describe(requests, pair.draft.num_drafted)
                set_report["published"] = find_published(pair.draft, prompt_set.name)
                show_lengths(set_report)
            set_report["timings"].append(timing.table())
            show_timing(set_report["timings"][-1], len(prompts))
        report["sets"].append(set_report)
    if args.output:
        write_output(args.output, (json.dumps(report, indent=1) + "\n").encode())
        print(f"\n{args.output}")


def show_lengths(set_report: dict[str, Any]) -> None:
    """A set's acceptance, for people."""
    if not set_report["cycles"]:
        print("  every answer ended with its first token: there was nothing to guess")
        return
    shares = " ".join(f"{100 * n / set_report['cycles']:.0f}" for n in set_report["histogram"])
    positions = " ".join(f"{100 * share:.0f}" for share in set_report["accepted_by_position"])
    print(
        f"  tau {set_report['tau']:.2f} (mean of answers), {set_report['tau_pooled']:.2f} of all"
        f" {set_report['cycles']:,} cycles\n"
        f"  cycles of 1, 2, ... tokens: {shares} %\n"
        f"  guess 1, 2, ... accepted: {positions} %\n"
    )
    for source, tau in set_report["published"].items():
        print(f"  published: tau {tau:.2f}, {source}")
    print(
        f"  {'rows':>6} {'plain tok/s':>12} {'drafted tok/s':>14} {'speed-up':>9}"
        f" {'decoding alone':>24} {'speed-up':>9}  answers"
    )


def show_timing(timing: dict[str, Any], count: int) -> None:
    """A line for each number of rows."""
    different = timing["different_answers"]
    agreement = f"{different} of {count} differ" if different else f"all {count} equal"
    print(
        f"  {timing['rows']:>6} {timing['plain_tokens_per_second']:>12,.1f}"
        f" {timing['drafted_tokens_per_second']:>14,.1f} {timing['speedup']:>8.2f}x"
        f" {timing['plain_decoding_tokens_per_second']:>11,.1f}"
        f" {timing['drafted_decoding_tokens_per_second']:>12,.1f}"
        f" {timing['decoding_speedup']:>8.2f}x  {agreement}",
        flush=True,
    )
