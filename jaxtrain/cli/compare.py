"""The verb `compare`: how much better one evaluation is than another, and how sure that is.

    before/samples.jsonl ─ right answers of each problem ─┐
                                                          ├─ paired by problem ─> a sentence
    after/samples.jsonl ──────────────────────────────────┘

Both answer the same problems, so the differences have far less noise than the two means.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, show

Problems = dict[str, list[float]]
"""The numbers of a problem's answers, by its prompt as JSON."""


class PairedDifference(NamedTuple):
    """Difference of means over the same problems."""

    problems: int
    before: float
    after: float
    difference: float
    low: float
    high: float
    """95 % interval of the difference, by Student's t over the problems' differences."""
    p: float | None
    """Of McNemar's exact test; None unless every problem has one answer, which is 0 or 1."""


def run_compare(argv: list[str]) -> None:
    """Compare two evaluations of the same problems: the difference with its 95 % interval."""
    parser = Parser("jaxtrain compare", description=run_compare.__doc__)
    for name in ("before", "after"):
        parser.add_argument(
            name,
            type=expand_path,
            help="a run's output_dir, a folder that eval wrote, or a samples.jsonl",
        )
    parser.add_argument("--set", action="append", default=[], help="this set alone; several times")
    parser.add_argument(
        "--threshold", type=float, default=1.0, help="an answer with this reward is right"
    )
    parser.add_argument(
        "--reward", help="compare the means of this reward, or of the total (reward), instead"
    )
    parser.add_argument("--json", action="store_true", help="print numbers instead of sentences")
    args = parser.parse_args(argv)
    compared = compare_files(args)
    if args.json:
        print(json.dumps({name: entry._asdict() for name, entry in compared.items()}))
        return
    for name, entry in compared.items():
        print(escape_control_chars(f"{name}: {describe(entry, args.reward is None)}"))


def compare_files(args: argparse.Namespace) -> dict[str, PairedDifference]:
    """Return the difference of each set; UserError unless both answered the same problems."""
    before, after = (read_answers(path, args) for path in (args.before, args.after))
    names = args.set or sorted({*before, *after})
    for name in names:
        for path, sets in ((args.before, before), (args.after, after)):
            if name not in sets:
                raise UserError(
                    f"compare: {path} has no answers to {show(name)}; its sets are"
                    f" {', '.join(map(show, sets))}. --set names one that both have"
                )
    return {name: compare(before[name], after[name], name) for name in names}


def read_answers(path: Path, args: argparse.Namespace) -> dict[str, Problems]:
    """Return {set: its answered problems} of a file, of its newest step; UserError."""
    from jaxtrain.runs.records import read_records
    from jaxtrain.runs.samples import SAMPLES

    candidates = [path, path / "eval" / SAMPLES, path / SAMPLES]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        problem = "holds no answers" if path.exists() else "does not exist"
        raise UserError(f"compare: {path} {problem}; `jaxtrain eval` writes {SAMPLES}")
    steps: dict[str, float] = {}
    sets: dict[str, Problems] = {}
    for record in read_records(file):
        line = record.value
        if line is None or not isinstance(name := line.get("set"), str):
            continue  # an answer of a training round
        number, step = read_number(line, args), line.get("step", 0)
        if step > steps.setdefault(name, step):
            steps[name], sets[name] = step, {}
        if step == steps[name]:
            key = json.dumps(line.get("prompt"), sort_keys=True)
            sets.setdefault(name, {}).setdefault(key, []).append(number)
    if not sets:
        raise UserError(f"compare: {file} has no answers to a set of problems ([[eval.sets]])")
    return sets


def read_number(line: Mapping[str, Any], args: argparse.Namespace) -> float:
    """Return what counts of an answer: 1 if it is right, or a reward."""
    if args.reward in (None, "reward"):
        value = line.get("reward")
    else:
        rewards = line.get("rewards")
        rewards = rewards if isinstance(rewards, Mapping) else {}
        if args.reward not in rewards:
            names = ", ".join(map(show, rewards)) or "none"
            raise UserError(f"compare: --reward {show(args.reward)}: the rewards are {names}")
        value = rewards[args.reward]
    number = float(value) if isinstance(value, int | float) else 0.0  # nothing judged it
    return float(number >= args.threshold) if args.reward is None else number


def compare(before: Problems, after: Problems, name: str) -> PairedDifference:
    """Return the difference of two answered sets; UserError unless they have the same problems."""
    only = [sorted({*x} - {*y}) for x, y in ((before, after), (after, before))]
    if any(only):
        sides = zip(("before", "after"), only, strict=True)
        which, missing = next((side, keys) for side, keys in sides if keys)
        raise UserError(
            f"compare: {name} is not the same set of problems in both: {len(only[0]):,} are in the"
            f" first (before) alone and {len(only[1]):,} in the second (after) alone, such as"
            f" {show(missing[0], 120)} ({which}); evaluate both with the same rows, prompts and"
            " templates"
        )
    if len(before) < 2:
        raise UserError(f"compare: {name} has one problem, which gives no interval")
    pairs = [(mean(before[key]), mean(after[key])) for key in before]
    differences = [y - x for x, y in pairs]
    middle, half = mean(differences), half_width(differences)
    single = all(len(v) == 1 for answers in (before, after) for v in answers.values())
    is_binary = single and {value for pair in pairs for value in pair} <= {0.0, 1.0}
    return PairedDifference(
        len(pairs),
        mean([x for x, _ in pairs]),
        mean([y for _, y in pairs]),
        middle,
        middle - half,
        middle + half,
        mcnemar(differences) if is_binary else None,
    )


def mean(numbers: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return math.fsum(numbers) / len(numbers)


def half_width(differences: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean, by Student's t."""
    from scipy.special import stdtrit  # comes with jax

    count, middle = len(differences), mean(differences)
    variance = math.fsum((value - middle) ** 2 for value in differences) / (count - 1)
    return float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count)


def mcnemar(differences: Sequence[float]) -> float:
    """Return the two-sided p of McNemar's exact test: of the problems that one alone solved, each
    is as likely the one's as the other's."""
    won, lost = (sum(value == sign for value in differences) for sign in (1, -1))
    total = won + lost
    tail = sum(math.comb(total, k) for k in range(min(won, lost) + 1))
    return min(1.0, float(2 * tail / 2**total)) if total else 1.0


def describe(entry: PairedDifference, is_share: bool) -> str:
    """Return a sentence; shares of right answers are in points of a hundred."""
    scale, form, unit = (100.0, ".1f", " points") if is_share else (1.0, ".4g", "")
    before, after = (format(scale * value, form) for value in (entry.before, entry.after))
    low, high = (format(scale * value, form) for value in (entry.low, entry.high))
    change = format(scale * entry.difference, f"+{form}")
    text = f"{before} -> {after}: {change}{unit}, 95 % interval {low} to {high}"
    text += f", {entry.problems:,} problems"
    if entry.p is not None:
        text += f", McNemar's p {entry.p:.2g}"
    if entry.low <= 0 <= entry.high:
        text += "; this may be chance"
    return text
