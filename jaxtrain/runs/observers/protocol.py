"""Observer protocol: the events of a run that it receives. No jax here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from jaxtrain.runs.records import read_records

Verdict: TypeAlias = Literal["save", "evaluate", "stop"] | None
"""Request to the run, handled after the current round. stop: end there as after the last step, with
a checkpoint and an export."""
VERDICTS = ("save", "evaluate", "stop")


@dataclass(frozen=True)
class ObservedRun:
    """View of the run for observers."""

    folder: Path
    """The run's output_dir."""
    home: Path
    """Folder for this observer's own files; the observer creates it."""
    config: Mapping[str, Any]
    """All config keys, without secrets."""
    total_steps: int
    start_step: int
    """Steps done by earlier attempts."""
    attempt: int
    log: Callable[[str], None]
    """Logs a line to the console and log.txt. May be called from any thread."""
    alert: Callable[[str], None]
    """Logs a warning and passes it to the other observers. Only for the loop's thread."""

    def earlier(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl up to `start_step`, {"step": ..., "loss": ...}, from
        which an observer restores its state. Non-finite numbers are None."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            for record in read_records(path):
                if record.value is not None:
                    yield record.value


class Observer(Protocol):
    """A class, made with its options; it has those of these methods that it needs.

    They are called on process 0, on the thread that trains, once the numbers are on the host: what
    takes more than a moment belongs into a thread of its own. Whatever a method raises switches the
    observer off with one warning. Each may return a verdict.
    """

    def start(self, run: ObservedRun) -> Verdict:
        """Training is about to begin. A UserError ends the run before it does."""

    def step(self, step: int, values: Mapping[str, float]) -> Verdict:
        """The numbers of one optimizer step, whatever log.every says; one step late."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> Verdict:
        """The numbers of an evaluation of the weights after `step`: "eval/loss", ..."""

    def checkpoint(self, step: int, path: Path) -> Verdict:
        """The checkpoint in this folder is complete; a later one may delete it."""

    def publish(self, version: int, metrics: Mapping[str, float]) -> Verdict:
        """Handle new weights at the sampler; `version` counts the rounds that were trained."""

    def samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> Verdict:
        """Answers of the model, as they go to samples.jsonl."""

    def round(self, groups: Sequence[Any]) -> Verdict:
        """The judged `episodes.Group`s of a round, before they are trained: to read only."""

    def alert(self, text: str) -> Verdict:
        """Another observer has warned of something."""

    def end(self, state: str, message: str) -> None:
        """The run is over and everything is written: "finished", "stopped" (a signal, whose name
        is the message) or "failed" (the error)."""
