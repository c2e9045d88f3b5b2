"""Shared by the verbs with a config: their options, and work on all processes of a run."""

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxtrain.arguments import Parser
from jaxtrain.errors import RunStopped, UserError


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Context of a verb's imports. The collector of cycles would go through all modules again and
    again; it waits, and what is imported stays out of its later work."""
    if "flax" in sys.modules or not gc.isenabled():  # imported before: a program's own objects
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle_before_jax(config):
    """The config; what jax reads of the environment when it starts is as the config needs it: GPUs
    of servers that it has started are theirs from now on."""
    from jaxtrain.distributed.gpus import leave_gpus

    leave_gpus(config)
    return config


def run_together(read: Callable, join: Callable, work: Callable) -> int:
    """work(read()) on all processes that join(read()), a section `parallel` and the run's folder,
    and the environment name; what ends one of them is reported once."""
    plan = mistake = None
    try:
        plan = read()  # before jax, which takes all devices that it sees
    except UserError as error:
        mistake = error
    from jaxtrain.distributed.processes import join_by_config, report, shutdown

    try:
        if mistake is not None:
            join_by_config(None)  # so that this, too, is reported once
            raise mistake
        join_by_config(*join(plan))
        from jaxtrain.distributed.mesh import start_devices

        start_devices()
        code = work(plan)
        shutdown()
        return code
    except (UserError, RunStopped, KeyboardInterrupt) as error:
        report(error, {UserError: 2, RunStopped: 1}.get(type(error), 130))
        raise
    except Exception as error:
        report(error, 0)  # another process's end shows here as a collective that failed
        raise


def config_parser(verb: str, required: bool = True, first: str = "") -> Parser:
    """Build the parser of a verb with a config."""
    parser = Parser(f"jaxtrain {verb}")
    parser.add_argument(
        "--config",
        type=os.path.expanduser,
        required=required,
        help="TOML or YAML file, or the name of a config that comes with jaxtrain",
    )
    parser.add_argument("overrides", nargs="*", help=f"{first}section.key=value")
    return parser


def read_dataset(path: str, words: Sequence[str]):
    """Return the DatasetConfig of a path and of words "dataset.key=value"."""
    from jaxtrain.config import DatasetConfig
    from jaxtrain.config.load import apply_overrides, validate

    overrides = [f"data.datasets.0.{word.removeprefix('dataset.')}" for word in words]
    table = apply_overrides({"data": {"datasets": [{"path": path}]}}, overrides)
    return validate(DatasetConfig, table["data"]["datasets"][0], path)


def read_config(args: argparse.Namespace):
    """Load the Config that --config and the overrides name."""
    from jaxtrain.config import load_config

    return load_config(args.config, args.overrides)
