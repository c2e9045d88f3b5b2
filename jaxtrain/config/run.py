"""Sections about the run itself: run, checkpoint, log, parallel."""

from typing import Literal

from pydantic import Field

from jaxtrain.config.base import Section


class RunConfig(Section):
    """What is run, for how long, and where it lands."""

    output_dir: str = "runs/default"
    """Folder of the run: checkpoints, metrics.jsonl, logs, plots and the exported model."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps to train. Give this or num_epochs; streaming data needs this."""
    num_epochs: float | None = Field(None, gt=0)
    """Passes over the training data. Give this or max_steps."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, the data order and sampling."""
    resume: Literal["auto", "never", "required"] = "auto"
    """auto: go on from the newest good checkpoint in output_dir, if there is one; required: fail
    without one; never: refuse an output_dir that holds a run, unless overwrite is set."""
    overwrite: bool = False
    """Delete the run that output_dir holds and start again."""
    allow_config_change: bool = False
    """Resume although the saved config differs in keys that shape the result."""
    export: bool = True
    """Write the Hugging Face model folder <output_dir>/model when training ends."""


class ParallelConfig(Section):
    """The device mesh. At most one size may be -1: all devices that the others leave."""

    data: int = Field(1, ge=-1)
    """Devices that hold full copies of the weights and split the rows of a batch."""
    fsdp: int = Field(-1, ge=-1)
    """Devices that split the rows of a batch and the weights, too."""


class CheckpointConfig(Section):
    """When state is saved and what is kept."""

    every: int = Field(200, ge=1)
    """Steps between checkpoints; the last step and a stop by signal always save one."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Also keep every checkpoint whose step divides by this."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept as well, such as "eval/loss"."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the best value of best_metric is the smallest or the largest."""
    background: bool = True
    """Write checkpoints in the background while training goes on."""


class LogConfig(Section):
    """What people watch. metrics.jsonl is always written."""

    every: int = Field(1, ge=1)
    """Steps between lines of metrics.jsonl and the console."""
    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """auto: a live progress bar on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Also write TensorBoard event files to <output_dir>/tensorboard."""
    wandb_project: str | None = None
    """Also report to this Weights & Biases project."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases."""
    plot: bool = True
    """Draw <output_dir>/curves.png when training ends."""
    watchdog_seconds: float = Field(300.0, gt=0)
    """Say what is being waited for, and dump all stacks to <output_dir>/stacks.txt, when nothing
    has moved for this long."""
    profile_start: int | None = Field(None, ge=1)
    """First step of a jax.profiler trace, written to <output_dir>/profile."""
    profile_steps: int = Field(3, ge=1)
    """Number of steps that the trace covers."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one device in the compute dtype, for MFU; known for common accelerators."""
