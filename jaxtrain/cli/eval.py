"""The verb `eval`: held-out loss and answers of a run's newest checkpoint or a config's model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain import plugins
from jaxtrain.arguments import expand_path
from jaxtrain.cli.processes import config_parser, run_together, settle_before_jax
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.config import Config
    from jaxtrain.methods.reopen import Trained
    from jaxtrain.runs.progress import Progress


def run_eval(argv: list[str]) -> int:
    """Held-out loss and answered problems of a run's newest checkpoint, a model or a config."""
    parser = config_parser("eval", required=False, first="RUN (a run's output_dir) or MODEL, ")
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="NAME[=PATH]",
        help="answer this benchmark (rows of the Hub, or of PATH) instead of eval.sets; several"
        " times. Its keys are eval.sets.0.k=4 and so on",
    )
    parser.add_argument(
        "--lm-eval",
        metavar="TASKS",
        help="answer tasks of lm-evaluation-harness instead, such as gsm8k,ifeval",
    )
    parser.add_argument(
        "--lm-eval-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the harness: num_fewshot, limit, apply_chat_template, fewshot_as_multiturn,"
        " system_instruction, gen_kwargs, include_path (of custom tasks); several times",
    )
    parser.add_argument(
        "--output", type=expand_path, help="folder for what is generated; default: RUN/eval"
    )
    args = parser.parse_intermixed_args(argv)
    runs = [os.path.expanduser(word) for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    if len(runs) + bool(args.config) != 1:
        raise UserError(
            "eval: give either RUN (a run's output_dir), MODEL (a folder or a Hub id) or"
            " --config FILE"
        )
    if args.lm_eval is not None:
        return evaluate_tasks(args, runs, overrides)
    if args.lm_eval_option:
        raise UserError("eval: --lm-eval-option has no effect without --lm-eval")
    if args.benchmark:
        overrides = [name_sets(args.benchmark), *overrides]

    def read():
        from jaxtrain.config import ParallelConfig, load_config
        from jaxtrain.config.load import apply_overrides, read_saved, validate_config

        if args.config:
            return settle_before_jax(load_config(args.config, overrides)).parallel
        with contextlib.suppress(UserError):  # told where all of the config is read
            saved = f"{runs[0]}/config.json"
            settle_before_jax(validate_config(apply_overrides(read_saved(saved), overrides), saved))
        # Not as the run's own config says: that is how its first process was started.
        parallel_overrides = [word for word in overrides if word.startswith("parallel.")]
        try:
            return ParallelConfig(**apply_overrides({}, parallel_overrides).get("parallel", {}))
        except ValueError:  # told where all of the config is read
            return None

    def work(parallel) -> int:
        evaluate_command(Path(runs[0]) if runs else None, args.config, overrides, args.output)
        return 0

    folder = Path(runs[0]) if runs else None
    return run_together(read, lambda parallel: (parallel, folder), work)


def evaluate_tasks(args: argparse.Namespace, runs: list[str], overrides: list[str]) -> int:
    """Answer tasks of lm-evaluation-harness with a model, in one process."""
    if not runs or args.benchmark:
        raise UserError("eval: --lm-eval goes with RUN or MODEL, without --config and --benchmark")
    plugins.prepare_import()  # the harness needs all of transformers
    from jaxtrain.api import Model
    from jaxtrain.cli.lm_harness import run_harness

    folder = Path(runs[0])
    is_run = (folder / "checkpoints").is_dir()
    output = args.output or (folder if is_run else Path("runs") / folder.name) / "eval"
    open_model = partial(Model, runs[0], overrides, own_dtype=True)
    run_harness(open_model, args.lm_eval.split(","), args.lm_eval_option, output)
    return 0


def evaluate_command(
    run: Path | None, config_path: str | None, overrides: list[str], output: Path | None = None
) -> None:
    """The verb `eval`: held-out loss, the task's own numbers and answered problems of a run's
    newest checkpoint, or of a config's model. What is generated goes to `output`, by default the
    run's folder `eval`. Of several processes the first answers, prints and writes."""
    from jaxtrain.distributed.compile_cache import CompileCounter
    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.runs.progress import Progress, ProgressTicker

    with CompileCounter() as compiled:
        if not is_main_process():
            return evaluate(run, config_path, overrides, output, Progress(silent))
        with ProgressTicker(compiled) as progress:
            evaluate(run, config_path, overrides, output, progress)
        print(progress.describe_times(), compiled.describe(), sep="\n", file=sys.stderr)


def evaluate(
    run: Path | None,
    config_path: str | None,
    overrides: list[str],
    output: Path | None,
    progress: Progress,
) -> None:
    """Evaluate on this process, see evaluate_command."""
    import jax

    from jaxtrain.config import load_config
    from jaxtrain.core.evaluation import HeldOutEvaluation
    from jaxtrain.core.roles import ModelSnapshot, Roles
    from jaxtrain.core.scorer import Scorer
    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.methods.registry import make_task
    from jaxtrain.methods.reopen import Trained, alone, open_trained

    log = print if is_main_process() else silent
    if run is not None:
        saved = read_run(run, overrides)
        require_data(saved)
        if saved is None:
            overrides = [f"run.output_dir={json.dumps(f'runs/{run.name}')}", *overrides]
        with progress.phase("reading the weights"):
            trained = open_trained(
                str(run), overrides, all_roles=True, all_policies=True, own_dtype=True
            )
        if saved is None and not any(word.startswith("data.sequence_len=") for word in overrides):
            # Of a folder the model's own limit bounds prompt and answer.
            longest = trained.snapshot.roles.bundle.architecture.longest
            data = trained.config.data.model_copy(update={"sequence_len": longest})
            trained = trained._replace(config=trained.config.model_copy(update={"data": data}))
        config, task, snapshot, _ = trained
        log(f"{run}, step {snapshot.step}, computing in {config.model.compute_dtype}")
    else:
        assert config_path is not None, "the command line gives one of the two"
        config = alone(load_config(config_path, overrides))
        require_data(config)
        task = make_task(config)
        roles = Roles(task.roles)
        with progress.phase("reading the weights"):
            weights, frozen, copies = roles.open(config.run.seed)
        snapshot = ModelSnapshot(roles, {**frozen, **copies, **weights}, 0)
        trained = Trained(config, task, snapshot)
    datasets, sets = config.data.eval_datasets, config.eval.sets
    evaluation = HeldOutEvaluation(config, task, snapshot.roles)
    scorer = Scorer(lambda: snapshot, impl=config.model.logp)
    with jax.set_mesh(task.mesh):
        with progress.phase("evaluating", lambda: evaluation.progress):
            by_dataset, method_metrics = evaluation.list_numbers(snapshot, scorer)
        for dataset, means in zip(datasets, by_dataset, strict=True):
            shown = "  ".join(f"{name} {value:.6g}" for name, value in means.items())
            log(f"{dataset.path} ({dataset.split}): {shown or 'no trained token'}")
        for name, value in method_metrics.items():
            log(f"{name:<32} {value:.6g}")
        if not (datasets or sets or method_metrics):
            raise UserError(NOTHING)
        if sets:
            folder = Path(config.run.output_dir)
            if run is not None and (run / "checkpoints").is_dir():
                folder = run
            target = folder / "eval" if output is None else output
            generate_into(target, trained, log, progress, in_run=output is None)


NOTHING = (
    "eval: there is nothing to evaluate, data.eval_datasets is empty; add"
    " data.eval_datasets.0.path=..., eval.sets.0.path=... or --benchmark NAME"
)


def name_sets(benchmarks: Sequence[str]) -> str:
    """Return the override of eval.sets for words NAME or NAME=PATH."""
    sets = []
    for word in benchmarks:
        name, _, path = word.partition("=")
        keys = {"benchmark": name} | ({"path": path} if path else {})
        sets.append(", ".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    return f"eval.sets=[{', '.join(f'{{{keys}}}' for keys in sets)}]"


def require_data(config: Config | None) -> None:
    """Raise UserError where nothing is to be evaluated, before any weight is read; a method from
    outside may have numbers without data."""
    from jaxtrain.config.root import OUTSIDE, find_tag

    if config is not None and find_tag(config.task) != OUTSIDE:
        if not (config.data.eval_datasets or config.eval.sets):
            raise UserError(NOTHING)


def read_run(run: Path, overrides: list[str]) -> Config | None:
    """Return a run's config with overrides; None for a folder that is no run."""
    from jaxtrain.config.load import apply_overrides, read_saved, validate_config
    from jaxtrain.methods.reopen import holds_run

    file = run / "config.json"
    if not holds_run(file):
        return None
    return validate_config(apply_overrides(read_saved(file), overrides), str(file))


def silent(text: str) -> None:
    """Log nothing: for all processes but the first."""


def generate_into(
    folder: Path,
    trained: Trained,
    log: Callable[[str], None],
    progress: Progress,
    *,
    in_run: bool = True,
) -> None:
    """Answer the problem sets of section eval with the weights; prints the numbers, appends them to
    metrics.jsonl in `folder`, writes results.csv and, once all are answered, samples.jsonl.
    in_run: whether `folder` belongs to the run around it."""
    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.generation.engines import find_engine, with_secrets
    from jaxtrain.generation.evaluation.answers import ServingEngine, SetAnswers
    from jaxtrain.generation.evaluation.benchmark_metrics import TABLE, write_table
    from jaxtrain.generation.evaluation.problem_sets import open_problem_sets
    from jaxtrain.runs.manifest import write_atomically
    from jaxtrain.runs.run_files import claim_names
    from jaxtrain.runs.samples import SAMPLES, append_samples
    from jaxtrain.runs.sinks import JsonLines

    config, task, snapshot, policies = trained
    parts, samples = snapshot.roles.bundle, folder / SAMPLES
    with ExitStack() as stack:
        sets = open_problem_sets(config, parts, log)
        if sets is not None:
            stack.callback(sets.close)
        scratch = folder
        if is_main_process():
            try:
                if in_run:
                    claim_names(folder.parent, [folder.name])
                elif (folder / "attempts.jsonl").exists():
                    raise UserError(f"--output {folder} is a run's folder; name another one")
                else:
                    claim_names(folder, [SAMPLES, "metrics.jsonl", TABLE], "--output")
                folder.mkdir(parents=True, exist_ok=True)
                # Two evaluations at once have a folder each until they are through.
                scratch = Path(
                    stack.enter_context(tempfile.TemporaryDirectory(prefix=".", dir=folder))
                )
                (scratch / SAMPLES).touch()
            except OSError as error:
                raise UserError(
                    f"{folder} cannot be written: {error.strerror or error}; name another folder"
                    " with --output"
                ) from error
        engine, kind = None, find_engine(config)
        if kind.serves:
            # Adapters go to this folder, beside those of a run that may be under way.
            eval_run = config.run.model_copy(update={"output_dir": str(scratch)})
            engine, publisher = kind.open(
                with_secrets(config.model_copy(update={"run": eval_run})), parts, log
            )
            stack.callback(publisher.close)
            params = {
                name: policy_snapshot.params() for name, policy_snapshot in policies.items()
            } or snapshot.params()
            publisher.publish(0, params, snapshot.roles.rebuild(snapshot.roles.trained))
        answers = SetAnswers(
            config,
            task,
            sets,
            partial(append_samples, scratch),
            ServingEngine(kind.serves, engine),
            log,
        )
        began = time.monotonic()

        def count() -> str:
            if sets is None or not sets.progress:
                return ""
            rate = sets.num_drawn / (time.monotonic() - began)
            return f"{sets.progress}, {rate:,.0f} tokens/s"

        with progress.phase("answering", count):
            metrics = answers.measure(snapshot, policies)
        if is_main_process():
            os.replace(scratch / SAMPLES, samples)
            assert sets is not None, "process 0 holds the sets"
            rows = [(section, len(problems)) for section, problems in sets.sets]
            write_atomically(folder / TABLE, write_table(metrics, rows))
            file = JsonLines(folder / "metrics.jsonl")
            file.start(snapshot.step, snapshot.step)
            stack.callback(file.close, None)
            file.write(snapshot.step, metrics)
    for name, value in metrics.items():
        log(f"{name:<32} {value:.6g}")
    log(f"answers: {samples}")
