"""Evaluations of problem sets by servers that keep a version, while training goes on.

    loop thread    begin(step) ── keep ──> part of the engine    collect() ──> Found, between rounds
    "evaluation"       └── a thread: answers of all sets ────────────┘

One evaluation at a time. Its metrics belong to one version of the weights and are logged at that
version's step, even if they arrive later. An evaluation that lost its servers is repeated with the
weights of that time, as is one that the end of a run interrupted: a note in the folder of the run
records the evaluation in progress.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.errors import Interrupted
from jaxtrain.generation.engine import KeepLost, KeepsVersions, KeptEngine
from jaxtrain.generation.evaluation.problem_sets import ProblemSets
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.safe_io import read_text

NOTE = "evaluating.json"
CLOSE_SECONDS = 15.0
LOOK_SECONDS = 0.2
MAX_LOSSES = 3
"""Times in a row that an evaluation may lose its servers; then it waits for none but is answered by
all, between rounds."""


class BackgroundResult(NamedTuple):
    """A finished evaluation."""

    step: int
    numbers: dict[str, float]
    samples: list[dict[str, Any]]
    """Lines for samples.jsonl."""


class BackgroundEval:
    """Evaluation during training, on process 0. Used by the loop thread."""

    def __init__(
        self,
        engine: KeepsVersions,
        sets: ProblemSets,
        folder: Path,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        """should_stop: polled while waiting."""
        self.engine, self.sets, self.note = engine, sets, folder / NOTE
        self.should_stop = should_stop
        self.step: int | None = None
        """Step of the evaluation in progress."""
        self.asked_again = self._in_a_row = 0
        """Evaluations that lost their servers, in all and since one did not."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._found: BackgroundResult | None = None
        self._error: BaseException | None = None

    def begin(self, step: int) -> bool:
        """Begin to answer the sets with the engine's newest weights, those of `step`; returns False
        if no server can be spared."""
        assert self._thread is None, "one evaluation at a time"
        engine = self.engine.keep() if self._in_a_row < MAX_LOSSES else None
        if engine is None:
            return False
        with contextlib.suppress(OSError):  # a full disk costs the note, never the run
            write_atomically(self.note, json.dumps({"step": step}), durable=False)
        self.step, self._found, self._error = step, None, None
        self._thread = threading.Thread(
            target=self._answer, args=(engine, step), name="evaluation", daemon=True
        )
        self._thread.start()
        return True

    def collect(self, *, wait: bool = False) -> tuple[BackgroundResult | None, bool]:
        """Return (finished evaluation, whether it must be repeated); raises what else ended it.

        wait: until the current one has finished; Interrupted once the run is to stop.
        """
        thread = self._thread
        if thread is None or (thread.is_alive() and not wait):
            return None, False
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            if self.should_stop():
                raise Interrupted
        self._thread, self.step = None, None
        if isinstance(self._error, KeepLost):
            self.sets.log(f"the evaluation is asked again: {self._error}")
            self.asked_again += 1
            self._in_a_row += 1
            return None, True
        if self._error is not None:
            raise self._error
        self._in_a_row = 0
        return self._found, False

    def written(self) -> None:
        """Note that the collected numbers are in the run's folder."""
        with contextlib.suppress(OSError):
            self.note.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop the current evaluation; the note stays, so that a resumed run repeats it."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _answer(self, engine: KeptEngine, step: int) -> None:
        """Run the thread."""
        samples: list[dict[str, Any]] = []

        def keep_samples(_: int, lines: Iterable[dict[str, Any]]) -> None:
            samples.extend(lines)

        start, version = time.monotonic(), engine.version
        try:
            numbers = self.sets.run(engine, step, keep_samples, self._closed.is_set)
            numbers |= {
                "eval/policy_version": float(version),
                "eval/seconds": time.monotonic() - start,
            }
            if self.asked_again:
                numbers["eval/asked_again"] = float(self.asked_again)
            self._found = BackgroundResult(step, numbers, samples)
        except BaseException as error:  # handed over to the loop thread
            self._error = Interrupted() if self._closed.is_set() else error
        finally:
            engine.release()


def find_broken_off(folder: Path, step: int) -> int | None:
    """Return the step of an evaluation that the previous attempt of a run, which continues after
    `step`, began and did not finish; None if there is none, or if it comes up again by itself."""
    note = folder / NOTE
    try:
        eval_step = int(json.loads(read_text(note, 1024))["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    with contextlib.suppress(OSError):
        note.unlink()
    if eval_step > step or any(
        done >= eval_step for done in read_evaluated(folder / "metrics.jsonl")
    ):
        return None
    return eval_step


def read_evaluated(path: Path) -> Iterable[int]:
    """Yield the steps for which a metrics.jsonl has numbers of sets."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line) if '"eval/' in line else {}
                if any(name.startswith("eval/") for name in entry):
                    yield int(entry["step"])
            except (ValueError, TypeError, KeyError, AttributeError):  # a line that was cut off
                continue
