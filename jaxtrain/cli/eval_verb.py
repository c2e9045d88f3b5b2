"""The verb eval"""

import contextlib
import os
from pathlib import Path

from jaxtrain.cli.options import config_parser
from jaxtrain.cli.together import run_together, settle_before_jax
from jaxtrain.errors import UserError


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
        own = [word for word in overrides if word.startswith("parallel.")]
        try:
            return ParallelConfig(**apply_overrides({}, own).get("parallel", {}))
        except ValueError:  # told where all of the config is read
            return None

    def work(parallel) -> int:
        from jaxtrain.cli.eval import evaluate_command

        evaluate_command(Path(runs[0]) if runs else None, args.config, overrides)
        return 0

    folder = Path(runs[0]) if runs else None
    return run_together(read, lambda parallel: (parallel, folder), work)
