"""Pushes what a run makes to a repository of the Hugging Face Hub, beside training.

    end              <run>/model when training ended by itself: model or adapter, and its card
    every_save       and at every checkpoint: exported from it by a process of its own, on the CPU
    checkpoint       and every checkpoint as last-checkpoint/, with which the run goes on elsewhere
    all_checkpoints  and every checkpoint as checkpoints/STEP/

    loop thread ── queue ──> thread "hub" ── a process a push (push.py) ──> the Hub

The token is HF_TOKEN's, or that of `hf auth login`. Whether it may write is tried at the start. A
push that fails costs a warning, never the run; files that the Hub has already are not sent again by
the next one. A checkpoint is pushed as hard links, so that the run may delete it meanwhile; of
several that wait only the newest is, but for all_checkpoints.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxtrain.config.base import Section
from jaxtrain.errors import UserError
from jaxtrain.runs.observers.protocol import ObservedRun
from jaxtrain.text_safety import escape_control_chars, shorten

TRIES, PAUSE = 3, 5.0
"""Times that a push is tried, and seconds before the second one; twice as many before the third."""
PUSH = [sys.executable, "-m", "jaxtrain.runs.observers.push"]
EXPORT = [sys.executable, "-m", "jaxtrain.main", "export"]

_REPO = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?\Z", re.ASCII)


class HubOptions(Section):
    """Its options."""

    repo: str
    """"name" or "owner/name"; made where it is not there."""
    strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "end"
    """What is pushed, and when."""
    private: bool = True
    """Of a repository that is made here; one that is there stays as it is."""
    branch: str | None = None
    """Pushed to; made where it is not there. Unset: main."""
    seconds: float = Field(1500.0, gt=0, le=86_400)
    """Longest that a push may take; and longest wait, at the end of the run, for what is still to
    be pushed."""

    @field_validator("repo")
    @classmethod
    def check_repo(cls, repo: str) -> str:
        """The Hub would say so only at the end."""
        if not _REPO.match(repo):
            raise ValueError('must be "name" or "owner/name" of a repository on the Hub')
        return repo


class MetricsHub:
    """Observer that pushes models and metrics to the Hugging Face Hub."""

    Section = HubOptions

    def __init__(self, options: HubOptions):
        from huggingface_hub import get_token

        self.options = options
        if not get_token():
            raise UserError(
                f"observer hub: there is no token to push to {options.repo} with; set HF_TOKEN, or"
                " run `hf auth login`"
            )
        self._queue: queue.SimpleQueue[tuple[str, int, Path | None] | None] = queue.SimpleQueue()
        self._repo, self._made = options.repo, False
        self._newest = -1
        self._refused = self._closing = self._over = False
        self._child: subprocess.Popen[str] | None = None

    def start(self, run: ObservedRun) -> None:
        """Refuse what would push nothing, and try the token."""
        self.run = run
        if self.options.strategy in ("end", "every_save") and not run.config["run"]["export"]:
            raise UserError(
                "observer hub pushes the exported model, but run.export is false; set it to true,"
                ' or strategy = "checkpoint"'
            )
        shutil.rmtree(run.home, ignore_errors=True)  # links of an attempt that was killed
        self._thread = threading.Thread(target=self._push_all, name="hub", daemon=True)
        self._thread.start()
        self._queue.put(("repository", run.start_step, None))

    def checkpoint(self, step: int, path: Path) -> None:
        """Keep its files until they are pushed."""
        if self.options.strategy == "end" or self._refused:
            return
        snapshot = self.run.home / str(step)
        shutil.rmtree(snapshot, ignore_errors=True)
        if self.options.strategy == "every_save":
            # A run of its own, of this checkpoint alone.
            shutil.copytree(path, snapshot / "checkpoints" / path.name, copy_function=_link)
            shutil.copy2(self.run.folder / "config.json", snapshot / "config.json")
        else:
            shutil.copytree(path, snapshot, copy_function=_link)
        self._newest = step
        self._queue.put(("checkpoint", step, snapshot))

    def end(self, state: str, message: str) -> None:
        """Push the model of a run that is through, and wait for all that is to be pushed."""
        model = self.run.folder / "model"
        if state == "finished" and self.run.config["run"]["export"] and model.is_dir():
            if self.options.strategy == "every_save":
                self._newest = self.run.total_steps + 1  # exports that wait are older than this
            self._queue.put(("model", self.run.total_steps, model))
        self._queue.put(None)
        self._closing = True
        self._thread.join(self.options.seconds)
        if self._thread.is_alive():
            self.run.log(
                f"warning: the push to {self.options.repo} was not over after"
                f" {self.options.seconds:g} s (seconds of the observer hub) and is given up;"
                f" hf upload {self.options.repo} {model}"
            )
            self._over = True
            if (child := self._child) is not None:
                child.kill()
        shutil.rmtree(self.run.home, ignore_errors=True)

    def _push_all(self) -> None:
        while (job := self._queue.get()) is not None:
            kind, step, path = job
            passed_over = self.options.strategy != "all_checkpoints" and step < self._newest
            if kind != "checkpoint" or not (passed_over or self._refused or self._over):
                self._push(kind, step, path)
            if kind == "checkpoint" and path is not None:
                shutil.rmtree(path, ignore_errors=True)

    def _push(self, kind: str, step: int, path: Path | None) -> None:
        """Push one item with its description."""
        named = f"{kind} of step {step}"
        if kind == "checkpoint" and self.options.strategy == "every_save":
            assert path is not None, "checkpoints have files"
            if problem := self._export(path):
                self.run.log(f"warning: the model of step {step} was not exported: {problem}")
                return
            kind, path, named = "model", path / "model", f"model of step {step}"
        for number in range(1, TRIES + 1):
            answer = self._ask(self._job(kind, step, path))
            if "repo" in answer:
                self._repo, self._made, self._refused = answer["repo"], True, False
                if path is not None:
                    self.run.log(f"{named} pushed to {self.options.repo}")
                return
            again = _may_pass(answer["status"])
            if number == TRIES or not again or self._over:
                break
            time.sleep(0 if self._closing and kind == "checkpoint" else PAUSE * number)
        self._refused = not again
        if self._over:
            return
        if path is None:
            advice = "; the run goes on, and the model is tried at its end"
        elif step == self.run.total_steps and kind == "model":
            advice = f"; hf upload {self.options.repo} {path}"
        else:
            advice = "; the model is tried at the end" if self._refused else "; the next is tried"
        failed = f"{named} was not pushed to" if path is not None else "nothing can be pushed to"
        self.run.log(f"warning: {failed} {self.options.repo}: {self._explain(answer)}{advice}")

    def _job(self, kind: str, step: int, path: Path | None) -> dict[str, Any]:
        options, target = self.options, None
        last = kind == "checkpoint" and options.strategy == "checkpoint"
        if kind == "checkpoint":
            target = "last-checkpoint" if last else f"checkpoints/{step}"
        return {
            "repo": self._repo,
            "private": options.private,
            "branch": options.branch,
            "make": not self._made,
            "folder": None if path is None else str(path),
            "message": f"{kind} of step {step}",
            "place": target,
            "clear": last,
        }

    def _explain(self, answer: dict[str, Any]) -> str:
        """For people: what the Hub has against it, and what helps."""
        status, repo = answer["status"], self.options.repo
        if status == 401:
            return (
                "the Hub does not know the token (status 401); set HF_TOKEN to one that may write,"
                " or run `hf auth login`"
            )
        if status in (403, 404):
            return (
                f"the token may not write to {repo} (status {status}); it needs the role write, and"
                " an owner that lets it"
            )
        prefix = f"status {status}: " if status is not None else ""
        return f"{prefix}{answer['kind']}: {shorten(escape_control_chars(answer['text']), 300)}"

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a push in a child process and return its outcome, within the time limit."""
        quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with self._running([*PUSH], quiet, stdin=subprocess.PIPE) as child:
            answers = child.stdout
            assert child.stdin is not None and answers is not None, "they are pipes"
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(job) + "\n")
                child.stdin.flush()
            lines: list[str] = []
            reader = threading.Thread(target=lambda: lines.append(answers.readline()))
            reader.daemon = True
            reader.start()
            reader.join(self.options.seconds)
            if reader.is_alive():
                child.kill()
                problem = f"it took longer than {self.options.seconds:g} s"
                return {"status": None, "kind": "TimeoutError", "text": problem}
        try:
            return json.loads(lines[0])
        except ValueError:  # it was killed
            problem = f"the process that pushes ended with {child.returncode}"
            return {"status": None, "kind": "OSError", "text": problem}

    def _export(self, run: Path) -> str:
        """Write the model of the one checkpoint in `run`; what went wrong, "" where nothing did."""
        alone = {"JAX_PLATFORMS": "cpu"}  # the run has the accelerators
        with self._running([*EXPORT, str(run)], alone, stderr=subprocess.PIPE) as child:
            try:
                _, errors = child.communicate(timeout=self.options.seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                return f"it took longer than {self.options.seconds:g} s"
        last = (errors.strip().splitlines() or [""])[-1]
        return (
            ""
            if child.returncode == 0
            else shorten(escape_control_chars(last), 300) or "it was ended"
        )

    @contextlib.contextmanager
    def _running(self, command: list[str], environment: dict[str, str], **pipes: Any):
        """A process that `end` may kill."""
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **pipes}
        child = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, **pipes
        )
        self._child = child
        try:
            with child:
                yield child
        finally:
            self._child = None


def _link(source: str, target: str) -> None:
    """A second name of the file where the disk has such, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _may_pass(status: int | None) -> bool:
    """Return whether an error may be transient; a refusal by the Hub is not."""
    return status is None or status in (408, 429) or status >= 500
