"""Pushes what a run makes to a repository of the Hugging Face Hub, from a thread of its own.

    end              <run>/model when training ended by itself: model or adapter, and its card
    checkpoint       and every checkpoint as last-checkpoint/, with which the run goes on elsewhere
    all_checkpoints  and every checkpoint as checkpoints/STEP/

The token is HF_TOKEN's, or that of `hf auth login`. A push that fails costs a warning, never the
run; files that the Hub has already are not sent again by the next one. A checkpoint is pushed as
hard links, so that the run may delete it meanwhile; of several that wait only the newest is, but
for all_checkpoints.
"""

import os
import queue
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxtrain.config.base import Section
from jaxtrain.errors import UserError
from jaxtrain.observers.types import Run
from jaxtrain.shown import printable, shorten

TRIES, PAUSE = 3, 5.0
"""Times that a push is tried, and seconds before the second one; twice as many before the third."""

_REPO = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?\Z", re.ASCII)


class Options(Section):
    """Its options."""

    repo: str
    """"name" or "owner/name"; made where it is not there."""
    strategy: Literal["end", "checkpoint", "all_checkpoints"] = "end"
    """What is pushed, and when."""
    private: bool = True
    """Of a repository that is made here; one that is there stays as it is."""
    branch: str | None = None
    """Pushed to; made where it is not there. Unset: main."""
    seconds: float = Field(1500.0, gt=0, le=86_400)
    """Longest wait, at the end of the run, for what is still to be pushed."""

    @field_validator("repo")
    @classmethod
    def check_repo(cls, repo: str) -> str:
        """The Hub would say so only at the end."""
        if not _REPO.match(repo):
            raise ValueError('must be "name" or "owner/name" of a repository on the Hub')
        return repo


class Hub:
    """See the module."""

    Section = Options

    def __init__(self, options: Options):
        from huggingface_hub import HfApi, get_token

        self.options = options
        if not get_token():
            raise UserError(
                f"observer hub: there is no token to push to {options.repo} with; set HF_TOKEN, or"
                " run `hf auth login`"
            )
        self.api = HfApi(library_name="jaxtrain")
        self._queue: queue.SimpleQueue[tuple[str, int, Path] | None] = queue.SimpleQueue()
        self._made = False
        self._newest = -1
        self._closing = False

    def start(self, run: Run) -> None:
        """Refuse what would push nothing."""
        self.run = run
        if self.options.strategy == "end" and not run.config["run"]["export"]:
            raise UserError(
                "observer hub pushes the exported model, but run.export is false; set it to true,"
                ' or strategy = "checkpoint"'
            )
        shutil.rmtree(run.home, ignore_errors=True)  # links of an attempt that was killed
        self._thread = threading.Thread(target=self._push_all, name="hub", daemon=True)
        self._thread.start()

    def checkpoint(self, step: int, path: Path) -> None:
        """Keep its files until they are pushed."""
        if self.options.strategy == "end":
            return
        kept = self.run.home / str(step)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(path, kept, copy_function=_link)
        self._newest = step
        self._queue.put(("checkpoint", step, kept))

    def end(self, state: str, message: str) -> None:
        """Push the model of a run that is through, and wait for all that is to be pushed."""
        model = self.run.folder / "model"
        if state == "finished" and self.run.config["run"]["export"] and model.is_dir():
            self._queue.put(("model", self.run.total_steps, model))
        self._queue.put(None)
        self._closing = True
        self._thread.join(self.options.seconds)
        if self._thread.is_alive():
            self.run.say(
                f"warning: the push to {self.options.repo} was not over after"
                f" {self.options.seconds:g} s (seconds of the observer hub) and is given up;"
                f" hf upload {self.options.repo} {model}"
            )
        shutil.rmtree(self.run.home, ignore_errors=True)

    def _push_all(self) -> None:
        while (one := self._queue.get()) is not None:
            what, step, path = one
            passed_over = self.options.strategy == "checkpoint" and step < self._newest
            if what == "model" or not passed_over:
                self._push(what, step, path)
            if what == "checkpoint":
                shutil.rmtree(path, ignore_errors=True)

    def _push(self, what: str, step: int, path: Path) -> None:
        for number in range(1, TRIES + 1):
            try:
                self._upload(what, step, path)
            except Exception as error:  # the border: network, rights, disk; the run goes on
                problem = shorten(printable(str(error).strip().partition("\n")[0]), 300)
                if number == TRIES or not _may_pass(error):
                    advice = (
                        f"; hf upload {self.options.repo} {path}"
                        if what == "model"
                        else "; the next one is tried again"
                    )
                    self.run.say(
                        f"warning: {what} of step {step} was not pushed to {self.options.repo}:"
                        f" {type(error).__name__}: {problem}{advice}"
                    )
                    return
                time.sleep(0 if self._closing and what == "checkpoint" else PAUSE * number)
            else:
                self.run.say(f"{what} of step {step} pushed to {self.options.repo}")
                return

    def _upload(self, what: str, step: int, path: Path) -> None:
        api, options = self.api, self.options
        if not self._made:
            url = api.create_repo(options.repo, private=options.private, exist_ok=True)
            self._repo = url.repo_id
            if options.branch is not None:
                api.create_branch(self._repo, branch=options.branch, exist_ok=True)
            self._made = True
        place: dict[str, Any] = {}
        if what == "checkpoint":
            last = options.strategy == "checkpoint"
            folder = "last-checkpoint" if last else f"checkpoints/{step}"
            # Of an older checkpoint there nothing may stay.
            place = {"path_in_repo": folder, "delete_patterns": "*" if last else None}
        api.upload_folder(
            repo_id=self._repo,
            folder_path=path,
            revision=options.branch,
            commit_message=f"{what} of step {step}",
            **place,
        )


def _link(source: str, target: str) -> None:
    """A second name of the file where the disk has such, else a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _may_pass(error: Exception) -> bool:
    """Whether the same may work in a moment: not where the Hub has refused it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status == 429 or status >= 500
