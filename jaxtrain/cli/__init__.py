"""The verbs of the command line: arguments, purpose and module of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """Verb of the command line: its arguments, its purpose in a line of --help, and its target,
    the function "cli.module:function" that reads the remaining arguments and returns the exit code
    or None. The module is imported when the verb is called and imports nothing heavy by itself."""

    arguments: str
    purpose: str
    target: str

    @property
    def function(self) -> str:
        """The function, "package.module:function"."""
        return f"jaxtrain.{self.target}"


VERBS = {
    "quickstart": Verb(
        "[section.key=value ...]",
        "train a small model from nothing: minutes",
        "cli.recipes:run_quickstart",
    ),
    "init": Verb(
        "[NAME] [--output FILE]", "copy a config that comes with jaxtrain", "cli.recipes:run_init"
    ),
    "doctor": Verb(
        "[--config FILE] [--json]",
        "what is installed here, what does not fit",
        "runs.doctor.command:doctor_command",
    ),
    "preprocess": Verb(
        "--config FILE", "tokenize, validate, show samples", "cli.preprocess:run_preprocess"
    ),
    "capture": Verb(
        "--config FILE",
        "states of a draft's target, onto disk or over HTTP",
        "cli.capture:run_capture",
    ),
    "eval": Verb("RUN | --config FILE", "held-out loss, problems answered", "cli.eval:run_eval"),
    "compare": Verb(
        "A B", "how much better one evaluation is than another", "cli.compare:run_compare"
    ),
    "generate": Verb(
        "RUN|MODEL [--prompt TEXT]",
        "answer prompts; without one: a conversation",
        "cli.generate:run_generate",
    ),
    "serve": Verb(
        "RUN|MODEL [--port N]", "answer over HTTP in OpenAI's form", "cli.serve:run_serve"
    ),
    "chat": Verb("RUN|MODEL|URL", "a conversation in the terminal", "cli.chat:run_chat"),
    "speculate": Verb(
        "RUN|MODEL --draft FOLDER",
        "what a draft model is worth: tau, speed",
        "cli.speculate:run_speculate",
    ),
    "score": Verb(
        "RUN|MODEL DATA --output FILE",
        "scores of a reward model, row by row",
        "cli.score:run_score",
    ),
    "export": Verb(
        "RUN|MODEL [--output FOLDER]", "write a Hugging Face model folder", "cli.export:run_export"
    ),
    "merge": Verb(
        "RUN|ADAPTER [--base MODEL]", "adapter and base as one model folder", "cli.merge:run_merge"
    ),
    "quantize": Verb(
        "RUN|MODEL --scheme fp8|int8|int4",
        "weights in few bits, for vLLM",
        "cli.quantize:run_quantize",
    ),
    "sweep": Verb(
        "SWEEP.toml [--jobs N] [--print]",
        "many runs of a config: grid, random, tpe",
        "cli.sweep:run_sweep",
    ),
    "serve-rollouts": Verb(
        "--config FILE",
        "a rollout service on Ray that outlives runs",
        "cli.serve_rollouts:serve_rollouts",
    ),
    "stop-rollouts": Verb("NAME", "end a rollout service", "cli.serve_rollouts:stop_rollouts"),
    "watch": Verb(
        "RUN [RUN ...]",
        "dashboard in the terminal, live or afterwards",
        "runs.dashboard.command:watch_command",
    ),
    "report": Verb(
        "RUN [RUN ...] [-o FILE]", "one HTML file about runs", "runs.report.command:report_command"
    ),
    "plot": Verb("RUN [RUN ...] [--output FILE]", "draw curves", "runs.plot:plot_command"),
    "convert": Verb(
        "FILE [FILE ...] [--output FILE]",
        "a config of Axolotl, LLaMA-Factory, TRL or prime-rl as ours",
        "cli.convert:run_convert",
    ),
    "models": Verb(
        "[FOLDER or config.json]",
        "supported families, or a model's layers and the memory to train it",
        "cli.models:run_models",
    ),
    "plugins": Verb(
        "[--load]", "what installed packages bring, and what clashes", "cli.plugins:run_plugins"
    ),
    "docs": Verb("", "every key as Markdown", "cli.reference:run_docs"),
    "schema": Verb("[--output FILE]", "every key as JSON schema", "cli.reference:run_schema"),
}

TRAINING = {
    "--config FILE [section.key=value ...]": "train",
    "--config FILE --dry-run": "check everything, allocate nothing",
}

NOTES = """
RUN is a run's output_dir, MODEL a Hugging Face folder or Hub id. A verb's own options: -h after it.
`python -m jaxtrain.main` is the same program. `jaxtrain --help` lists every config key, `--version`
what is installed.
"""


def write_usage() -> str:
    """Return the usage text, a line for every verb."""
    lines = [(arguments, purpose) for arguments, purpose in TRAINING.items()]
    lines += [(f"{name} {verb.arguments}".rstrip(), verb.purpose) for name, verb in VERBS.items()]
    shown = [f"  jaxtrain {form:<42} {purpose}" for form, purpose in lines]
    return "\n".join(["usage:", *shown, NOTES])
