"""The verb `eval`: held-out loss and answers of a run's newest checkpoint or a config's model."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax

from jaxtrain.config import Config, load_config
from jaxtrain.core.assemble import Parts, abstract_params, assemble, open_params
from jaxtrain.core.step import make_eval
from jaxtrain.core.trained import open_trained
from jaxtrain.errors import UserError
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.parallel.mesh import is_main_process
from jaxtrain.rollout.open import open_engine
from jaxtrain.rollout.problem_sets import open_problem_sets
from jaxtrain.run.sinks import JsonLines
from jaxtrain.tasks import build_task
from jaxtrain.train.evaluate import Evaluation, held_out_loss, open_eval


def evaluate_command(run: Path | None, config_path: str | None, overrides: list[str]) -> None:
    """The verb `eval`: held-out loss and answered problems of a run's newest checkpoint, or of a
    config's model. What is generated goes to the folder `eval` in the run's. Of several processes
    the first answers, prints and writes."""
    say = print if is_main_process() else silent
    if run is not None:
        trained = open_trained(str(run), overrides)
        config, parts, step = trained.config, trained.parts, trained.step
        params, rebuild = trained.params, trained.rebuild
        say(f"{run}, step {step}")
    else:
        config, step = load_config(config_path, overrides), 0
        parts = assemble(config)
        params, rebuild = open_params(parts, config.run.seed), abstract_params(parts)[1]
    datasets, generates = config.data.eval_datasets, config.eval.sets
    if not datasets and not generates:
        raise UserError(
            "eval: there is nothing to evaluate, data.eval_datasets is empty; add"
            " data.eval_datasets.0.path=... or eval.sets.0.path=..."
        )
    with jax.set_mesh(parts.mesh):
        if datasets:
            evaluate = make_eval(rebuild, build_task(config).loss)
        for dataset in datasets:
            means = held_out_loss(evaluate, params, open_eval(config, parts, dataset), parts.mesh)
            shown = "  ".join(f"{name} {value:.6g}" for name, value in means.items())
            say(f"{dataset.path} ({dataset.split}): {shown or 'no trained token'}")
        if generates:
            of_run = run is not None and (run / "checkpoints").is_dir()
            folder = (run if of_run else Path(config.run.output_dir)) / "eval"
            generate_into(folder, config, parts, params, rebuild, step, say)


def silent(text: str) -> None:
    """What all processes but the first say."""


def generate_into(
    folder: Path,
    config: Config,
    parts: Parts,
    params: Params,
    rebuild: Rebuild,
    step: int,
    say: Callable[[str], None],
) -> None:
    """Let the weights answer what section eval asks; prints the numbers, appends them to
    metrics.jsonl in `folder` and writes the answers to samples.jsonl there, anew."""
    samples = folder / "samples.jsonl"
    with ExitStack() as stack:
        sets = open_problem_sets(config, parts, say)
        if sets is not None:
            stack.callback(sets.close)
        if is_main_process():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                samples.write_text("")
            except OSError as error:
                raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
        engine = None
        if config.rollout.engine == "vllm":
            # Adapters go to this folder, beside those of a run that may be under way.
            place = config.run.model_copy(update={"output_dir": str(folder)})
            engine, publisher = open_engine(config.model_copy(update={"run": place}), parts, say)
            stack.callback(publisher.close)
            publisher.publish(0, params, rebuild)
        evaluation = Evaluation(config, parts, say, samples, sets, engine)
        found = evaluation.generate(params, rebuild, step)
        if is_main_process():
            file = JsonLines(folder / "metrics.jsonl")
            file.start(step, step)
            stack.callback(file.close, None)
            file.write(step, found)
    for name, value in found.items():
        say(f"{name:<32} {value:.6g}")
    say(f"answers: {samples}")
