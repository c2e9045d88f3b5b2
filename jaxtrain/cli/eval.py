"""The verb `eval`: held-out loss and answers of a run's newest checkpoint or a config's model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.cli.processes import config_parser, run_together, settle_before_jax
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.config import Config
    from jaxtrain.core.roles import ModelSnapshot
    from jaxtrain.core.task import Task


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
        evaluate_command(Path(runs[0]) if runs else None, args.config, overrides)
        return 0

    folder = Path(runs[0]) if runs else None
    return run_together(read, lambda parallel: (parallel, folder), work)


def evaluate_command(run: Path | None, config_path: str | None, overrides: list[str]) -> None:
    """The verb `eval`: held-out loss, the task's own numbers and answered problems of a run's
    newest checkpoint, or of a config's model. What is generated goes to the folder `eval` in the
    run's. Of several processes the first answers, prints and writes."""
    import jax

    from jaxtrain.config import load_config
    from jaxtrain.core.evaluation import HeldOutEvaluation
    from jaxtrain.core.roles import ModelSnapshot, Roles
    from jaxtrain.core.scorer import Scorer
    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.methods.registry import make_task
    from jaxtrain.methods.reopen import alone, open_trained

    log = print if is_main_process() else silent
    if run is not None:
        opened = open_trained(str(run), overrides, all_roles=True, all_policies=True)
        config, task, snapshot, policies = opened
        log(f"{run}, step {snapshot.step}")
    else:
        assert config_path is not None, "the command line gives one of the two"
        config = alone(load_config(config_path, overrides))
        task = make_task(config)
        roles = Roles(task.roles)
        trained, frozen, copies = roles.open(config.run.seed)
        snapshot, policies = ModelSnapshot(roles, {**frozen, **copies, **trained}, 0), {}
    datasets, sets = config.data.eval_datasets, config.eval.sets
    evaluation = HeldOutEvaluation(config, task, snapshot.roles)
    scorer = Scorer(lambda: snapshot, impl=config.model.logp)
    with jax.set_mesh(task.mesh):
        for dataset in datasets:
            means = evaluation.measure(snapshot, dataset, scorer)
            shown = "  ".join(f"{name} {value:.6g}" for name, value in means.items())
            log(f"{dataset.path} ({dataset.split}): {shown or 'no trained token'}")
        method_metrics = task.evaluate(snapshot, scorer)
        for name, value in method_metrics.items():
            log(f"{name:<32} {value:.6g}")
        if not (datasets or sets or method_metrics):
            raise UserError(
                "eval: there is nothing to evaluate, data.eval_datasets is empty; add"
                " data.eval_datasets.0.path=... or eval.sets.0.path=..."
            )
        if sets:
            folder = Path(config.run.output_dir)
            if run is not None and (run / "checkpoints").is_dir():
                folder = run
            generate_into(folder / "eval", config, task, snapshot, policies, log)


def silent(text: str) -> None:
    """Log nothing: for all processes but the first."""


def generate_into(
    folder: Path,
    config: Config,
    task: Task,
    snapshot: ModelSnapshot,
    policies: Mapping[str, ModelSnapshot],
    log: Callable[[str], None],
) -> None:
    """Answer the problem sets of section eval with the weights; prints the numbers, appends them to
    metrics.jsonl in `folder` and writes the answers to samples.jsonl there, anew. policies: of
    several that are trained each one's."""
    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.generation.engines import find_engine, with_secrets
    from jaxtrain.generation.evaluation.answers import ServingEngine, SetAnswers
    from jaxtrain.generation.evaluation.problem_sets import open_problem_sets
    from jaxtrain.runs.run_files import claim_names
    from jaxtrain.runs.samples import SAMPLES, append_samples
    from jaxtrain.runs.sinks import JsonLines

    parts, samples = snapshot.roles.bundle, folder / SAMPLES
    with ExitStack() as stack:
        sets = open_problem_sets(config, parts, log)
        if sets is not None:
            stack.callback(sets.close)
        if is_main_process():
            try:
                claim_names(folder.parent, [folder.name])
                folder.mkdir(parents=True, exist_ok=True)
                samples.write_text("")
            except OSError as error:
                raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
        engine, kind = None, find_engine(config)
        if kind.serves:
            # Adapters go to this folder, beside those of a run that may be under way.
            eval_run = config.run.model_copy(update={"output_dir": str(folder)})
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
            partial(append_samples, folder),
            ServingEngine(kind.serves, engine),
            log,
        )
        metrics = answers.measure(snapshot, policies)
        if is_main_process():
            file = JsonLines(folder / "metrics.jsonl")
            file.start(snapshot.step, snapshot.step)
            stack.callback(file.close, None)
            file.write(snapshot.step, metrics)
    for name, value in metrics.items():
        log(f"{name:<32} {value:.6g}")
    log(f"answers: {samples}")
