"""The loop of a sweep: as many trials at once as there is room for, until none is left.

A signal is passed on to all of them; each saves and ends, and stays in the study as one that runs,
which the next start of the sweep goes on with.
"""

import csv
import io
import os
import shlex
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.config.secrets import redact_command
from jaxtrain.distributed.gpus import list_gpus
from jaxtrain.errors import UserError
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.runs.sweep.space import (
    SweepFile,
    check_trials,
    list_checked,
    list_grid,
    name_trial,
    read_values,
)
from jaxtrain.runs.sweep.study import RequestedTrial, Study, draw_random
from jaxtrain.runs.sweep.trial import Start, TrialRun, make_process, write_command
from jaxtrain.text_safety import show

LOOK_SECONDS = 1.0
SHOWN = 10
"""Trials of the table at the end."""
LogFunction = Callable[[str], None]


class Sweep:
    """Share of a sweep that this process runs."""

    def __init__(
        self,
        file: SweepFile,
        study: Study,
        log: LogFunction,
        *,
        make: Start = make_process,
        wait: Callable[[threading.Event], Any] = lambda stopped: stopped.wait(LOOK_SECONDS),
        environ: Mapping[str, str] = os.environ,
    ):
        """make, wait: what starts a process, and what passes the time between two looks at all."""
        self.file, self.study, self.log = file, study, log
        self.make, self.wait, self.environ = make, wait, environ
        self.free = split_gpus(file.sweep.jobs, environ)
        self.running: list[TrialRun] = []
        self.stopped = threading.Event()
        self.failed = 0
        self.hopeless = False
        """True if no further trial should start."""

    def run(self) -> int:
        """Until nothing is left to try, or a signal came; how many trials failed."""
        with watch_signals(self.stopped):
            while True:
                while self.free and not (self.stopped.is_set() or self.hopeless):
                    if not self.start_next():
                        break
                if not self.running:
                    break
                self.wait(self.stopped)
                if self.stopped.is_set():
                    for trial in self.running:
                        trial.stop()
                for trial in list(self.running):
                    self.look(trial)
        self.write_table()
        return self.failed

    def start_next(self) -> bool:
        """Start a trial; False where there is none."""
        requested = self.study.ask()
        if requested is None:
            return False
        trial = self.open(requested)
        trial.read()
        if trial.state == "finished":  # by a command that --print gave
            self.settle(trial, 0)
            return True
        trial.gpus = self.free.pop(0)
        self.running.append(trial)
        self.log(f"{trial.name}: {'goes on' if requested.resumed else 'started'}")
        trial.start(self.make, self.environ)
        return True

    def open(self, requested: RequestedTrial) -> TrialRun:
        """The trial with its folder; nothing starts."""
        return TrialRun(requested, read_values(requested.params), self.file.sweep, None)

    def look(self, trial: TrialRun) -> None:
        """Take in what a trial wrote; prune it, or see that it ended."""
        assert trial.process is not None
        status = trial.process.poll()
        points = trial.read()
        if status is None:
            prunes = self.file.sweep.prune != "none" and not trial.pruned
            if points and prunes and self.study.report(trial.number, points):
                trial.pruned = True
                step, value = points[-1]
                metric = self.file.sweep.metric
                self.log(f"{trial.name}: pruned at step {step}, {metric} {value:.6g}")
                trial.stop()
            return
        self.running.remove(trial)
        self.free.append(trial.gpus)
        self.settle(trial, status)

    def settle(self, trial: TrialRun, status: int) -> None:
        """Record and log the outcome of a trial."""
        metric, value = self.file.sweep.metric, trial.value
        if status == 0 and trial.state == "finished" and value is not None:
            self.study.record(trial.number, value, "complete")
            self.log(f"{trial.name}: {metric} {value:.6g}")
        elif trial.pruned:
            self.study.record(trial.number, None, "pruned")
        elif status == 0 and trial.state == "finished":
            self.study.record(trial.number, None, "fail")
            self.failed += 1
            logged = ", ".join(sorted(trial.run.metrics)[:40])
            self.log(f"{trial.name}: finished without sweep.metric {show(metric)}; it has {logged}")
            self.hopeless = True  # no trial will have it
        elif self.stopped.is_set() or (status == 0 and trial.state == "stopped"):
            self.study.left.add(trial.number)
            self.log(f"{trial.name}: interrupted; the same sweep goes on with it")
        else:
            self.study.record(trial.number, None, "fail")
            self.failed += 1
            lines = "".join(f"\n    {line}" for line in trial.last_lines())
            self.log(f"{trial.name}: failed (exit code {status}); {trial.log}:{lines}")
        trial.release()
        self.write_table()

    def write_table(self) -> None:
        """sweep.csv: a line a trial."""
        text = io.StringIO()
        rows = list_results(self.study)
        keys = sorted({key for row in rows for key in row["values"]})
        table = csv.writer(text)
        table.writerow(["trial", "state", self.file.sweep.metric, "folder", *keys])
        for row in rows:
            row_values = [row["values"].get(key, "") for key in keys]
            value = "" if row["value"] is None else row["value"]
            table.writerow([row["number"], row["state"], value, row["name"], *row_values])
        with self.study.locked():
            write_atomically(self.study.folder / "sweep.csv", text.getvalue(), durable=False)

    def log_best(self) -> None:
        """The best trials, and where to look."""
        rows = list_results(self.study)
        done = [row for row in rows if row["state"] == "complete"]
        sign = 1 if self.file.sweep.mode == "min" else -1
        for row in sorted(done, key=lambda row: sign * row["value"])[:SHOWN]:
            self.log(f"{row['value']:>12.6g}  {row['name']}")
        counts: dict[str, int] = {}
        for row in rows:
            counts[row["state"]] = counts.get(row["state"], 0) + 1
        if open_ones := counts.pop("running", 0):
            counts["unfinished"] = open_ones
        folder = self.study.folder
        self.log(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
        self.log(f"table: {folder / 'sweep.csv'}; compare: jaxtrain watch {folder}")


def list_results(study: Study) -> list[dict[str, Any]]:
    """number, name, state, value and values of every trial."""
    results = []
    for trial in study.trials():
        values = read_values(trial.params or trial.system_attrs.get("fixed_params", {}))
        row = {"number": trial.number, "name": name_trial(trial.number, values), "values": values}
        state = trial.state.name.lower()
        row |= {"state": state, "value": trial.value if state == "complete" else None}
        results.append(row)
    return results


def split_gpus(jobs: int, environ: Mapping[str, str]) -> list[Any]:
    """A share of this machine's GPUs for each job, or None each where there are none."""
    gpus = [] if environ.get("JAX_PLATFORMS") == "cpu" else list_gpus(dict(environ))
    if not gpus or jobs == 1:
        return [None] * jobs
    if jobs > len(gpus):
        raise UserError(f"sweep.jobs {jobs} is more than the {len(gpus)} GPUs here; lower it")
    share = len(gpus) // jobs
    return [gpus[job * share : (job + 1) * share] for job in range(jobs)]


@contextmanager
def watch_signals(stopped: threading.Event):
    """Set `stopped` on SIGTERM or SIGINT; a second one ends at once."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number, frame):
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def sweep_command(
    file: SweepFile, *, show_only: bool, retry: bool, log: LogFunction = print
) -> int:
    """Check all trials, then run them, or print what would run each."""
    sampler = {"grid": list_grid, "random": draw_random}.get(file.sweep.method)
    check_trials(file, list_checked(file))
    if show_only:
        if sampler is None:
            raise UserError("--print: tpe chooses by results; print a grid, or method random")
        for number, params in enumerate(sampler(file)):
            values = read_values(params)
            folder = Path(file.sweep.output_dir) / name_trial(number, values)
            log(shlex.join(redact_command(write_command(file.sweep, folder, values))))
        return 0
    split_gpus(file.sweep.jobs, os.environ)  # told before a folder is made
    study = Study(file)
    if retry:
        log(f"{study.retry()} failed trials are tried again")
    sweep = Sweep(file, study, log)
    failed = sweep.run()
    sweep.log_best()
    if sweep.stopped.is_set():
        log("interrupted: the same command goes on")
    return 1 if failed else 0
