"""Numbers of benchmarks beside those of every set, averages over sets, and the table of all."""

import csv
import io
from collections.abc import Mapping, Sequence

from jaxtrain.config import EvalSetConfig
from jaxtrain.generation.evaluation.eval_sets import AnsweredProblem, mean

TABLE = "results.csv"


def measure_benchmark(
    section: EvalSetConfig, answered: Sequence[AnsweredProblem]
) -> dict[str, float]:
    """Return what a benchmark reports in addition: MMLU-Pro by category; IFEval's levels of
    instructions weighted by their number in each prompt."""
    numbers: dict[str, float] = {}
    if not section.graders:
        return numbers
    if section.benchmark == "mmlu_pro":
        shares: dict[str, list[float]] = {}
        for problem in answered:
            solved = sum(total >= section.threshold for total in problem.totals)
            category = str(problem.row.get("category")).replace(" ", "_")
            shares.setdefault(category, []).append(solved / section.k)
        numbers |= {f"category/{name}": mean(values) for name, values in sorted(shares.items())}
    if section.benchmark == "ifeval":
        for name in ("instruction_strict", "instruction_loose"):
            pairs = [
                (score.get(name) or 0.0, len(problem.row["instruction_id_list"]))
                for problem in answered
                for score in [*problem.scores, *[{}] * problem.failed]
            ]
            total = sum(count for _, count in pairs)
            numbers[f"rewards/{name}"] = sum(share * count for share, count in pairs) / total
    return numbers


def average_sets(
    metrics: Mapping[str, float], sections: Sequence[EvalSetConfig]
) -> dict[str, float]:
    """Return the means over sets of avg@k and pass@k, with each set's own k, every set counting
    once; nothing for a single set."""
    if len(sections) < 2:
        return {}
    numbers = {
        f"eval/average/{name}": [
            value
            for section in sections
            if (value := metrics.get(f"eval/{section.label}/{name}@{section.k}")) is not None
        ]
        for name in ("avg", "pass")
    }
    return {name: mean(values) for name, values in numbers.items() if values}


def write_table(metrics: Mapping[str, float], sets: Sequence[tuple[EvalSetConfig, int]]) -> str:
    """Return CSV: a line for each set with its number of problems and its metrics, and one with the
    averages. Columns avg and pass are avg@k and pass@k."""
    lines: list[dict[str, object]] = []
    for section, count in sets:
        numbers = select(metrics, f"eval/{section.label}/")
        main = {name: numbers.pop(f"{name}@{section.k}", "") for name in ("avg", "pass")}
        lines.append({"set": section.label, "problems": count, "k": section.k, **main, **numbers})
    if average := select(metrics, "eval/average/"):
        lines.append({"set": "average", **average})
    file = io.StringIO()
    columns = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def select(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics behind a prefix, by the rest of their names."""
    return {
        key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)
    }
