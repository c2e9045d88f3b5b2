"""Sections about the run itself: run, checkpoint, log, parallel."""

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import RESUMABLE, Place, Section, known_in
from jaxtrain.config.limits import ROWS, SECONDS, SEED


class RunConfig(Section):
    """The run: its length, its folder, and how it resumes."""

    output_dir: Annotated[Place, RESUMABLE] = "runs/default"
    """Folder of the run: checkpoints, metrics.jsonl, logs, plots and the exported model. Its
    run.json names what the run makes there; a folder in which something else has such a name, or
    that holds a model, is refused."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps to train. Give this or num_epochs; streaming data needs this. It wins where
    both are set: run.max_steps=2 makes a trial of any config."""
    num_epochs: float | None = Field(None, gt=0, le=1e6)
    """Passes over the training data. Give this or max_steps."""
    seed: int = Field(0, ge=0, le=SEED)
    """Seed of the initial weights, the data order and sampling."""
    resume: Annotated[Literal["auto", "never", "required"], RESUMABLE] = "auto"
    """auto: go on from the newest good checkpoint in output_dir, if there is one; required: fail
    without one; never: refuse an output_dir that holds a run, unless overwrite is set."""
    overwrite: Annotated[bool, RESUMABLE] = False
    """Delete what the run in output_dir made, by its run.json, and start again."""
    allow_config_change: Annotated[bool, RESUMABLE] = False
    """Resume although the saved config differs in keys that shape the result."""
    compile_cache: Annotated[bool, RESUMABLE] = True
    """Keep what is compiled in $JAX_COMPILATION_CACHE_DIR, else in jaxtrain/compiled of
    $XDG_CACHE_HOME or ~/.cache (20 GiB at most; programs for CPUs apart by the kind of CPU): the
    same run started again compiles nothing."""
    export: Annotated[bool, RESUMABLE] = True
    """Write the Hugging Face model folder <output_dir>/model when training ends."""

    @property
    def epochs(self) -> float | None:
        """Passes over the training data that end the run; None where max_steps does."""
        return None if self.max_steps else self.num_epochs


class ParallelConfig(Section):
    """The device mesh, and the processes around it. At most one size may be -1: all devices that
    the others leave."""

    data: int = Field(1, ge=-1, le=ROWS)
    """Devices that hold full copies of the weights and split the rows of a batch."""
    fsdp: int = Field(-1, ge=-1, le=ROWS)
    """Devices that split the rows of a batch and the weights, too."""
    expert: int = Field(1, ge=-1, le=ROWS)
    """Devices that split the experts of a mixture, and the rows of a batch."""
    context: int = Field(1, ge=-1, le=ROWS)
    """Devices that split the tokens of each row: for rows too long for one device."""
    tensor: int = Field(1, ge=-1, le=ROWS)
    """Devices that split each layer: heads, the feed-forward width and the vocabulary; between
    layers they split the tokens. For devices with a fast link."""
    expert_transport: Literal["auto", "gather", "exchange"] = "auto"
    """How tokens reach experts of other devices: each device of the expert axis gets all tokens of
    the axis; or each token goes to every device with one of its experts. auto: what sends less."""
    expert_buffer: float = Field(1.25, ge=1, le=1e6)
    """Rows that a device has room for, as a multiple of an even load. What does not fit waits for
    another round (metric expert_rounds); no token is dropped."""
    expert_chunks: int = Field(1, ge=1, le=64)
    """Pieces of a device's tokens that travel and are computed by turns, so that the one may hide
    behind the other."""
    expert_wide_sums: bool = False
    """Sum what devices add to a token in a fixed order and in float32, rounded once."""
    frozen: Annotated[Literal["device", "host"], RESUMABLE] = "device"
    """Where models that only score batches (references, judges, feature networks) wait during a
    step. host: in pinned memory of the hosts, copied to the devices for each batch that they score.
    """
    launcher: Literal["auto", "none", "slurm", "torchrun", "tpu"] = "auto"
    """How this process learns of the others: SLURM's variables (under srun), torchrun's
    (MASTER_ADDR, WORLD_SIZE, RANK, LOCAL_RANK), or a TPU pod's own. auto takes the first that is
    there; coordinator replaces all of them."""
    coordinator: str | None = None
    """host:port of process 0, where there is no launcher; goes with num_processes, process_id. The
    processes know each other by a token: see docs/distributed.md."""
    num_processes: int | None = Field(None, ge=1, le=ROWS)
    """Number of processes, with coordinator."""
    process_id: int | None = Field(None, ge=0)
    """Which of them this one is, from 0, with coordinator."""
    start_timeout: float = Field(300.0, gt=0, le=SECONDS)
    """Seconds that processes wait for each other at the start."""
    meet_timeout: float = Field(1800.0, gt=0, le=SECONDS)
    """Seconds that processes wait for each other at a later meeting point, such as the end."""
    peer_timeout: float = Field(60.0, gt=0, le=SECONDS)
    """Seconds without a sign of life after which a process counts as lost and the others stop."""

    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return {name: getattr(self, name) for name in MESH_AXES}


MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")


def find_parallel_conflicts(parallel: ParallelConfig):
    """Yield one sentence for each impossible combination within section parallel."""
    open_axes = [axis for axis, size in parallel.axes().items() if size == -1]
    if len(open_axes) > 1:
        yield (
            f"parallel.{open_axes[0]} and parallel.{open_axes[1]} are both -1; only one size may be"
            " -1 (all remaining devices)"
        )
    for axis, size in parallel.axes().items():
        if size == 0:
            yield f"parallel.{axis} is 0; sizes are at least 1, or -1 for all remaining devices"
    explicit = {name: getattr(parallel, name) for name in ("coordinator", *_WITH_COORDINATOR)}
    missing = [name for name, value in explicit.items() if value is None]
    if missing and len(missing) < len(explicit):
        set_key = next(name for name, value in explicit.items() if value is not None)
        yield (
            f"parallel.{set_key} is set but parallel.{missing[0]} is not; set all of {[*explicit]}"
        )
    elif not missing:
        assert parallel.process_id is not None and parallel.num_processes is not None
        assert parallel.coordinator is not None
        if parallel.process_id >= parallel.num_processes:
            yield (
                f"parallel.process_id {parallel.process_id} must be below parallel.num_processes"
                f" {parallel.num_processes}"
            )
        if not parallel.coordinator.rpartition(":")[2].isdigit():
            yield f"parallel.coordinator {parallel.coordinator!r} must be host:port"


_WITH_COORDINATOR = ("num_processes", "process_id")


class CheckpointConfig(Section):
    """When state is saved and what is kept."""

    every: int = Field(200, ge=1)
    """Steps between checkpoints. The last step, a stop by signal and an end by an error always save
    one: after an error the last good state."""
    per_epoch: float | None = Field(None, gt=0, le=1e6)
    """Also save so many times in each of run.num_epochs, evenly."""
    every_minutes: float | None = Field(30.0, gt=0, le=SECONDS)
    """Also save when so many minutes have passed since the last checkpoint, after the round that is
    under way; null: only by steps."""
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
    """Logs and dashboards. metrics.jsonl is always written."""

    every: int = Field(1, ge=1)
    """Steps between lines of metrics.jsonl and the console."""
    console: Literal["auto", "rich", "plain", "off"] = "auto"
    """auto: a live progress bar on a terminal, plain lines elsewhere and in notebooks."""
    tensorboard: bool = False
    """Also write TensorBoard event files to <output_dir>/tensorboard."""
    wandb_project: str | None = None
    """Also report to this Weights & Biases project: numbers, and once a minute at most a table of
    the newest answers (64 at most; samples.jsonl has all that were kept)."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases."""
    sinks: list[Annotated[str, known_in("sinks", ())]] = []
    """Further classes that get the run's numbers and events: an entry point's name,
    "package.module:Class" or "file.py:Class" each (docs/extending.md)."""
    plot: bool = True
    """Draw <output_dir>/curves.png when training ends."""
    report: bool = True
    """Write <output_dir>/report.html, a page about the run, when training ends."""
    watchdog_seconds: float = Field(300.0, gt=0, le=SECONDS)
    """Say what is being waited for, and dump all stacks to <output_dir>/stacks.txt, when nothing
    has moved for this long."""
    hardware_seconds: float = Field(15.0, ge=0, le=SECONDS)
    """Seconds between lines of <output_dir>/hardware/HOST.jsonl: use, memory, temperature and power
    of accelerators, memory, disk; 0: none. `jaxtrain watch` shows them."""
    profile_start: int | None = Field(None, ge=1)
    """First step of a jax.profiler trace, written to <output_dir>/profile, with what holds the
    devices' memory behind the last one (memory-0.prof, for pprof)."""
    profile_steps: int = Field(3, ge=1)
    """Number of steps that the trace covers."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak TFLOP/s of one device in the compute dtype, for MFU; known for common accelerators."""
